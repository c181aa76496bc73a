"""Vectors in parts are as if they were in one."""

from __future__ import annotations

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import vectors as module
from qrag_jax.retrieval.vectors import DTYPES, Vectors, check_finite, checked

WHOLE = np.arange(60, dtype=np.float32).reshape(20, 3)
PARTS = [WHOLE[:4], WHOLE[4:4], WHOLE[4:5], WHOLE[5:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_parts(dtype: str) -> None:
    vectors = Vectors([part.astype(DTYPES[dtype]) for part in PARTS])
    assert (len(vectors), vectors.width, vectors.dtype) == (20, 3, DTYPES[dtype])
    wanted = np.array([19, 4, 4, 0, 3, 5])
    found = vectors.rows(wanted)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, WHOLE[wanted])
    assert vectors.rows([]).shape == (0, 3)


@pytest.mark.parametrize(
    ("start", "stop", "size"), [(0, 20, 100), (2, 11, 3), (5, 5, 3), (0, 1, 1)]
)
def test_blocks_of_parts(start: int, stop: int, size: int) -> None:
    found = list(Vectors(PARTS).blocks(start, stop, size))
    assert all(0 < len(block) <= size for _, block in found)
    rows = [row.tolist() for _, block in found for row in block]
    assert rows == WHOLE[start:stop].tolist()
    assert [first for first, block in found for _ in block[:1]] == [
        int(block[0, 0]) // 3 for _, block in found
    ]


def test_other_numbers_become_float32() -> None:
    assert checked([[1, 2]], "here").dtype == np.float32
    assert checked(np.ones((1, 2), np.float16), "here").dtype == np.float32
    assert checked(np.ones((1, 2), DTYPES["bfloat16"]), "here").dtype == DTYPES["bfloat16"]


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([["a"]], "float32 numbers"),
        ([1.0], r"shape \[1\]"),
        ([[1.0]], r"shape \[1, 1\]"),
        (np.zeros((3, 0)), "the shape"),
    ],
)
def test_what_is_no_array_of_vectors(vectors: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked(vectors, "here", 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_bad_vector_is_named(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 12)
    bad = WHOLE.astype(DTYPES[dtype])
    bad[9, 2], bad[17, 0] = -np.inf, np.nan
    with pytest.raises(InputError, match="vector 109, counted"):
        check_finite(bad, "the file", 100)
    check_finite(bad[:9], "the file")
