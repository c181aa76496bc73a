"""A corpus is read as it was written, and what is not whole is no corpus."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval import columns
from qrag_jax.retrieval import corpus as stored
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage
from tests.disks import read_only

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


def test_names_lead_to_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two bits of hash, so that most names share theirs with others.
    real = stored.name_hash
    for module in ("corpus", "corpus_writer"):
        monkeypatch.setattr(f"qrag_jax.retrieval.{module}.name_hash", lambda name: real(name) % 4)
    corpus = write_corpus(tmp_path, [Passage(f"name {i}", "text") for i in range(50)])
    wanted = [f"name {i}" for i in (7, 49, 0, 50)] + [""]
    np.testing.assert_array_equal(corpus.numbers(wanted), [7, 49, 0, NONE, NONE])


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "1", PASSAGES).digest
    swapped = [PASSAGES[0]._replace(metadata=dict(reversed(PASSAGES[0].metadata.items())))]
    assert write_corpus(tmp_path / "2", swapped + PASSAGES[1:]).digest == first
    others = [
        PASSAGES[::-1],
        PASSAGES[:3],
        [PASSAGES[0]._replace(title="one"), *PASSAGES[1:]],
        [PASSAGES[0]._replace(metadata={}), *PASSAGES[1:]],
    ]
    found = {write_corpus(tmp_path / f"other {i}", p).digest for i, p in enumerate(others)}
    assert len(found | {first}) == 5


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


def test_columns_are_kept_in_the_folder(tmp_path: Path) -> None:
    write_corpus(tmp_path, PASSAGES).matching({"language": "en"})
    lines = tmp_path / stored.LINES
    lines.write_bytes(b"?" * lines.stat().st_size)  # it need not be read again
    assert StoredCorpus(tmp_path).matching({"language": "en"}).tolist() == [
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(InputError, match="damaged"):
        StoredCorpus(tmp_path).matching({"year": 1})


def test_a_corpus_that_is_open_stays_what_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    corpus = write_corpus(folder, PASSAGES)
    shutil.rmtree(folder)  # as one who builds the index again under a server
    rebuilt = write_corpus(folder, PASSAGES[::-1])
    assert list(corpus) == PASSAGES
    assert np.flatnonzero(corpus.matching({"year": 1990})).tolist() == [0]
    assert np.flatnonzero(rebuilt.matching({"year": 1990})).tolist() == [3]
    assert np.flatnonzero(StoredCorpus(folder).matching({"year": 1990})).tolist() == [3]


def test_a_filter_reads_the_values_of_a_field_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, (Passage(f"{n}", "x", "", {"page": n}) for n in range(20_000)))

    def seconds() -> float:
        began = time.perf_counter()
        assert np.flatnonzero(corpus.matching({"page": [7, 19_999]})).tolist() == [7, 19_999]
        return time.perf_counter() - began

    first = seconds()
    assert min(seconds() for _ in range(5)) < first / 30


def test_columns_of_another_corpus_are_made_anew(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", PASSAGES).matching({"language": "en"})
    corpus = write_corpus(tmp_path / "b", PASSAGES[::-1])
    (tmp_path / "a" / "columns").rename(tmp_path / "b" / "columns")
    assert corpus.matching({"language": "en"}).tolist() == [False, True, False, True]


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, PASSAGES)
    with read_only(folder):
        assert StoredCorpus(folder).matching({"seen": True}).sum() == 1
    assert not (folder / "columns").exists()


def test_an_unknown_field(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'lang'"):
        write_corpus(tmp_path, PASSAGES).matching({"lang": "en"})


@pytest.mark.parametrize("passages", [PASSAGES, [Passage("a", "no metadata at all")]])
def test_unknown_fields_are_looked_for_once(passages: list[Passage], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, passages)
    with pytest.raises(InputError, match="'lang', which no"):
        corpus.matching({"lang": "en"})
    lines = tmp_path / stored.LINES
    lines.write_bytes(b"?" * lines.stat().st_size)
    for again in (corpus, StoredCorpus(tmp_path)):
        for name in ("lang", "other"):
            with pytest.raises(InputError, match=f"'{name}', which no passage"):
                again.matching({name: "en"})


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_MOST_FIELDS", 2)
    monkeypatch.setattr(columns, "_MOST_COLUMNS", 2)
    corpus = write_corpus(tmp_path, PASSAGES)
    for name in ("language", "year", "seen", "tags", "language"):
        assert len(corpus.matching({name: "en"})) == 4
    assert corpus._columns._found.keys() == {"tags", "language"}
    assert not (tmp_path / "columns" / columns.FIELDS).exists()
    with pytest.raises(InputError, match="'lang'"):
        corpus.matching({"lang": "en"})


def _shorter(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])

    return spoil


def _other_format(folder: Path) -> None:
    said = json.loads((folder / stored.NAME).read_bytes())
    (folder / stored.NAME).write_text(json.dumps(said | {"format": 99}))


def _link_out(folder: Path) -> None:
    (folder / stored.LINES).rename(folder.parent / "mine.jsonl")
    (folder / stored.LINES).symlink_to("../mine.jsonl")


def _name_outside(folder: Path) -> None:
    said = json.loads((folder / stored.NAME).read_bytes())
    said["files"]["../mine"] = 1
    (folder / stored.NAME).write_text(json.dumps(said))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_link_out, r"passages.jsonl"),
        (_name_outside, "names the file"),
        (_shorter(stored.LINES), r"passages.jsonl"),
        (_shorter(stored.INDEX), r"passages.index"),
        (_shorter(stored.HASHES), r"names.hashes"),
        (lambda folder: (folder / stored.NUMBERS).unlink(), r"names.numbers"),
        (lambda folder: (folder / stored.NAME).unlink(), r"corpus.json"),
        (lambda folder: (folder / stored.NAME).write_text("{}"), "corpus.json is damaged"),
        (_other_format, r"format 99 \(field"),
    ],
)
def test_what_is_not_whole_is_refused(
    spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder, PASSAGES)
    spoil(folder)
    with pytest.raises(InputError, match=message):
        StoredCorpus(folder)


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, PASSAGES)
    corpus.check_content()
    lines = tmp_path / stored.LINES
    lines.write_bytes(lines.read_bytes().replace(b"first", b"fir5t"))
    with pytest.raises(InputError, match="field digest"):
        corpus.check_content()
