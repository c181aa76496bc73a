"""The table of embeddings: each row the chunk tower's own, each text embedded once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qrag_jax.rollouts import text_table
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.rollouts.text_table import Counts, TextTable
from qrag_jax.runtime.compilation import CompilationCounter
from qrag_jax.runtime.embedding_files import EmbeddingFiles
from tests import reference
from tests.rollouts.long_documents import ROW_TOKENS, loaded, params, table, text


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return list({text(rng): None for _ in range(3 * count)})[:count]


@pytest.fixture
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


def test_rows_are_the_towers_embeddings(small_groups: None) -> None:
    wanted = ["", *texts(40)]
    found = table()
    np.testing.assert_allclose(embeddings(found, wanted), expected(wanted), atol=2e-6)
    # In another order, in parts, and next to new ones they are the same rows.
    more = texts(20, seed=1)
    mixed = [*wanted[::-3], *more]
    before = {name: int(row) for name, row in zip(wanted, found.rows_of(wanted), strict=True)}
    np.testing.assert_allclose(embeddings(found, mixed), expected(mixed), atol=2e-6)
    assert {name: int(row) for name, row in zip(wanted, found.rows_of(wanted))} == before


def test_each_text_is_embedded_once(small_groups: None) -> None:
    wanted = texts(21)
    found = table()
    first = found.rows_of([*wanted, *wanted[:5]])
    assert first[21:].tolist() == first[:5].tolist()
    assert len(found) == len(set(first.tolist())) == 21
    tokens = sum(min(len(ids) + 2, ROW_TOKENS) for ids in loaded().tokenizer.encode(wanted))
    seconds = found.counts.seconds
    assert found.counts == Counts(asked=26, embedded=21, tokens=tokens, seconds=seconds)
    assert seconds > 0
    found.rows_of([*wanted[3:8], "one more"])
    assert (found.counts.asked, found.counts.embedded, len(found)) == (32, 22, 22)
    assert found.rows_of([]).shape == (0,)


def test_nothing_recompiles_as_texts_come(small_groups: None) -> None:
    found = table()
    found.rows_of(texts(2))  # a small group
    found.rows_of(texts(20, seed=1))  # a large one
    counter, size = CompilationCounter(), len(found.array)
    for seed, count in enumerate((1, 3, 5, 16, 17, 50), start=2):
        found.rows_of(texts(count, seed))
    doublings = int(np.log2(len(found.array) / size))
    assert doublings == 2
    assert counter.count <= 3 * doublings  # to double it, and to write groups into what it became


def test_there_is_one_array_of_a_few_sizes(small_groups: None) -> None:
    found, sizes = table(), set()
    found.rows_of(texts(7))
    before = found.array
    for seed in range(1, 12):
        found.rows_of(texts(7, seed))
        sizes.add(found.array.shape[0])
    assert before.is_deleted()  # written into, not copied
    assert len(found) > 64
    assert sizes <= {32, 64, 128}


def test_kept_embeddings_serve_the_next_process(small_groups: None, tmp_path: Path) -> None:
    wanted = texts(40)
    first = table(EmbeddingFiles(tmp_path, 16))
    values = embeddings(first, wanted)
    second = table(EmbeddingFiles(tmp_path, 16))
    assert len(second) == 40
    np.testing.assert_array_equal(embeddings(second, wanted), values)
    assert (second.counts.asked, second.counts.embedded) == (40, 0)
    embeddings(second, [*wanted, "one more"])
    assert second.counts.embedded == 1
    assert len(table(EmbeddingFiles(tmp_path, 16))) == 41


def test_broken_files_are_embedded_again(small_groups: None, tmp_path: Path) -> None:
    wanted = texts(40)
    values = embeddings(table(EmbeddingFiles(tmp_path, 16)), wanted)
    broken, *others = sorted(tmp_path.iterdir())
    assert len(others) == 2
    lost = len(broken.read_bytes()) // (16 + 4 * 16)
    broken.write_bytes(broken.read_bytes()[:-5])
    found = table(EmbeddingFiles(tmp_path, 16))
    assert len(found) == 40 - lost
    np.testing.assert_allclose(embeddings(found, wanted), values, atol=1e-6)
    assert found.counts.embedded == lost


def test_towers_differ() -> None:
    wanted = texts(3)
    first, second = (embeddings(table(tower=tower), wanted) for tower in (0, 1))
    assert not np.allclose(first, second)


def test_with_a_store_the_table_is_mapped_from_a_file(small_groups: None, tmp_path: Path) -> None:
    wanted = texts(100)
    in_memory = table()
    values = embeddings(in_memory, wanted)
    assert in_memory.mapped_bytes == 0
    found = table(EmbeddingFiles(tmp_path, 16))
    first = embeddings(found, wanted[:20])
    early = found.array
    np.testing.assert_allclose(embeddings(found, wanted), values, atol=1e-6)  # it grew twice
    np.testing.assert_allclose(first, values[:20], atol=1e-6)
    assert np.asarray(early).shape[0] < len(found.array) == 128
    assert found.mapped_bytes == 128 * 16 * 4
    # The array is the mapped file itself, which has no name: it goes with the process.
    address, maps = found.array.unsafe_buffer_pointer(), Path("/proc/self/maps").read_text()
    (mapping,) = [line for line in maps.splitlines() if _holds(line, address)]
    assert str(tmp_path) in mapping
    assert "(deleted)" in mapping
    assert "r--s" in mapping
    kept = table(EmbeddingFiles(tmp_path, 16))
    np.testing.assert_array_equal(embeddings(kept, wanted), embeddings(found, wanted))
    assert (kept.counts.embedded, kept.mapped_bytes) == (0, found.mapped_bytes)
    found.forget()
    np.testing.assert_allclose(embeddings(found, wanted[::-1]), values[::-1], atol=1e-6)


def _holds(line: str, address: int) -> bool:
    low, high = (int(end, 16) for end in line.split()[0].split("-"))
    return low <= address < high
