"""Vectors lie in equal parts, in order, and are refused where there is no room."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import device_vectors
from qrag_jax.retrieval.device_vectors import (
    STORAGES,
    Layout,
    check_room,
    layout_of,
    load,
    on_devices,
    to_int8,
)
from qrag_jax.retrieval.vectors import Vectors
from qrag_jax.runtime.device_memory import room
from tests.devices import mesh_of

ROWS = np.random.default_rng(0).integers(-127, 128, (101, 6)).astype(np.float32)
ROWS[:, 0] = 127  # so that scales are 1


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 3, 1)])
def test_parts_are_equal_and_in_order(
    sizes: tuple[int, int, int], storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_vectors, "_BLOCK_BYTES", 7 * 6 * 4)
    mesh = mesh_of(*sizes)
    vectors = Vectors([ROWS[:50], ROWS[50:]])
    layout = layout_of(vectors, storage, mesh.size, 4)
    part = load(vectors, layout, mesh, 0)
    rows = np.asarray(part.rows, np.float32)
    assert rows.shape == (layout.rows * mesh.size, 6)
    assert layout.rows % 4 == 0
    assert layout.rows * mesh.size < 101 + 4 * mesh.size
    np.testing.assert_array_equal(rows[:101], ROWS)
    assert not rows[101:].any()
    assert np.asarray(part.allowed).tolist() == [True] * 101 + [False] * (len(rows) - 101)
    assert {shard.data.shape for shard in part.rows.addressable_shards} == {(layout.rows, 6)}
    assert (part.scales is not None) == (storage == "int8")
    size = sum(
        shard.data.nbytes
        for leaf in part
        if leaf is not None
        for shard in leaf.addressable_shards[:1]
    )
    assert size == layout.bytes


def test_int8_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(1).standard_normal((50, 20)).astype(np.float32)
    rows[3] = 0
    numbers, scales = to_int8(rows)
    assert (numbers.dtype, scales.dtype) == (np.int8, np.float32)
    assert (np.abs(numbers * scales[:, None] - rows) <= scales[:, None] / 2 + 1e-7).all()
    assert np.abs(numbers[4:]).max(axis=1).tolist() == [127] * 46
    assert scales[3] == 0


def test_a_mask_lies_as_the_vectors_do() -> None:
    layout = Layout(5, 6, 4, "float32")
    mask = np.array([True, False, True, True, False])
    assert np.asarray(on_devices(mask, layout, mesh_of(2))).tolist() == [
        *mask.tolist(),
        *[False] * 3,
    ]


def test_no_room() -> None:
    layout = Layout(10**6, 1024, 10**6, "float32")
    needed = 10**6 * (4096 + 1) + 2**30
    check_room(layout, 2**30, needed)
    check_room(layout, 2**30, None)
    with pytest.raises(
        InputError,
        match=r"\(3\.8",
    ):
        check_room(layout, 2**30, needed - 2**30)
    with pytest.raises(InputError, match="devices would help"):
        check_room(dataclasses.replace(layout, storage="int8"), 0, 10)


def test_what_this_machine_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = Vectors([ROWS])
    mesh = mesh_of(2)
    free = room(mesh.devices.flat[0], 2)
    assert free is not None
    with pytest.raises(InputError, match="too few"):
        load(vectors, layout_of(vectors, "float32", 2, 4), mesh, 2 * free)


def test_bad_numbers_are_found_when_loaded() -> None:
    rows = ROWS.copy()
    rows[77, 3] = np.inf
    vectors = Vectors([rows])
    with pytest.raises(InputError, match="vector 77, counted"):
        load(vectors, layout_of(vectors, "int8", 8, 4), mesh_of(8), 0)
