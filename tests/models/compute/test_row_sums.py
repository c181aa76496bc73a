"""Sums of rows by index, in the form of each platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.compute.row_sums import _sorted_sums, add_rows, take_rows
from tests.support.hlo import nondeterministic

SIZE, WIDTH = 7, 5


def given(count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    random = np.random.default_rng(count)
    table = random.standard_normal((SIZE, WIDTH)).astype(np.float32)
    at = random.integers(0, SIZE + 2, count).astype(np.int32)  # two indices are behind the table
    rows = random.standard_normal((count, WIDTH)).astype(np.float32)
    return jnp.asarray(table), jnp.asarray(at), jnp.asarray(rows)


def expected(table, at, rows) -> np.ndarray:
    found = np.array(table, np.float64)
    for index, row in zip(np.asarray(at), np.asarray(rows, np.float64)):
        if index < SIZE:
            found[index] += row
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13, 64, 100])
@pytest.mark.parametrize("function", [add_rows, _sorted_sums])
def test_rows_of_one_index_are_added(function, count: int) -> None:
    arguments = given(count)
    found = jax.jit(function)(*arguments)
    np.testing.assert_allclose(found, expected(*arguments), rtol=1e-5, atol=1e-5)


def test_all_rows_of_one_index_and_rows_of_different_ones() -> None:
    table, _, rows = given(33)
    for at in (jnp.full(33, 3), jnp.arange(33) % SIZE, jnp.sort(jnp.arange(33) % 2)):
        found = _sorted_sums(table, at, rows)
        np.testing.assert_allclose(found, expected(table, at, rows), rtol=1e-5, atol=1e-5)


def test_a_look_up_has_the_gradient_of_indexing() -> None:
    table, at, rows = given(20)
    at = at % SIZE

    def total(take, table):
        return (take(table, at) * rows).sum()

    np.testing.assert_array_equal(take_rows(table, at), table[at])
    found = jax.grad(lambda t: total(take_rows, t))(table)
    wanted = jax.grad(lambda t: total(lambda t, at: t[at], t))(table)
    np.testing.assert_array_equal(found, wanted)  # a CPU uses the scatter itself


def test_each_platform_has_one_form_and_a_gpu_adds_in_a_fixed_order() -> None:
    def gradient(table, at, rows):
        return jax.grad(lambda t: (take_rows(t, at) * rows).sum())(table)

    traced = jax.jit(gradient).trace(*given(20))
    texts = {
        platform: traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo").as_hlo_text()
        for platform in ("cpu", "cuda")
    }
    assert " sort(" not in texts["cpu"]
    assert texts["cpu"].count(" scatter(") == texts["cuda"].count(" scatter(") == 1
    assert nondeterministic(texts["cuda"]) == []
    assert nondeterministic(texts["cpu"])
