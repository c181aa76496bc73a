"""Corpora, files of vectors and judged queries: read as written, filtered, resumed after a kill."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.corpora import Query
from qrag_jax.data.sample import Page
from qrag_jax.errors import InputError
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import PROGRESS, CorpusWriter, StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import (
    Manifest,
    PartNote,
    VectorParts,
    open_vectors,
    write_manifest,
)
from qrag_jax.retrieval.judged_queries import NO_DOCUMENT, NO_TEXT, pooled, read_judged_queries
from qrag_jax.retrieval.protocol import NONE, Passage

PASSAGES = [
    Passage("a", "The first.", "One", {"language": "en", "year": 1990, "tags": ["x", "y"]}),
    Passage("b", "Zweite\nZeile \u2028 \U0001f600", "", {"language": "de", "year": 2000.0}),
    Passage("c/ü", "Third.", "Three", {"language": "en", "tags": ["y"], "seen": True}),
    Passage("d", "Half a pair \ud800.", "Four", {"language": None, "year": 1}),
]


def test_passages_come_back_at_random(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    assert len(corpus) == 4
    assert corpus.passages([3, 0, 0]) == [PASSAGES[3], PASSAGES[0], PASSAGES[0]]
    assert corpus.passages(np.array([1], np.int64)) == [PASSAGES[1]]
    assert list(StoredCorpus(tmp_path)) == PASSAGES
    for wrong in (4, NONE):
        with pytest.raises(IndexError):
            corpus.passages([wrong])


def test_matching(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    for where, numbers in (
        ({}, [0, 1, 2, 3]),
        ({"language": ["de", None]}, [1, 3]),
        ({"language": "fr"}, []),
        ({"year": 2000}, [1]),
        ({"year": True}, []),
        ({"seen": True}, [2]),
        ({"tags": "y"}, [0, 2]),
        ({"tags": ("x", "z"), "language": {"en"}}, [0]),
    ):
        for again in (corpus, StoredCorpus(tmp_path)):
            found = again.matching(where)
            assert (found.dtype, found.shape) == (bool, (4,))
            assert np.flatnonzero(found).tolist() == numbers, where


def passage(number: int) -> Passage:
    return Passage(f"id {number}", f"Text {number}.")


def test_bad_passages_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    wrong: Any = None
    titled = Passage("x", "", "On recursion")  # is text enough
    with CorpusWriter(tmp_path) as writer:
        assert writer.add(passage(0)) == 0
        for bad in (
            Passage(" ", "text"),
            Passage("x", " \n"),
            Passage("x", wrong),
            Passage("x", "t", "", {"f": {1, 2}}),
            Passage("x", "t", "", {"f": float("nan")}),
        ):
            with pytest.raises(InputError, match=r"wiki.jsonl:3"):
                writer.add(bad, "wiki.jsonl:3")
        with pytest.raises(InputError, match="passage 1"):
            writer.add(bad)
        assert writer.add(titled) == 1
        assert list(writer.finish()) == [passage(0), titled]


def test_ids_lead_to_numbers_and_are_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where most ids share their hash, of two bits, with others."""
    real = stored.name_hash
    monkeypatch.setattr(stored, "name_hash", lambda name: real(name) % 4)
    corpus = write_corpus(tmp_path / "good", map(passage, range(50)))
    wanted = [*(f"id {i}" for i in (7, 49, 0, 50)), ""]
    np.testing.assert_array_equal(corpus.numbers(wanted), [7, 49, 0, NONE, NONE])
    with pytest.raises(InputError, match="passages 1 and 3"):
        write_corpus(tmp_path / "bad", map(passage, (5, 1, 2, 1, 0)))
    with pytest.raises(InputError, match="bad"):
        StoredCorpus(tmp_path / "bad")
    with pytest.raises(InputError, match="no passage"):
        write_corpus(tmp_path / "empty", [])
    with pytest.raises(InputError, match="good"):  # a finished one is not written over
        CorpusWriter(tmp_path / "good")


def test_a_killed_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "KEEP_EVERY", 10)
    folder = tmp_path / "killed"
    with CorpusWriter(tmp_path / "open") as writer:
        for number in range(38):
            writer.add(passage(number))
        shutil.copytree(tmp_path / "open", folder)  # as a kill leaves it
        with pytest.raises(InputError, match="process"):
            CorpusWriter(tmp_path / "open")
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        StoredCorpus(folder)
    with CorpusWriter(folder) as writer:
        assert len(writer) == 30
        for number in range(len(writer), 50):
            writer.add(passage(number))
    with CorpusWriter(folder) as writer:
        assert len(writer) == 50
        again = writer.finish()
    assert not (folder / PROGRESS).exists()
    whole = write_corpus(tmp_path / "whole", map(passage, range(50)))
    assert list(again) == list(whole)
    assert again.digest == whole.digest
    again.check_content()


def test_what_is_changed_or_not_whole_is_refused(tmp_path: Path) -> None:
    """Also files of other folders: links out, and names that lead out."""
    whole = tmp_path / "whole"
    corpus = write_corpus(whole, PASSAGES)
    corpus.check_content()
    lines = whole / stored.LINES
    sound = lines.read_bytes()
    lines.write_bytes(sound.replace(b"first", b"fir5t"))
    with pytest.raises(InputError, match="field digest"):
        corpus.check_content()
    lines.write_bytes(sound)
    content = json.loads((whole / stored.NAME).read_bytes())
    for number, name in enumerate((*content["files"], stored.NAME)):
        folder = shutil.copytree(whole, tmp_path / f"{number}")
        for spoil in (lambda path: path.write_bytes(path.read_bytes()[:-3]), Path.unlink):
            spoil(folder / name)
            with pytest.raises(InputError, match=re.escape(name)):
                StoredCorpus(folder)
    lines.rename(tmp_path / "mine.jsonl")
    lines.symlink_to("../mine.jsonl")
    with pytest.raises(InputError, match=lines.name):
        StoredCorpus(whole)
    lines.unlink()
    (tmp_path / "mine.jsonl").rename(lines)
    content["files"]["../mine"] = 1
    (whole / stored.NAME).write_text(json.dumps(content))
    with pytest.raises(InputError, match="mine"):
        StoredCorpus(whole)


# ---------------------------------------------------------------------- vectors of an index

WIDTH, COUNT = 3, 10
VECTORS = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)


def test_an_index_has_its_own_files_alone(tmp_path: Path) -> None:
    """What a kill between manifest and notes leaves is deleted; files elsewhere are not read."""
    index = tmp_path / "index"
    parts = VectorParts(index, {"encoder": "e"}, COUNT, part=4, width=WIDTH, dtype="float32")
    parts.begin()
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, VECTORS[rows.start : rows.stop], PartNote(5, 1))
    notes = {path: path.read_bytes() for path in index.glob("*.json")}
    parts.finish(Manifest("exact", "c0", COUNT, encoder="e0"))
    for path, data in notes.items():
        path.write_bytes(data)
    parts.tidy()
    manifest, vectors = open_vectors(index, count=COUNT)
    np.testing.assert_array_equal(vectors, VECTORS)
    assert {path.name for path in index.iterdir()} == {*manifest.files, "manifest.json"}
    wanted: Any
    for wanted in ({"corpus": "c1"}, {"encoder": "e1"}, {"width": 6}, {"count": 4}):
        with pytest.raises(InputError, match=rf"manifest\.json.* field {next(iter(wanted))}"):
            open_vectors(index, **wanted)
    (tmp_path / "secret").write_bytes(b"x" * 60)
    for name in ("../secret", "/etc/hostname", "a/b", "..", "", ".hidden", "a\\b"):
        write_manifest(index, dataclasses.replace(manifest, files={name: 60}))
        with pytest.raises(InputError, match="plain name") as error:
            open_vectors(index)
        assert "bytes" not in str(error.value)  # not even the size is shown


# ---------------------------------------------------------------------- judged queries

ROWS = [
    {"query": f"query {number}", "relevant_doc_ids": [f"d{number}"], "id": f"q{number}"}
    for number in range(4)
]
REVIEW = {
    "id": "r",
    "pico": {"P": "adults", "I": "rest", "C": "none", "O": "pain"},
    "publication_pmids": ["11"],
    "pub_date": "2015",
}


def written(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    text = json.dumps(records) if ".json" in path.suffixes else lines
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Judgements of a dev and a test split; the queries of both are in one file."""
    folder = tmp_path / "beir"
    texts = {"1": "one", "2": "two", "3": "three", "4": "four"}
    written(
        folder / "queries.jsonl", *({"_id": name, "text": text} for name, text in texts.items())
    )
    header = "query-id\tcorpus-id\tscore\n"
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text(f"{header}2\ta\t2\n2\tb\t0\n1\tc\t1\n9\tc\t1\n")
    (folder / "qrels_dev.tsv").write_text(f"{header}3\tb\t0\n4\tc\t-1\n")
    return folder


def test_a_collection_in_beirs_layout(collection: Path) -> None:
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert queries == [Query("2", "two", (("a", 2),)), Query("1", "one", (("c", 1),))]
    assert (report.read, report.kept, report.skipped) == (3, 2, {NO_TEXT: 1})
    assert {Path(name).name for name in report.files} == {"queries.jsonl", "test.tsv"}
    sliced, (report,) = read_judged_queries(f"{collection},test[1:2]")
    assert ([each.id for each in sliced], report.read) == (["1"], 1)
    # Queries of a split's file that nobody judged are counted.
    texts = [{"_id": name, "text": f"own {name}"} for name in ("7", "1", "2")]
    written(collection / "queries_test.jsonl.gz", *texts)
    queries, (report,) = read_judged_queries(f"{collection},test")
    assert [each.text for each in queries] == ["own 1", "own 2"]
    assert report.skipped == {NO_DOCUMENT: 1, NO_TEXT: 1}
    for split, word in (("dev", "usable"), ("train", r"qrels_train\.tsv")):
        with pytest.raises(InputError, match=word):  # without a relevant document; without a file
            read_judged_queries(f"{collection},{split}")


def test_rows_of_both_forms_in_every_kind_of_file(tmp_path: Path) -> None:
    for name in ("rows.json", "rows.jsonl", "rows.json.gz", "rows.jsonl.gz"):
        path = written(tmp_path / name, ROWS[0], REVIEW, ROWS[1] | {"relevant_doc_ids": []})
        (first, second), (report,) = read_judged_queries(f"{path},train")
        assert first == Query("q0", "query 0", (("d0", 1),))
        text = "Patient: adults; Intervention: rest; Comparison: none; Outcome: pain"
        assert second == Query("r", text, (("11", 1),), until="2015-12-31")
        assert (report.skipped, report.first) == ({NO_DOCUMENT: 1}, {NO_DOCUMENT: f"{name}:3"})


def test_folders_of_rows_and_several_parts(tmp_path: Path) -> None:
    """Equal queries without ids are two."""
    written(tmp_path / "train.jsonl", *ROWS[:3])
    written(tmp_path / "test.jsonl", ROWS[3])
    queries, reports = read_judged_queries(f"{tmp_path},train[1:] ; {tmp_path},test")
    assert [each.id for each in queries] == ["q1", "q2", "q3"]
    assert [report.kept for report in reports] == [2, 1]
    bare = {"query": "the same", "relevant_doc_ids": ["d"]}
    queries, _ = read_judged_queries(f"{written(tmp_path / 'bare.jsonl', bare, bare)},train")
    assert [each.text for each in queries] == ["the same", "the same"]


ADA, LAKE, BARE = Page("Ada Berg", "She sails."), Page("Lake (film)", "Old."), Page("", "No. 7!")


def test_each_passage_is_there_once_in_the_order_of_first_sight() -> None:
    """With readable ids that do not depend on the pool."""
    again = Page("ADA BERG", "She  sails", id="elsewhere")
    other = Page("Ada Berg", "She flies.")
    found = pooled([ADA, LAKE, again, BARE, other, LAKE])
    texts = [(page.title, page.text) for page in (ADA, LAKE, BARE, other)]
    assert [(each.title, each.text) for each in found] == texts
    ids = [each.name.rpartition("-")[0] for each in found]
    assert ids == ["ada-berg", "lake-film", "no-7", "ada-berg"]
    assert pooled([BARE, other, LAKE])[2] == found[1]
    marks = pooled([Page("!!!", "?"), Page("???", "?"), Page("!!!", "?")])
    assert len({each.name for each in marks}) == 2
    assert pooled([]) == []


def test_data_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "rows.jsonl", *ROWS)
    written(tmp_path / "wrong.jsonl", ROWS[0], {"query": 1})
    written(tmp_path / "twice.jsonl", ROWS[0], ROWS[1], ROWS[0])
    (tmp_path / "folder").mkdir()
    for name in ("rows.tsv", "empty.jsonl"):
        (tmp_path / name).touch()
    for text, word in (
        ("", "dataset string"),
        ("rows.jsonl,,train", "path,split"),
        ("nowhere,train", "nowhere"),
        ("rows.jsonl,train[9:]", r"train\[9:\]"),
        ("rows.tsv,train", r"rows\.tsv"),
        ("wrong.jsonl,train", r"wrong\.jsonl:2.*'query'"),
        ("empty.jsonl,train", r"empty\.jsonl"),
        ("folder,dev", r"dev\.jsonl"),
        ("twice.jsonl,train", "'q0'"),
        ("rows.jsonl,train[:1];rows.jsonl,dev[1:];rows.jsonl,dev[1:]", "'q1'"),
    ):
        with pytest.raises(InputError, match=word):
            read_judged_queries(text)
