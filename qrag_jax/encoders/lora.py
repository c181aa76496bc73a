"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685): what is trained beside a frozen encoder.

A linear map becomes x·W + s·(x·A)·B with s = alpha / rank. W, and all else of the base, is frozen:
one copy serves both towers, online and target. In the tree of an adapter, maps that have one keep
their place in the parameters at rest: `layers/query/lora_a` `[n, in, r]`, `lora_b` `[n, r, out]`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.encoders.linear import ADAPTER, LORA_A, LORA_B
from qrag_jax.encoders.trunk import Params

Leaves = dict[tuple[str, ...], jax.Array]  # by their paths


class Adapted(NamedTuple):
    """A frozen base (one tower, as it rests) and the adapters of one tower, or of several stacked
    on axis 0."""

    base: Params
    adapters: Params


def attach(params: Adapted, scale: float) -> Params:
    """One tower's parameters with the adapters beside the kernels, as `Linear` takes them.

    The factor `scale` is put on B.
    """
    leaves = flatten_dict(params.base) | {
        path: leaf * scale if path[-1] == LORA_B else leaf
        for path, leaf in flatten_dict(params.adapters).items()
    }
    return unflatten_dict(leaves)


def detach(attached: Params) -> tuple[Leaves, Leaves]:
    """The leaves of adapters and all others, of parameters at rest or prepared."""
    leaves = flatten_dict(attached)
    adapters = {path: leaf for path, leaf in leaves.items() if path[-1] in ADAPTER}
    return adapters, {path: leaf for path, leaf in leaves.items() if path not in adapters}


def merge(params: Adapted, scale: float) -> Params:
    """One tower's parameters without adapters that compute the same: W + s·A·B for W."""
    leaves, adapters = flatten_dict(params.base), flatten_dict(params.adapters)
    for path, b in adapters.items():
        if path[-1] == LORA_B:
            kernel = (*path[:-1], "kernel")
            leaves[kernel] = leaves[kernel] + scale * (adapters[*path[:-1], LORA_A] @ b)
    return unflatten_dict(leaves)
