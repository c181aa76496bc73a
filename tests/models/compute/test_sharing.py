"""Rows that share their first tokens, beside the same rows computed one by one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.sharing import RowLengths, shared_layout
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.trunk import WORDS

MEMBERS, LENGTH, PLACES = 3, 9, 40
SHARED = np.array([4, 2, 5, 0], np.int32)  # the third group has no row
LENGTHS = np.array([6, 0, 9, 5, 3, 2, 0, 0, 0, 4, 1, 3], np.int32)


def places_by_hand() -> dict[tuple[int, int], int]:
    """(row, position) → the token's place, in the order of the places."""
    found: dict[tuple[int, int], int] = {}
    place = 0
    for group, shared in enumerate(SHARED):
        rows = [row for row in range(MEMBERS * group, MEMBERS * (group + 1)) if LENGTHS[row]]
        if not rows:
            continue
        for position in range(shared):
            for row in rows:
                found[row, position] = place
            place += 1
        for row in rows:
            for position in range(shared, LENGTHS[row]):
                found[row, position] = place
                place += 1
    return found


WHOLE, IN_PARTS = RowLengths(LENGTH), RowLengths(LENGTH, 6, 7)


def layout_of(longest: RowLengths = WHOLE) -> Any:
    shared = jax.jit(shared_layout, static_argnums=(2, 3))
    return shared(jnp.asarray(SHARED), jnp.asarray(LENGTHS), PLACES, longest)


@pytest.mark.parametrize(
    ("scanned", "longest"),
    [(False, WHOLE), (True, IN_PARTS)],
    ids=["whole rows", "in parts, scanned layers"],
)
def test_a_causal_model_computes_the_same(scanned: bool, longest: RowLengths) -> None:
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        head_dim=8,
    )
    trunk = Qwen3(config, scanned=scanned)
    params = trunk.init_params(jax.random.key(0))
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 50, (len(LENGTHS), LENGTH))
    for row in range(len(LENGTHS)):
        group = row // MEMBERS
        tokens[row, : SHARED[group]] = tokens[MEMBERS * group, : SHARED[group]]
    expected = places_by_hand()
    packed = np.zeros(PLACES, np.int32)
    for (row, position), place in expected.items():
        packed[place] = tokens[row, position]
    weights = draw.normal(size=(len(LENGTHS), LENGTH, 16)).astype(np.float32)
    in_common = np.arange(LENGTH)[None] < np.repeat(SHARED, MEMBERS)[:, None]
    # The loss is of what rows have alone, and of a group's common tokens once.
    first = np.arange(len(LENGTHS)) % MEMBERS == 0
    counted = (np.arange(LENGTH)[None] < LENGTHS[:, None]) & (~in_common | first[:, None])
    weights *= counted[..., None]

    def shared(params: Any) -> jax.Array:
        prepared = trunk.prepare(params)
        hidden = trunk.apply({"params": prepared}, prepared[WORDS][packed], layout_of(longest))
        of_places = np.zeros((PLACES, 16), np.float32)
        for (row, position), place in expected.items():
            of_places[place] += weights[row, position]
        return (hidden * of_places).sum()

    def alone(params: Any) -> jax.Array:
        hidden = trunk.hidden_states(params, jnp.asarray(tokens), jnp.asarray(LENGTHS))
        return (hidden * weights).sum()

    one, other = (jax.jit(jax.value_and_grad(each))(params) for each in (shared, alone))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        largest = float(np.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * largest)
