"""New adapters for an encoder: their sizes, and the linear maps that get one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.errors import InputError
from qrag_jax.models.compute.linear import LORA_A, LORA_B
from qrag_jax.models.files.weight_names import LeafPath, NameTable
from qrag_jax.models.trunks.trunk import LAYERS, Params, Trunk

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Sizes of the adapters.

    Attributes:
        rank: r.
        alpha: s·r.
        targets: `ALL_LINEAR`, or names of modules as in Hugging Face's models: the whole name or
            its end after a dot ("q_proj", "attention.output.dense"). A string is split at commas.
        dropout: p, the share of an adapter's inputs that a training step drops (`dropout`).
        section: of the config, for messages.
    """

    rank: int
    alpha: float
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    section: str = "encoder"

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
        return module == name or module.endswith(f".{name}")

    known = sorted({module.rpartition(".")[2] for module in linear.values()})
    unknown = [name for name in names if not any(has(m, name) for m in linear.values())]
    if unknown or not names:
        raise InputError(
            f"config.{section}.lora.targets names {', '.join(map(repr, unknown)) or 'nothing'}; "
            f"use {ALL_LINEAR!r} or names among {', '.join(known)}, the linear maps of this "
            "model's layers."
        )
    return {path: m for path, m in linear.items() if any(has(m, name) for name in names)}


def kernel_shapes(module: Trunk) -> dict[LeafPath, tuple[int, ...]]:
    """Path of every linear map in the layers → shape of its stacked kernels, `(n, in, out)`."""
    tree = jax.eval_shape(module.init_params, jax.random.key(0))
    leaves: Mapping[LeafPath, Any] = flatten_dict({LAYERS: tree[LAYERS]})
    return {path[:-1]: leaf.shape for path, leaf in leaves.items() if path[-1] == "kernel"}


def new_adapters(table: NameTable, module: Trunk, config: LoraConfig, seed: int) -> Params:
    """New adapters, which change no output yet: A is uniform in ±1/√in as in PEFT, B is zero.

    Returns:
        A tree of float32 NumPy arrays.
    """
    rng, shapes = np.random.default_rng(seed), kernel_shapes(module)
    leaves: dict[LeafPath, np.ndarray] = {}
    for path in sorted(target_modules(table, config.targets, config.section)):
        layers, width_in, width_out = shapes[path]
        a = rng.uniform(-1, 1, (layers, width_in, config.rank)) / np.sqrt(width_in)
        leaves[*path, LORA_A] = a.astype(np.float32)
        leaves[*path, LORA_B] = np.zeros((layers, config.rank, width_out), np.float32)
    return unflatten_dict(leaves)
