"""From the parts of one tower's parameters that a device stores to what its layers compute with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.models.compute.group import FSDP, TENSOR, Group, used_by_all, whole
from qrag_jax.models.compute.linear import ADAPTER, LORA_A, LORA_KEY

KERNEL = "kernel"


class SplitMaps(NamedTuple):
    """Maps of a layer that tensor parallelism splits, by name; none: it cannot be split.

    Attributes:
        columns: maps of which it splits the outputs. They open attention and feed-forward.
        rows: maps of which it splits the inputs. They close attention and feed-forward.
        norms: norms that are applied to parts, such as those of single heads.
        tables: outside the layers, tables of which a few rows are used: they stay in parts.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


def for_use(group: Group, maps: SplitMaps, known: Mapping[str, Any], params: Any) -> Any:
    """Inside a shard_map: gathers what is small; kernels and word tables stay in parts.

    `linear` gathers kernels where they are used, and `group.look_up` takes rows from tables. The
    gradient of this function sums over the group.

    Args:
        known: shapes of the whole parameters of one tower, layers stacked.
        params: the parameters as they are stored, perhaps with adapters beside the kernels.
    """
    shapes = {path: leaf.shape for path, leaf in flatten_dict(known).items()}

    def of_leaf(path: tuple[str, ...], leaf: jax.Array) -> jax.Array:
        (*place, name), owner = path, path[-2] if len(path) > 1 else ""
        if name == LORA_KEY:
            return leaf
        if name == KERNEL or name in maps.tables:
            split = leaf.size * (group.tensor if name == KERNEL else 1) < math.prod(shapes[path])
            return leaf if split else used_by_all(FSDP, leaf)
        axis, parts = -1, maps.columns
        if name == LORA_A:
            axis, parts = -2, maps.rows
        # The inputs of A and the outputs of B are those of the kernel.
        size = shapes[*place, KERNEL if name in ADAPTER else name][axis]
        in_parts = group.tensor > 1 and owner in parts
        if leaf.shape[axis] == size // (group.tensor if in_parts else 1):
            leaf = used_by_all(FSDP, leaf)
        else:
            leaf = whole(group, leaf.ndim + axis, leaf)
        # What is whole along `tensor`, but multiplies parts or makes parts of a sum.
        partly = owner in maps.norms or (name in ADAPTER and not in_parts)
        return used_by_all(TENSOR, leaf) if group.tensor > 1 and partly else leaf

    leaves = flatten_dict(params)
    return unflatten_dict({path: of_leaf(path, leaf) for path, leaf in leaves.items()})
