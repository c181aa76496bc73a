"""A corpus is read as it was written, filtered, and goes on where a killed writer stopped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import (
    LINES,
    PROGRESS,
    CorpusWriter,
    StoredCorpus,
    write_corpus,
)
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


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"language": "en"}, [0, 2]),
        ({"language": ["de", None]}, [1, 3]),
        ({"language": "fr"}, []),
        ({"year": 2000}, [1]),
        ({"year": True}, []),
        ({"seen": True}, [2]),
        ({"tags": "y"}, [0, 2]),
        ({"tags": ("x", "z"), "language": {"en"}}, [0]),
    ],
)
def test_matching(where: dict, numbers: list[int], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    for again in (corpus, corpus, StoredCorpus(tmp_path)):
        found = again.matching(where)
        assert found.dtype == bool
        assert found.shape == (4,)
        assert np.flatnonzero(found).tolist() == numbers


def passage(number: int) -> Passage:
    return Passage(f"id {number}", f"Text {number}.")


@pytest.mark.parametrize(
    "bad",
    [
        Passage(" ", "text"),
        Passage("x", " \n"),
        Passage("x", None),  # type: ignore[arg-type]
        Passage("x", "t", 3),  # type: ignore[arg-type]
        Passage("x", "t", "", {"f": {1, 2}}),
        Passage("x", "t", "", {"f": float("nan")}),
    ],
)
def test_bad_passages_are_refused_and_leave_nothing(bad: Passage, tmp_path: Path) -> None:
    titled = Passage("x", "", "On recursion")  # is text enough
    with CorpusWriter(tmp_path) as writer:
        assert writer.add(passage(0)) == 0
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
    with pytest.raises(InputError, match="no finished corpus"):
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


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    corpus.check_content()
    lines = tmp_path / stored.LINES
    lines.write_bytes(lines.read_bytes().replace(b"first", b"fir5t"))
    with pytest.raises(InputError, match="field digest"):
        corpus.check_content()


def test_what_is_not_whole_is_refused(tmp_path: Path) -> None:
    """Also files of other folders: links out, and names that lead out."""
    whole = tmp_path / "whole"
    write_corpus(whole, PASSAGES)
    said = json.loads((whole / stored.NAME).read_bytes())
    for number, name in enumerate((*said["files"], stored.NAME)):
        folder = shutil.copytree(whole, tmp_path / f"{number}")
        for spoil in (lambda path: path.write_bytes(path.read_bytes()[:-3]), Path.unlink):
            spoil(folder / name)
            with pytest.raises(InputError, match=re.escape(name)):
                StoredCorpus(folder)
    folder = shutil.copytree(whole, tmp_path / "linked")
    (folder / LINES).rename(tmp_path / "mine.jsonl")
    (folder / LINES).symlink_to("../mine.jsonl")
    with pytest.raises(InputError, match=LINES):
        StoredCorpus(folder)
    said["files"]["../mine"] = 1
    (whole / stored.NAME).write_text(json.dumps(said))
    with pytest.raises(InputError, match="mine"):
        StoredCorpus(whole)
