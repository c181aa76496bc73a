"""Texts and rows embedded in packed blocks, each as by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.rollouts import text_table
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.rollouts.text_table import TextTable
from tests import reference
from tests.devices import mesh_of
from tests.machine import read_only
from tests.rollouts.play_setup import POSITIONS, ROW_TOKENS, loaded, params, shardings, table, text


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return list({text(rng): None for _ in range(3 * count)})[:count]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few dozen texts fill several groups and outgrow the table."""
    monkeypatch.setattr(text_table, "GROUP", 16)
    monkeypatch.setattr(text_table, "SMALL_GROUP", 4)


def expected(wanted: list[str]) -> np.ndarray:
    """Each text encoded by itself."""
    encoder, tokenizer = loaded().encoder, loaded().tokenizer
    player = reference.Player(encoder, ROW_TOKENS)
    rows = [
        [*encoder.chunk_opening, *ids[: ROW_TOKENS - 2], encoder.sep_id]
        for ids in tokenizer.encode(wanted)
    ]
    assert max(map(len, rows)) == ROW_TOKENS  # some were cut
    return np.stack([player.embed(params(), CHUNK, row) for row in rows])


def embeddings(found: TextTable, wanted: list[str]) -> np.ndarray:
    rows = found.rows_of(wanted)
    assert rows.dtype == np.int32
    return np.asarray(found.array)[rows]


def test_rows_are_the_towers_embeddings_and_stay_where_they_are() -> None:
    wanted = ["", *texts(40)]
    found = table()
    np.testing.assert_allclose(embeddings(found, wanted), expected(wanted), atol=2e-6)
    # In another order, in parts, and next to new ones they are the same rows.
    mixed = [*wanted[::-3], *texts(20, seed=1)]
    before = found.rows_of(wanted).tolist()
    np.testing.assert_allclose(embeddings(found, mixed), expected(mixed), atol=2e-6)
    assert found.rows_of(wanted).tolist() == before
    assert len(found) == len({*wanted, *mixed})  # each once
    assert found.rows_of([]).shape == (0,)


def test_embeddings_that_two_processes_have_kept_are_read(tmp_path: Path) -> None:
    wanted = texts(40)
    both = [table(tmp_path) for _ in range(2)]
    for each, part in zip(both, (wanted[:30], wanted[20:]), strict=True):
        each.rows_of(part)
    values = embeddings(both[0], wanted)
    second = table(tmp_path)
    there = len(second)
    np.testing.assert_allclose(embeddings(second, wanted), values, atol=1e-6)
    assert len(second) == there
    embeddings(second, [*wanted, "one more"])
    assert len(second) == there + 1
    again = table(tmp_path)
    assert again.rows_of([*wanted, "one more"]).shape == (41,)
    assert len(again) == there + 1
    with read_only(tmp_path):
        np.testing.assert_allclose(embeddings(table(tmp_path), wanted), values, atol=1e-6)
        with pytest.raises(InputError, match=str(tmp_path)):
            table(tmp_path).rows_of(["not kept"])


def test_rows_of_all_lengths_are_as_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_table, "SHORT", 20)
    mesh, encoder = mesh_of(), loaded().encoder
    tower = text_table.MeshTower(
        mesh, shardings(mesh), encoder, params(), number=CHUNK, row_tokens=POSITIONS
    )
    rng = np.random.default_rng(0)
    lengths = [3, POSITIONS, 20, 21, *rng.integers(3, POSITIONS, 40)]
    rows = [rng.integers(5, 20, n).tolist() for n in lengths]
    player = reference.Player(encoder, POSITIONS)
    alone = [player.embed(params(), CHUNK, row) for row in rows]
    np.testing.assert_allclose(tower(rows), alone, atol=1e-5)
    assert tower([]).shape == (0, encoder.width)
    with pytest.raises(ValueError):
        tower([[7] * (POSITIONS + 1)])
