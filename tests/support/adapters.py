"""Reads adapters in PEFT's format, which the package writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from qrag_jax.models.files.weight_names import PREFIXES, NameTable, leaves_of
from qrag_jax.models.pretrained import (
    ALL_LINEAR,
    ENDINGS,
    PREFIX,
    LoadedEncoder,
    LoraConfig,
    target_modules,
)
from qrag_jax.models.trunks.transformer import Params, Transformer


def read_adapters(folder: Path, table: NameTable, module: Transformer) -> tuple[LoraConfig, Params]:
    """The sizes of the adapters of one tower of `module`, and their tree of float32 arrays."""
    said = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors = {name.removeprefix(PREFIX): array for name, array in tensors.items()}
    layers = {path[:-1]: count for path, count, _ in leaves_of(module)}
    leaves = {}
    for place, name in target_modules(table, ALL_LINEAR).items():
        for leaf, ending in ENDINGS.items():
            names = [name.format(layer) + ending for layer in range(layers[place])]
            for prefix in PREFIXES:
                if prefix + names[0] in tensors:
                    found = [tensors.pop(prefix + each).T for each in names]
                    leaves[*place, leaf] = np.stack(found).astype(np.float32)
    assert not tensors
    config = LoraConfig(said["r"], said["lora_alpha"], dropout=said["lora_dropout"])
    return config, unflatten_dict(leaves)


def with_adapters(loaded: LoadedEncoder, folder: Path) -> LoadedEncoder:
    config, adapters = read_adapters(folder, loaded.table, loaded.trunk)
    encoder = dataclasses.replace(
        loaded.encoder, lora_scale=config.scale, lora_dropout=config.dropout
    )
    return dataclasses.replace(loaded, encoder=encoder, adapters=adapters)
