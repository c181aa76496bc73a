"""Gold passages are found by their text, however a data set writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.data.config import DataConfig
from qrag_jax.data.files.corpora import read_corpus
from qrag_jax.data.rag_questions import load_questions
from qrag_jax.data.sample import Page
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.gold_names import names_of, pooled
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


ADA, LAKE, BARE = Page("Ada Berg", "She sails."), Page("Lake (film)", "Old."), Page("", "No. 7!")


def test_each_passage_is_there_once_in_the_order_of_first_sight() -> None:
    again = Page("ADA BERG", "She  sails", id="elsewhere")
    other = Page("Ada Berg", "She flies.")
    found = pooled([ADA, LAKE, again, BARE, other, LAKE])
    assert [(each.title, each.text) for each in found] == [
        ("Ada Berg", "She sails."),
        ("Lake (film)", "Old."),
        ("", "No. 7!"),
        ("Ada Berg", "She flies."),
    ]
    assert pooled([]) == []


def test_ids_are_readable_and_do_not_depend_on_the_pool() -> None:
    found = pooled([ADA, LAKE, BARE])
    assert found[0] == Passage("ada-berg-864caa4b", "She sails.", "Ada Berg")
    assert [each.name.rpartition("-")[0] for each in found] == ["ada-berg", "lake-film", "no-7"]
    assert pooled([BARE, Page("Ada Berg", "She flies."), LAKE])[2] == found[1]
    (long,) = pooled([Page("Very " * 20, "long")])
    assert len(long.name) <= 49


def test_passages_without_letters_are_told_apart() -> None:
    found = pooled([Page("!!!", "?"), Page("???", "?"), Page("!!!", "?")])
    assert [each.title for each in found] == ["!!!", "???"]
    assert len({each.name for each in found}) == 2
    assert all(len(each.name) == 8 for each in found)
