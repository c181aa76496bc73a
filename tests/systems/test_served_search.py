"""What is served, of every engine: the hits are those that the parts themselves give."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.serving.searcher import Ask
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.retriever import Retriever
from qrag_jax.systems.served_search import ServedSearch
from tests.serving.small_index import words_index
from tests.systems.corpora import records, write_corpus_file, write_tower

COUNT = 40


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tower(tmp_path_factory.mktemp("tower") / "tower")


@pytest.fixture(scope="module")
def index(tower: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same vectors for the engines exact and faiss."""
    folder = tmp_path_factory.mktemp("index")
    source = write_corpus_file(folder / "corpus.jsonl", COUNT)
    index_corpus(source, folder / "out", PassageEncoder.of_folder(str(tower)))
    corpus = StoredCorpus(folder / "out" / "corpus")
    exact = ExactIndex.open(folder / "out" / "exact", corpus)
    (folder / "out" / "faiss").mkdir()
    vectors = exact.vectors(range(COUNT))
    FaissIndex(corpus, vectors, exact.encoder).save(folder / "out" / "faiss")
    return folder / "out"


def short_texts() -> list[tuple[str, str]]:
    """(id, text) of passages without title that are short, and as no other is."""
    made = [(str(r["id"]), str(r["text"])) for r in records(COUNT) if not r["title"]]
    texts = [text for _, text in made]
    return [
        (name, text) for name, text in made if 3 < len(text.split()) < 20 and texts.count(text) == 1
    ]


@pytest.mark.parametrize("engine", ["exact", "faiss"])
def test_a_plain_encoder_finds_what_is_asked_word_by_word(
    engine: str, index: Path, tower: Path
) -> None:
    searcher = ServedSearch(index, engine, encoder=str(tower)).open()
    asked = short_texts()
    outcomes = searcher.search([Ask(text, count=5) for _, text in asked])
    vectors = ExactIndex.open(index / "exact", searcher.corpus).vectors(range(COUNT))  # type: ignore[arg-type]
    for (name, _), hits in zip(asked, outcomes, strict=True):
        assert isinstance(hits, list)
        # The question's vector is that of the passage itself.
        scores = vectors @ vectors[int(name[1:])]
        np.testing.assert_allclose([h.score for h in hits], np.sort(scores)[::-1][:5], rtol=1e-3)
        assert len(hits) == 5
    (refused,) = searcher.search([Ask("river " * 70)])
    assert isinstance(refused, InputError)
    assert "longer than the encoder reads" in str(refused)
    (few,) = searcher.search([Ask("river stone", count=20, where={"page": 2})])
    assert isinstance(few, list)
    assert [int(hit.metadata["page"]) for hit in few] == [2] * 10


def test_a_prefix_of_questions_is_read_by_the_encoder(index: Path, tower: Path) -> None:
    plain, prefixed = (
        ServedSearch(index, "exact", encoder=str(tower), config=EncoderConfig(state_prefix=text))
        for text in ("", "river stone ")
    )
    one, other = prefixed.open().search([Ask("clock")]), plain.open().search([Ask("clock")])
    assert one != other
    long = EncoderConfig(state_prefix="river " * 70)
    with pytest.raises(InputError, match="leaves them no room"):
        ServedSearch(index, "exact", encoder=str(tower), config=long).open()


def test_what_does_not_belong_together(index: Path, tower: Path, tmp_path: Path) -> None:
    for served, told in [
        (ServedSearch(index, encoder=str(tower)), "indexes of exact and faiss; name one with --en"),
        (ServedSearch(index, "exact"), "give what makes vectors of questions"),
        (ServedSearch(index, "exact", encoder=str(write_tower(tmp_path / "b", 1))), "encoder"),
        (ServedSearch(index, "bm25"), "holds no finished index of bm25"),
        (ServedSearch(index, "exact", retriever=str(tmp_path)), "holds no retriever"),
    ]:
        with pytest.raises(InputError, match=told):
            served.open()
    words_index(tmp_path / "words")
    with pytest.raises(InputError, match="a trained retriever vectors"):
        ServedSearch(tmp_path / "words", retriever=str(tower)).open()


@pytest.mark.parametrize("engine", ["exact", "faiss"])
def test_an_export_is_served_as_it_searches(engine: str, exported: Path, tmp_path: Path) -> None:
    source = write_corpus_file(tmp_path / "corpus.jsonl", COUNT)
    retriever = Retriever.load(exported)
    retriever.index(source, tmp_path / "index")
    questions = ["which river", "a silver clock in the garden", "paper"]
    retriever.open(tmp_path / "index", engine)
    shutil.rmtree(tmp_path / "index" / "faiss", ignore_errors=True)
    searcher = ServedSearch(tmp_path / "index", engine, retriever=str(exported)).open()
    assert searcher.most_steps == retriever.rules.max_steps > 1

    def ids(hits: object) -> list[tuple[int, str]]:
        assert isinstance(hits, list)
        return [(hit.step, hit.id) for hit in hits if isinstance(hit, Hit)]

    expected = retriever.search(questions)
    found = searcher.search([Ask(question) for question in questions])
    assert [ids(hits) for hits in found] == [ids(hits) for hits in expected]
    wide = retriever.search(questions, 2, beam=4, where={"page": [0, 3]})
    found = searcher.search([Ask(q, steps=2, beam=4, where={"page": [0, 3]}) for q in questions])
    assert [ids(hits) for hits in found] == [ids(hits) for hits in wide]
    assert all(len(ids(hits)) == 2 for hits in found)
    many = searcher.search([Ask(question, count=7) for question in questions])
    assert [len(ids(hits)) for hits in many] == [7] * 3
