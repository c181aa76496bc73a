"""What is served, of every engine: the hits are those that the parts themselves give."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.opening import IndexAt
from qrag_jax.serving.searcher import Ask, Searcher
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import PlainEncoder, ServedSearch
from qrag_jax.systems.retriever import Retriever
from tests.serving.small_index import words_index
from tests.systems.corpora import records, write_corpus_file, write_tower

pytestmark = pytest.mark.long

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
    searcher = ServedSearch(IndexAt(index, engine), encoder=PlainEncoder(str(tower))).open()
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
    def served(prefix: str) -> Searcher:
        encoder = PlainEncoder(str(tower), EncoderConfig(state_prefix=prefix))
        return ServedSearch(IndexAt(index), encoder=encoder).open()

    one, other = (served(text).search([Ask("clock")]) for text in ("", "river stone "))
    assert one != other
    with pytest.raises(InputError, match="leaves them no room"):
        served("river " * 70)


def test_what_does_not_belong_together(index: Path, tower: Path, tmp_path: Path) -> None:
    words, vectors, other = tmp_path / "words", IndexAt(index), str(write_tower(tmp_path / "b", 1))
    words_index(words)
    encoder = PlainEncoder(str(tower))
    for served, told in [
        (ServedSearch(vectors), "which compares vectors; give what makes vectors of questions"),
        (ServedSearch(IndexAt(index, "faiss")), "the engine faiss compares vectors; give what"),
        (ServedSearch(vectors, encoder=PlainEncoder(other)), "embedded by another encoder"),
        (ServedSearch(IndexAt(index, "bm25")), "holds no finished index of bm25; build it there"),
        (ServedSearch(IndexAt(index, "hybrid"), encoder=encoder), "no finished index of bm25;"),
        (ServedSearch(IndexAt(words), encoder=encoder), "is one of bm25, which compares words;"),
        (ServedSearch(IndexAt(words, "bm25"), encoder=encoder), "leave --encoder out"),
        (ServedSearch(vectors, str(tmp_path)), "holds no retriever"),
        (ServedSearch(IndexAt(words, "exact"), encoder=encoder), "no finished index of exact;"),
        (ServedSearch(IndexAt(tmp_path)), "holds no finished index; build one there"),
    ]:
        with pytest.raises(InputError, match=told):
            served.open()
    with pytest.raises(InputError, match="engine is 'annoy'; use one of exact, scan, faiss"):
        IndexAt(index, "annoy")


def test_words_and_vectors_are_fused(index: Path, tower: Path, tmp_path: Path) -> None:
    shutil.copytree(index, both := tmp_path / "index")
    corpus = StoredCorpus(both / "corpus")
    BM25Index.build(corpus).save(both / "bm25")
    encoder = PlainEncoder(str(tower))
    asks = [Ask(text, count=5) for _, text in short_texts()]
    by_words, by_vectors, fused = (
        served.open().search(asks)
        for served in (
            ServedSearch(IndexAt(both)),  # nothing makes vectors
            ServedSearch(IndexAt(both), encoder=encoder),
            ServedSearch(IndexAt(both, "hybrid"), encoder=encoder),
        )
    )
    own = ServedSearch(IndexAt(index), encoder=encoder).open()
    assert by_vectors == own.search(asks)
    assert by_words not in (by_vectors, fused)
    # Ranks of both: a passage that is first in both has the highest sum there is.
    for one, other, both_of in zip(by_words, by_vectors, fused, strict=True):
        assert isinstance(one, list)
        assert isinstance(other, list)
        assert isinstance(both_of, list)
        if one[0].id == other[0].id:
            assert both_of[0].id == one[0].id
            assert both_of[0].score == pytest.approx(2 / 61)


@pytest.mark.parametrize("engine", ["exact", pytest.param("faiss", marks=pytest.mark.slow)])
def test_an_export_is_served_as_it_searches(engine: str, exported: Path, tmp_path: Path) -> None:
    source = write_corpus_file(tmp_path / "corpus.jsonl", COUNT)
    retriever = Retriever.load(exported)
    retriever.index(source, tmp_path / "index")
    questions = ["which river", "a silver clock in the garden", "paper"]
    retriever.open(tmp_path / "index", engine)
    searcher = ServedSearch(IndexAt(tmp_path / "index", engine), str(exported)).open()
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
