"""Corpora and files of vectors: read as written, filtered, resumed after a kill."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import CorpusWriter, StoredCorpus, pooled, write_corpus
from qrag_jax.retrieval.index_folder import Manifest, VectorParts, open_vectors, write_manifest
from qrag_jax.retrieval.protocol import NONE, Passage

PASSAGES = [
    Passage("a", "The first.", "One", {"language": "en", "year": 1990, "tags": ["x", "y"]}),
    Passage("b", "Zweite\nZeile \u2028 \U0001f600", "", {"language": "de", "year": 2000.0}),
    Passage("c/ü", "Third.", "Three", {"language": "en", "tags": ["y"], "seen": True}),
    Passage("d", "Half a pair \ud800.", "Four", {"language": None, "year": 1}),
]


def test_passages_come_back_at_random_and_by_their_fields(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    assert corpus.passages(np.array([3, 0, 0])) == [PASSAGES[3], PASSAGES[0], PASSAGES[0]]
    assert list(StoredCorpus(tmp_path)) == PASSAGES
    for wrong in (4, NONE):
        with pytest.raises(IndexError):
            corpus.passages([wrong])
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


def test_files_of_other_folders_are_refused(tmp_path: Path) -> None:
    """By names that lead out; links: tests/runtime/test_whole_files.py."""
    write_corpus(tmp_path / "whole", PASSAGES)
    path = tmp_path / "whole" / stored.NAME
    content = json.loads(path.read_bytes())
    content["files"]["../mine"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="mine"):
        StoredCorpus(tmp_path / "whole")


# ---------------------------------------------------------------------- vectors of an index

WIDTH, COUNT = 3, 10
VECTORS = np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH)


def test_an_index_has_its_own_files_alone(tmp_path: Path) -> None:
    """What a kill between manifest and notes leaves is deleted; files elsewhere are not read."""
    index = tmp_path / "index"
    parts = VectorParts(index, Manifest("exact", "c0", COUNT, "e0", WIDTH, "float32"), part=4)
    parts.begin()
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, VECTORS[rows.start : rows.stop], 1)
    notes = {path: path.read_bytes() for path in index.glob("*.json")}
    parts.finish()
    for path, data in notes.items():
        path.write_bytes(data)
    parts.tidy()
    manifest, vectors = open_vectors(index, count=COUNT)
    np.testing.assert_array_equal(vectors, VECTORS)
    assert {path.name for path in index.iterdir()} == {*manifest.files, "manifest.json"}
    wanted: Any
    for wanted in ({"encoder": "e1"}, {"width": 6}, {"count": 4}):
        with pytest.raises(InputError, match=rf"manifest\.json.* field {next(iter(wanted))}"):
            open_vectors(index, **wanted)
    (tmp_path / "secret").write_bytes(b"x" * 60)
    for name in ("../secret", "/etc/hostname", "a/b", "", "a\\b"):
        write_manifest(index, dataclasses.replace(manifest, files={name: 60}))
        with pytest.raises(InputError, match="plain name") as error:
            open_vectors(index)
        assert "bytes" not in str(error.value)  # not even the size is shown


# ---------------------------------------------------------------------- passages by their text

ADA, LAKE, BARE = (
    Passage("", "She sails.", "Ada Berg"),
    Passage("", "Old.", "Lake (film)"),
    Passage("", "No. 7!"),
)


def test_each_passage_is_there_once_in_the_order_of_first_sight() -> None:
    """With readable ids that do not depend on the pool."""
    again = Passage("elsewhere", "She  sails", "ADA BERG")
    other = Passage("", "She flies.", "Ada Berg")
    found = pooled([ADA, LAKE, again, BARE, other, LAKE])
    texts = [(page.title, page.text) for page in (ADA, LAKE, BARE, other)]
    assert [(each.title, each.text) for each in found] == texts
    ids = [each.name.rpartition("-")[0] for each in found]
    assert ids == ["ada-berg", "lake-film", "no-7", "ada-berg"]
    assert pooled([BARE, other, LAKE])[2] == found[1]
