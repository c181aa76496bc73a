"""Adapters of an encoder or language model: their sizes, new ones, and files in PEFT's format.

A folder of the library PEFT holds `adapter_config.json` and `adapter_model.safetensors`, whose
tensors are called `base_model.model.` + the module's name in Hugging Face's model +
`.lora_A.weight` (r, in) or `.lora_B.weight` (out, r).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from qrag_jax.errors import InputError, Natural, Positive, Rule
from qrag_jax.models.compute.linear import LORA_A, LORA_B
from qrag_jax.models.files.weight_names import LeafPath, NameTable, leaves_of
from qrag_jax.models.trunks.trunk import LAYERS, Params, Trunk
from qrag_jax.runtime.config_fields import internal
from qrag_jax.runtime.whole_files import write_json

Dropped = Annotated[float, Rule(lambda share: 0 <= share < 1, "give a share from 0 to below 1")]
ALL_LINEAR = "all-linear"
EMBEDDINGS, CAUSAL_LM = "FEATURE_EXTRACTION", "CAUSAL_LM"  # names of PEFT
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDINGS = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
LIBRARY = "transformers.models."  # prefix of the Python module with the base's class


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the model."""

    rank: Natural = 0  # r; 0: train the model itself
    alpha: Positive = 16.0  # an adapter's product is scaled by alpha / r
    # Maps that get an adapter: "all-linear", or names as in the model's files, whole or their end
    # after a dot: ("query", "attention.output.dense"); a text is split at commas
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: Dropped = 0.0  # share of an adapter's inputs that training drops
    section: str = internal("encoder")  # of the config, for messages

    @property
    def sizes(self) -> Self | None:
        """Sizes of new adapters; None if there are none."""
        return self if self.rank else None

    @property
    def scale(self) -> float:
        """s, the factor on A·B."""
        return self.alpha / self.rank


def target_modules(
    table: NameTable, targets: str | tuple[str, ...], section: str = "encoder"
) -> dict[LeafPath, str]:
    """The linear maps that `targets` name: path in the parameter tree → Hugging Face's name.

    The names contain `{}` in the place of the layer's number.
    """
    linear = {
        path[:-1]: name.removesuffix(".weight")
        for path, name in table.names.items()
        if path[0] == LAYERS and path[-1] == "kernel"
    }
    if targets == ALL_LINEAR:
        return linear
    names = tuple(filter(None, targets.split(","))) if isinstance(targets, str) else targets

    def has(module: str, name: str) -> bool:
        return f".{module}".endswith(f".{name}")

    known = sorted({module.rpartition(".")[2] for module in linear.values()})
    unknown = [name for name in names if not any(has(m, name) for m in linear.values())]
    if unknown or not names:
        raise InputError(
            f"config.{section}.lora.targets names {', '.join(map(repr, unknown)) or 'nothing'}; "
            f"use {ALL_LINEAR!r} or names among {', '.join(known)}, the linear maps of this "
            "model's layers."
        )
    return {path: m for path, m in linear.items() if any(has(m, name) for name in names)}


def _kernel_shapes(module: Trunk) -> dict[LeafPath, tuple[int, ...]]:
    """Path of every linear map in the layers → shape of its stacked kernels, `(n, in, out)`."""
    return {at[:-1]: (n, *shape) for at, n, shape in leaves_of(module) if at[-1] == "kernel"}


def new_adapters(table: NameTable, module: Trunk, config: LoraConfig, seed: int) -> Params:
    """New adapters, which change no output yet: A is uniform in ±1/√in as in PEFT, B is zero."""
    rng, shapes = np.random.default_rng(seed), _kernel_shapes(module)
    leaves: dict[LeafPath, np.ndarray] = {}
    for path in sorted(target_modules(table, config.targets, config.section)):
        layers, width_in, width_out = shapes[path]
        a = rng.uniform(-1, 1, (layers, width_in, config.rank)) / np.sqrt(width_in)
        leaves[*path, LORA_A] = a.astype(np.float32)
        leaves[*path, LORA_B] = np.zeros((layers, config.rank, width_out), np.float32)
    return unflatten_dict(leaves)


def write_adapters(
    folder: Path, table: NameTable, config: LoraConfig, adapters: Params, *, task: str = EMBEDDINGS
) -> None:
    """Writes the adapters of one tower, as `PeftModel.from_pretrained(base, folder)` reads them.

    The targets of `config` are not used; `task` is PEFT's name of what the model is for.
    """
    linear, leaves = target_modules(table, ALL_LINEAR), flatten_dict(adapters)
    tensors = {
        # save_file ignores strides
        PREFIX + linear[path[:-1]].format(i) + ENDINGS[path[-1]]: np.ascontiguousarray(array.T)
        for path, stack in leaves.items()
        for i, array in enumerate(np.asarray(stack))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    kind = table.model_type.replace("-", "_")
    settings = {
        "peft_type": "LORA",
        "task_type": task,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted({_within_layer(table, path[:-1]) for path in leaves}),
        "bias": "none",
        "auto_mapping": {  # the base's class and its Python module
            "base_model_class": table.architecture,
            "parent_library": f"{LIBRARY}{kind}.modeling_{kind}",
        },
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    write_json(folder / CONFIG_NAME, settings)


def _within_layer(table: NameTable, place: LeafPath) -> str:
    """Hugging Face's name of a module, relative to its layer."""
    return table.names[*place, "kernel"].removesuffix(".weight").partition("{}.")[2]
