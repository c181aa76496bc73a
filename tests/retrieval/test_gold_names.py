"""Gold passages are found by their text, however a data set writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.data.rag_questions import load_questions
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.gold_names import names_of
from qrag_jax.retrieval.protocol import Passage
from tests.data.real_data import real
from tests.retrieval.array_index import ListedCorpus


def test_titles_and_marks_do_not_matter() -> None:
    corpus = ListedCorpus(
        [
            Passage("a", "It is in Norway.", "Oslo"),
            Passage("b", "It is in Norway!", "oslo"),  # the same, later
            Passage("c", "Rome: old"),
            Passage("d", "", "..."),
        ]
    )
    found = names_of(corpus, ["Oslo. It is in Norway.", "Rome old", "Paris", "Rome: old"])
    assert found == {"Oslo. It is in Norway.": "a", "Rome old": "c", "Rome: old": "c"}


def test_a_corpus_of_many_passages() -> None:
    corpus = ListedCorpus([Passage(f"p{i}", f"passage {i}") for i in range(25_000)])
    assert names_of(corpus, ["passage 24999", "Passage 7"]) == {
        "passage 24999": "p24999",
        "Passage 7": "p7",
    }


@pytest.mark.slow
def test_two_wikis_gold_passages_are_in_its_open_corpus(tmp_path: Path) -> None:
    folder = real("2wikimultihopqa")
    passages = (Passage(*r.document) for r in read_corpus(folder / "open_corpus.jsonl.gz"))
    corpus = write_corpus(tmp_path / "corpus", passages)
    config = DataConfig(path=str(folder), sources={"two_wiki": 1.0})
    questions = load_questions(config, config, taken_apart=True, max_hops=4)
    gold = {text for each in (*questions.train, *questions.dev) for text in each.gold}
    found = names_of(corpus, gold)
    assert len(found) > 0.99 * len(gold)
