"""Indexes that are changed: as if they were built of what they hold now, and whole at all times."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import index_folder
from qrag_jax.retrieval.index_folder import CORPUS, EXACT, IndexAt
from qrag_jax.retrieval.protocol import Hits, Queries
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.runtime.whole_files import writing
from qrag_jax.systems.indexing import (
    FAISS,
    IndexSettings,
    PassageEncoder,
    change_index,
    index_corpus,
)
from tests.devices import mesh_of
from tests.retrieval.small_corpus import assert_same
from tests.support.worlds import write_lines
from tests.systems.corpora import ONE_SHAPE, WORDS, records, tree, write_tower
from tests.systems.test_indexing import StopAfter

pytest.importorskip("bm25s")
pytest.importorskip("faiss")

OLD, NEW = 60, 30  # passages at first, and those that are added
REMOVED = ["p3", "p59", "p0"]  # the last one is added again with another text
PART = 12
ENGINES = ("exact", "scan", "faiss", "bm25", "boolean", "hybrid")
SETTINGS = IndexSettings(part=PART)


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> PassageEncoder:
    folder = write_tower(tmp_path_factory.mktemp("tower") / "model")
    return PassageEncoder.of_folder(str(folder), ONE_SHAPE, mesh_of(), 32)


def old_and_new() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    first, later = records(OLD), records(OLD + NEW, seed=1)[OLD:]
    return first, [*later, {**records(1, seed=2)[0], "page": 3}]


def build(
    folder: Path, rows: list[dict[str, Any]], tower: PassageEncoder, like: Path | None = None
) -> Path:
    """An index of rows in the folder, with all engines that files have.

    like: an index of the same passages, which were embedded in other batches, and so rounded
        otherwise; its vectors are taken.
    """
    source = write_lines(folder / "corpus.jsonl", rows)
    for engine in ("exact", "faiss", "bm25"):
        index_corpus(source, folder / "index", tower, IndexSettings(engine=engine, part=PART))
        if engine == "exact" and like is not None:
            (vectors,), (taken,) = (
                [*(index_folder.version(index) / EXACT).glob("vectors.*")]
                for index in (folder / "index", like)
            )
            own = np.fromfile(vectors, np.float32)
            np.testing.assert_allclose(np.fromfile(taken, np.float32), own, atol=2e-6)
            vectors.write_bytes(taken.read_bytes())
    return folder / "index"


@pytest.fixture
def old(tower: PassageEncoder, tmp_path: Path) -> Path:
    return build(tmp_path / "old", old_and_new()[0], tower)


@pytest.fixture
def change(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "ids.txt").write_text("".join(f"{name}\n" for name in REMOVED))
    add = write_lines(tmp_path / "more.jsonl", old_and_new()[1])
    return {"add": add, "remove": tmp_path / "ids.txt"}


def opened(index: Path) -> dict[str, Any]:
    return {name: IndexAt(index, name).open() for name in ENGINES}


def found(engines: dict[str, Any] | Path, tower: PassageEncoder) -> dict[str, list[Hits]]:
    """What all engines find, with and without a filter."""
    texts = ["river stone", "silver clock", "piano", " ".join(WORDS)]
    queries, wheres = Queries(texts, tower(texts)), (None, {"page": 3})
    every = opened(engines) if isinstance(engines, Path) else engines
    return {name: [e.search(queries, 7, where) for where in wheres] for name, e in every.items()}


def same(found: dict[str, list[Hits]], wanted: dict[str, list[Hits]]) -> None:
    for name in ENGINES:
        for one, other in zip(found[name], wanted[name], strict=True):
            assert_same(one, other)


def test_a_changed_index_is_one_that_is_built_of_its_passages(
    tower: PassageEncoder, old: Path, change: dict[str, Path], tmp_path: Path
) -> None:
    """To the bit; who has it open goes on with the old one, also after a further change."""
    before = found(old, tower)
    engines = opened(old)
    indexed = change_index(old, tower, **change, settings=SETTINGS)
    assert indexed.embedded == NEW + 1
    first, later = old_and_new()
    kept = [row for row in first if row["id"] not in REMOVED]
    scratch = build(tmp_path / "scratch", [*kept, *later], tower, like=old)
    same(found(old, tower), found(scratch, tower))
    # Given again, it was done already.
    assert change_index(old, tower, **change, settings=SETTINGS).embedded == 0
    # What is removed needs no encoder; the passages without a version are gone by now.
    ids = tmp_path / "more_ids.txt"
    ids.write_text("\n".join(row["id"] for row in later))
    change_index(old, None, remove=ids)
    assert sorted(path.name for path in old.glob("*/corpus")) == ["corpus", "corpus"]
    assert not (old / CORPUS).exists()
    same(found(old, tower), found(build(tmp_path / "less", kept, tower, like=old), tower))
    same(found(engines, tower), before)
    assert not (old / CORPUS).exists()  # a filter of the old one does not write it again


@pytest.mark.parametrize("looks", [OLD + 5, OLD + NEW - 2])
def test_what_is_broken_off_goes_on_and_the_old_index_is_whole(
    tower: PassageEncoder, old: Path, change: dict[str, Path], tmp_path: Path, looks: int
) -> None:
    """While the corpus is written (a look for each passage), and after a part of the vectors."""
    before = found(old, tower)
    with pytest.raises(Stopped):
        change_index(old, tower, **change, settings=SETTINGS, stop=StopAfter(looks))
    same(found(old, tower), before)
    parts = len([*old.glob("version-2/exact/vectors.*.json")])
    assert parts == (looks > OLD + 5)
    indexed = change_index(old, tower, **change, settings=SETTINGS)
    assert indexed.embedded == NEW + 1 - PART * parts
    unbroken = build(tmp_path / "unbroken", old_and_new()[0], tower)
    change_index(unbroken, tower, **change, settings=SETTINGS)
    names = (CORPUS, EXACT, "bm25", FAISS)
    assert [tree(old / "version-2" / n) for n in names] == [
        tree(unbroken / "version-2" / n) for n in names
    ]


def test_refusals_leave_the_old_index_whole(
    tower: PassageEncoder, old: Path, change: dict[str, Path], tmp_path: Path
) -> None:
    before = found(old, tower)

    def refused(match: str, encoder: PassageEncoder | None = tower, **files: Path) -> None:
        with pytest.raises(InputError, match=match):
            change_index(old, encoder, **files, settings=SETTINGS)
        same(found(old, tower), before)

    twice = write_lines(tmp_path / "twice.jsonl", [{"id": "p1", "text": "an id of the index"}])
    refused("passage 1 and .*twice.jsonl:1 .*'p1'", add=twice)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"id": "q", "text": "whole"}) + "\n{half\n")
    refused("broken.jsonl.* 2, ", add=broken)
    refused("another encoder", dataclasses.replace(tower, row_tokens=20), **change)
    refused("another encoder", None, add=change["add"])
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("p1\nnobody\n")
    refused("unknown.txt.*'nobody'", None, remove=unknown)
    # What was mended is read again.
    broken.write_text(json.dumps({"id": "q", "text": "whole"}) + "\n")
    assert len(change_index(old, tower, add=broken, settings=SETTINGS).corpus) == OLD + 1


def test_a_full_disk_leaves_the_old_index_whole(
    tower: PassageEncoder, old: Path, tmp_path: Path, full_disk: Path
) -> None:
    index = Path(shutil.copytree(old, full_disk / "index"))
    before = found(index, tower)
    rows = [{"id": f"q{n}", "text": f"{n} piano " * 9000} for n in range(20)]
    add = write_lines(tmp_path / "more.jsonl", rows)
    with pytest.raises(InputError, match="No space left"), writing(index, "--index"):
        change_index(index, tower, add=add, settings=SETTINGS)
    same(found(index, tower), before)
    write_lines(add, rows[:1])
    assert len(change_index(index, tower, add=add, settings=SETTINGS).corpus) == OLD + 1


def test_approximate_indexes_of_faiss(
    tower: PassageEncoder, old: Path, change: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    """Their recall is said; filters miss nothing; they grow; and they may be brought along."""
    import faiss

    texts = ["river stone", "silver clock"]
    queries = Queries(texts, tower(texts))

    def of(factory: str, search: str = "") -> None:
        settings = IndexSettings(engine=FAISS, faiss=factory, faiss_search=search)
        index_corpus(None, old, tower, settings)

    def recall() -> float:
        return float(capsys.readouterr().out.split("is ")[-1].split(",")[0])

    of("IVF4,Flat", "nprobe=1")
    few = recall()
    of("", "nprobe=4")  # of the same index
    assert few < recall() == 1
    index = IndexAt(old, FAISS).open()
    assert index.index.nlist == 4
    exact = IndexAt(old, EXACT).open()
    for where in (None, {"page": 1}):
        hits, wanted = (each.search(queries, 5, where) for each in (index, exact))
        # Rounding may swap two passages whose scores are nearly equal.
        np.testing.assert_array_equal(np.sort(hits.numbers), np.sort(wanted.numbers))
        np.testing.assert_allclose(hits.scores, wanted.scores, rtol=1e-5)
    capsys.readouterr()
    one = write_lines(tmp_path / "one.jsonl", [{"id": "q", "text": "piano " * 9}])
    change_index(old, tower, add=one, settings=SETTINGS)
    assert recall() == 1
    index = IndexAt(old, FAISS).open()
    assert (index.index.nlist, index.index.ntotal) == (4, OLD + 1)
    brought = faiss.index_factory(index.index.d, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    brought.add(exact.vectors(range(OLD)))  # it lacks the passage that was added
    faiss.write_index(brought, str(tmp_path / "brought.faiss"))
    of(str(tmp_path / "brought.faiss"), "efSearch=64")
    assert recall() > 0.9
    assert IndexAt(old, FAISS).open().index.ntotal == OLD + 1
    for factory, search in (("IVF99,Flat", ""), ("Nothing", ""), ("HNSW8", "nprobe=a")):
        with pytest.raises(InputError, match=factory):
            of(factory, search)
    faiss.write_index(faiss.IndexFlatL2(3), str(tmp_path / "other.faiss"))
    with pytest.raises(InputError, match="3 numbers"):
        of(str(tmp_path / "other.faiss"))
