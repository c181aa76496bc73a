"""Boolean indexes on disk: saved, opened, and refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.boolean_search import BooleanIndex
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.protocol import Queries
from tests.retrieval.small_corpus import stored

WORDS = ("été", "ça", "日本", "run", "running", "of", "cat", "cats", "catalogue")


def test_a_saved_index_finds_the_same_and_holds_no_pickle(tmp_path: Path) -> None:
    draw = random.Random(2)
    texts = [" ".join(draw.choices(WORDS, k=9)) for _ in range(50)]
    corpus = stored(tmp_path / "c", texts)
    config = BM25Config(k1=1.2, b=0.6, variant="atire", stemmer="french", stop_words="french")
    index = BooleanIndex.build(corpus, config)
    index.save(tmp_path / "i")
    queries = Queries(['"été 日本"', "日* NOT run", "ça OR NOT cat*", '"run* of cat"', "cat AND"])
    wanted = index.search(queries, 50)
    opened = BooleanIndex.open(tmp_path / "i", StoredCorpus(tmp_path / "c"))
    assert opened.config == config
    assert isinstance(opened._places.passages, np.memmap)
    over = BooleanIndex.over(BM25Index.open(tmp_path / "i" / "bm25", corpus))
    opened.save(tmp_path / "i")  # where it is mapped
    for again in (opened, over, BooleanIndex.open(tmp_path / "i", corpus)):
        for one, other in zip(wanted, again.search(queries, 50)):
            np.testing.assert_array_equal(one, other)
    for path in (tmp_path / "i").rglob("*.*"):
        if path.suffix == ".npy":
            assert np.load(path, allow_pickle=False).dtype.kind in "fi"
        else:
            json.loads(path.read_bytes())


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    corpus = stored(tmp_path / "c", ["cat", "dog", "cat dog"])
    other = stored(tmp_path / "o", ["cat", "dog", "cat dogs cow"])
    folder = tmp_path / "i"
    index = BooleanIndex.build(corpus)
    index.save(folder)
    with pytest.raises(InputError, match="field corpus"):
        BooleanIndex.open(folder, other)
    with pytest.raises(InputError, match="holds no finished"):
        BooleanIndex.open(tmp_path / "none", corpus)
    with pytest.raises(InputError, match="field engine"):
        BM25Index.open(folder, corpus)
    with pytest.raises(InputError, match="field engine"):
        BooleanIndex.open(folder / "bm25", corpus)
    with pytest.raises(InputError, match="field engine"):
        index.save(folder / "bm25")

    mixed = tmp_path / "settings"
    index.save(mixed)
    shutil.rmtree(mixed / "bm25")
    BM25Index.build(corpus, BM25Config(k1=1.0)).save(mixed / "bm25")
    with pytest.raises(InputError, match="settings of words"):
        BooleanIndex.open(mixed, corpus)

    evil = folder / "places.npy"
    whole = evil.read_bytes()
    np.save(evil, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match=r"places\.npy is"):
        BooleanIndex.open(folder, corpus)
    said = json.loads((folder / "manifest.json").read_bytes())
    said["files"][evil.name] = evil.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match="is damaged"):
        BooleanIndex.open(folder, corpus)
    np.save(evil, np.zeros(3, np.int32))
    said["files"][evil.name] = evil.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(InputError, match=r"places\.npy"):
        BooleanIndex.open(folder, corpus)
    evil.write_bytes(whole)
    (folder / "forms.json").unlink()
    with pytest.raises(InputError, match=r"forms\.json is missing|places\.npy is"):
        BooleanIndex.open(folder, corpus)


def test_an_index_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk while BM25's files are replaced; then it is saved whole over what is there."""
    corpus = stored(tmp_path / "c", ["cat", "dog"])
    index = BooleanIndex.build(corpus)
    index.save(tmp_path / "i")

    def full(self: BM25Index, folder: Path) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BM25Index, "save", full)
        with pytest.raises(OSError, match="No space"):
            index.save(tmp_path / "i")
    with pytest.raises(InputError, match="holds no finished"):
        BooleanIndex.open(tmp_path / "i", corpus)
    index.save(tmp_path / "i")
    again = BooleanIndex.open(tmp_path / "i", corpus)
    assert again.search(Queries(["cat"]), 1).numbers.tolist() == [[0]]
    assert not [path for path in (tmp_path / "i").iterdir() if path.name.startswith(".")]


def test_words_that_an_index_lacks_are_told(tmp_path: Path) -> None:
    ranking = BM25Index.build(stored(tmp_path / "c", ["cat", "dog"]))
    ranking.corpus = stored(tmp_path / "o", ["cat", "cow"])
    with pytest.raises(InputError, match="'cow'"):
        BooleanIndex.over(ranking)
