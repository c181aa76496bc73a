"""Tools that read a corpus: what they give, by which ids, and what is gold there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.environments.tools.episode import Look, Open
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.opening import BM25, CORPUS, IndexAt
from qrag_jax.rollouts.corpus_library import CorpusLibrary, on_corpus
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.plain_search import open_plain

QUESTIONS = [bridge_question(0, "train", index) for index in range(4)]
TASKS = [bridge_task(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of words over the passages of all questions; those of the last are changed."""
    source = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    rows = []
    for number, task in enumerate(TASKS):
        more = " It is ``old''." if number == 3 else ""
        for each in task.documents:
            text = each.text.partition("\n")[2] + more  # a document has its title as a heading
            rows.append({"id": f"{number}-{each.id}", "title": each.title, "text": text})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = source.parent / "index"
    index_corpus(source, out, None, IndexSettings(engine=BM25))
    return out


@pytest.fixture(scope="module")
def corpus(folder: Path) -> StoredCorpus:
    return StoredCorpus(folder / CORPUS)


@pytest.fixture(scope="module")
def library(folder: Path, corpus: StoredCorpus) -> CorpusLibrary:
    return CorpusLibrary(corpus, open_plain(IndexAt(folder, BM25)))


def test_gold_documents_are_found_by_their_text(corpus: StoredCorpus) -> None:
    found = on_corpus(TASKS, corpus)
    for number in range(3):
        own = {f"{number}-{each.id}" for each in TASKS[number].documents if each.is_supporting}
        assert found[number].documents == ()
        assert set(found[number].gold) == own
        assert len(own) == 2
        kept = dataclasses.replace(found[number], documents=TASKS[number].documents, gold_ids=())
        assert kept == TASKS[number]
    # The texts of the last question's passages are others in the corpus.
    assert found[3].gold == ()
    assert found[3].hops == 2


def test_a_search_gives_passages_of_all_questions(
    library: CorpusLibrary, corpus: StoredCorpus
) -> None:
    tasks = on_corpus(TASKS, corpus)
    query = f"{QUESTIONS[0].entity} is of the city"
    looks = [Look(query, 3), Look(QUESTIONS[1].entity, 1), Look(query, 5)]
    first, second, longer = library.look(list(zip(tasks[:3], looks, strict=True)))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert isinstance(longer, tuple)
    assert [len(first), len(second), len(longer)] == [3, 1, 5]
    assert [each.id for each in first] == [each.id for each in longer[:3]]
    assert len({each.id for each in longer}) == 5
    own = TASKS[0].documents[int(first[0].id.partition("-")[2])]
    assert (first[0].text, first[0].title) == (own.text, own.title)
    # What is gold is said by the task that asks.
    assert first[0].id in tasks[0].gold
    assert first[0].is_supporting
    assert longer[0] == first[0]._replace(is_supporting=False)
    assert library.look([(tasks[0], Look("qqqq", 3))]) == [()]
    assert library.look([]) == []


def test_a_passage_is_opened_by_its_id(library: CorpusLibrary, corpus: StoredCorpus) -> None:
    tasks = on_corpus(TASKS, corpus)
    opened = library.open(tasks[0], Open(tasks[0].gold[0]))
    assert opened is not None
    assert opened.is_supporting
    assert library.open(tasks[1], Open(opened.id)) == opened._replace(is_supporting=False)
    assert library.open(tasks[0], Open("7")) is None
    quoted = library.open(tasks[3], Open("3-0"))
    assert quoted is not None
    assert quoted.text.endswith('It is "old".')
    as_it_is = CorpusLibrary(corpus, None, clean=False).open(tasks[3], Open("3-0"))
    assert as_it_is is not None
    assert as_it_is.text.endswith("It is ``old''.")


def test_golden_gives_what_the_question_needs(corpus: StoredCorpus) -> None:
    tasks = on_corpus(TASKS, corpus)
    asked = [(tasks[1], Look("anything", 1)), (tasks[3], Look("anything", 1))]
    found, nothing = CorpusLibrary(corpus, None).look(asked)
    assert isinstance(found, tuple)
    assert [each.id for each in found] == [*tasks[1].gold]
    assert nothing == ()
