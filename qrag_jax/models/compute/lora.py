"""Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685), trained next to a frozen encoder.

A linear map becomes x·W + s·(x·A)·B with s = alpha / rank. W and all other parameters of the base
are frozen: one copy serves both towers, online and target. A tree of adapters uses the paths of the
stacked parameters: `layers/query/lora_a` `[n, in, r]` and `layers/query/lora_b` `[n, r, out]`.

With dropout the map is x·W + s·(d(x)·A)·B, where d is `dropout.drop` with a separate mask for each
map, as in the library PEFT. Dropout acts only if there is a key, that is in the online towers of a
training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.models.compute.linear import ADAPTER, LORA_A, LORA_B, LORA_KEY
from qrag_jax.models.trunks.transformer import Params, Transformer

Leaves = dict[tuple[str, ...], jax.Array]  # by path


class Adapted(NamedTuple):
    """A frozen base and the adapters on it."""

    base: Params  # parameters of one tower, layers stacked
    adapters: Params  # of one tower, or of several towers stacked on axis 0
    # PRNG key of the masks, one per tower; None: nothing is dropped
    dropout_key: jax.Array | None = None


def merge(trainable: Params, frozen: Params | None) -> Params | Adapted:
    """A model's parameters: all that is trained, or adapters on their frozen base."""
    return trainable if frozen is None else Adapted(frozen, trainable)


def of_tower(params: Params | Adapted, number: int | jax.Array) -> Params | Adapted:
    """One of several towers stacked on axis 0; adapters keep their base and their dropout key."""
    if isinstance(params, Adapted):
        return Adapted(params.base, *jax.tree.map(lambda leaf: leaf[number], params[1:]))
    return jax.tree.map(lambda leaf: leaf[number], params)


def attach(params: Params | Adapted, scale: float) -> Params:
    """One tower's parameters; adapters are put next to the kernels, as `Linear` takes them.

    B is multiplied by `scale`. If there is a dropout key, every map gets a key derived from it.
    """
    if not isinstance(params, Adapted):
        return params
    adapters: Leaves = flatten_dict(params.adapters)
    leaves = flatten_dict(params.base) | {
        path: leaf * scale if path[-1] == LORA_B else leaf for path, leaf in adapters.items()
    }
    if params.dropout_key is not None:
        leaves |= _keys(params.dropout_key, adapters)
    return unflatten_dict(leaves)


def _keys(key: jax.Array, adapters: Leaves) -> Leaves:
    """The dropout keys, uint32 `[n, 1, 2]`, of every map that has an adapter: one key per layer.

    A key is the tower's key with two numbers folded in: the map's number in the order of the maps'
    paths, and the layer's number.
    """
    leaves: Leaves = {}
    for number, path in enumerate(sorted(path for path in adapters if path[-1] == LORA_A)):
        of_map, layers = jax.random.fold_in(key, number), jnp.arange(len(adapters[path]))
        keys = jax.vmap(jax.random.fold_in, (None, 0))(of_map, layers)
        leaves[*path[:-1], LORA_KEY] = jax.random.key_data(keys)[:, None, :2]
    return leaves


def has_keys(attached: Params) -> bool:
    """Whether `attach` was given a dropout key."""
    return any(path[-1] == LORA_KEY for path in flatten_dict(attached))


def trainable(
    trunk: Transformer, params: Params | Adapted, scale: float
) -> tuple[Leaves, Leaves, Callable[[Leaves], Params]]:
    """Leaves as the trunk takes them, trained and frozen, and how a gradient goes back.

    `params` are of one tower, without a dropout key of the trunk; all are trained, or adapters.
    """
    if not isinstance(params, Adapted):
        prepared = flatten_dict(trunk.prepare(params))
        return prepared, {}, lambda gradient: trunk.as_stored(unflatten_dict(gradient))

    def prepare(adapters: Params) -> tuple[Leaves, Leaves]:
        attached = attach(params._replace(adapters=adapters), scale)
        leaves = flatten_dict(trunk.prepare(attached, trunk.precision.products))
        trained = {path: leaf for path, leaf in leaves.items() if path[-1] in ADAPTER}
        return trained, {path: leaf for path, leaf in leaves.items() if path not in trained}

    trained, adapters_back, frozen = jax.vjp(prepare, params.adapters, has_aux=True)
    return trained, frozen, lambda gradient: adapters_back(gradient)[0]


def folded(params: Adapted, scale: float) -> Params:
    """One tower's parameters with the adapters' products added: W becomes W + s·A·B."""
    leaves, adapters = flatten_dict(params.base), flatten_dict(params.adapters)
    for path, b in adapters.items():
        if path[-1] == LORA_B:
            kernel = (*path[:-1], "kernel")
            leaves[kernel] = leaves[kernel] + scale * (adapters[*path[:-1], LORA_A] @ b)
    return unflatten_dict(leaves)
