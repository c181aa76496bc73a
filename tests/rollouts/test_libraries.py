"""What agents search: passages of a corpus or a service, gold ones, and results that are kept."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.sample import Passage, Sample
from qrag_jax.environments.episode import Document, Look, Open
from qrag_jax.environments.queries import BY_PASSAGE, BY_TITLE, QueryState
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.index_folder import BM25, CORPUS, IndexAt
from qrag_jax.rollouts.libraries import CorpusLibrary, KeptResults, on_corpus, states_on
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.retriever import open_plain
from tests.environments.trying import world

QUESTIONS = world(4)
TASKS = [bridge_task(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CorpusLibrary:
    source = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    rows = []
    for number, task in enumerate(TASKS):
        more = " It is ``old''." if number == 3 else ""
        for item in task.documents:
            text = item.text.partition("\n")[2] + more  # a document has its title as a heading
            rows.append({"id": f"{number}-{item.id}", "title": item.title, "text": text})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = source.parent / "index"
    index_corpus(source, out, None, IndexSettings(engine=BM25))
    return CorpusLibrary(StoredCorpus(out / CORPUS), open_plain(IndexAt(out, BM25)))


def test_gold_documents_are_matched_by_text_and_questions_share_passages(
    library: CorpusLibrary,
) -> None:
    tasks = on_corpus(TASKS, library.corpus)
    for number in range(3):
        gold = {f"{number}-{item.id}" for item in TASKS[number].documents if item.is_supporting}
        assert (tasks[number].documents, {*tasks[number].gold}) == ((), gold)
    # The texts of the last question's passages are others in the corpus.
    assert (tasks[3].gold, tasks[3].hops) == ((), 2)
    query = f"{QUESTIONS[0].entity} is of the city"
    looks = [Look(query, 3), Look(QUESTIONS[1].entity, 1), Look(query, 5)]
    found: Any = library.look(list(zip(tasks[:3], looks, strict=True)))
    first, _, longer = found
    assert [*map(len, found)] == [3, 1, 5]
    assert [item.id for item in first] == [item.id for item in longer[:3]]
    stored = TASKS[0].documents[int(first[0].id.partition("-")[2])]
    assert (first[0].text, first[0].title) == (stored.text, stored.title)
    assert library.look([(tasks[0], Look("qqqq", 3))]) == [()]
    (opened,) = library.open(tasks[1], Open(tasks[0].gold[0]))
    assert opened.id == tasks[0].gold[0]
    assert library.open(tasks[0], Open("7")) == ()
    (quoted,) = library.open(tasks[3], Open("3-0"))
    assert quoted.text.endswith('It is "old".')


# ---------------------------------------------------------------- questions of query writers

LAKE, ADA, MORE = (
    Passage("", "Deep.", "The Lake"),
    Passage("", "Sails.", "Ada Berg"),
    Passage("", "Old.", "Ada Bérg"),
)
PASSAGES = (  # two are of one page, one has no title
    *(Passage("l", "Deep.", "The Lake"), Passage("a1", "Sails!", "Ada Berg")),
    *(Passage("a2", "Old.", "Ada Bérg"), Passage("n", "Nothing."), Passage("m", "Marks.", "!?")),
)


def asked(name: str, *gold: Passage) -> Sample:
    return Sample(name, f"{name}?", (), (), ("yes",), "", pages=gold)


def test_gold_pages_are_known_by_title_or_by_passage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "corpus", PASSAGES)
    given = [asked("q", ADA, LAKE, MORE), asked("t", Passage(title="the lake"))]
    pages = {"gold_ids": ("a1", "a2", "l"), "pages": ("ada berg", "the lake")}
    expected = [
        QueryState("q", "q?", ("yes",), hops=2, **pages),
        QueryState("t", "t?", ("yes",), hops=1, gold_ids=("l",), pages=("the lake",)),
    ]
    assert states_on(given, corpus, BY_TITLE) == expected
    bare, named = Passage("", "nothing"), Passage("a2", title="Whatever")
    states = states_on([asked("q", MORE, ADA, bare), asked("i", named)], corpus, BY_PASSAGE)
    assert [(item.pages, item.hops) for item in states] == [(("a2", "a1", "n"), 3), (("a2",), 1)]
    assert all(item.pages == item.gold_ids for item in states)
    # Questions that lack a page are left out and counted.
    rome = Passage("", "Large.", "Rome")
    marks = Passage("", "Marks.", "!?")  # a title of marks is a title, too
    questions = [asked("a", LAKE), asked("b", LAKE, rome), asked("c", marks), asked("d", ADA)]
    for by in (BY_TITLE, BY_PASSAGE):
        states = states_on(questions, corpus, by, 0.5)
        assert [item.id for item in states] == ["a", "c", "d"]
        assert "1 of 4" in capsys.readouterr().out
    for wrong, by, share, field in (
        (questions, BY_TITLE, 0.2, "max_missing_share"),
        ([asked("q", Passage(title="The Lake"))], BY_PASSAGE, 0.0, "gold_by"),
    ):
        with pytest.raises(InputError, match=field):
            states_on(wrong, corpus, by, share)


# ---------------------------------------------------------------- results that are kept

DEAD = Failure("server", "status 500")
COLLECTIONS = {
    name: Sample(name, "Where?", grades=((gold, 1),), collection=collection)
    for name, gold, collection in (("ada", "x-1", "x"), ("berg", "x-0", "x"), ("other", "", "y"))
}


class Shelf:
    """Finds k documents of the task's collection; the title of each is what was searched for."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str, int]]] = []

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        self.calls.append([(self.digest(t), step.query.strip(), step.most) for t, step in asked])
        return [
            tuple(Document(f"{name}-{n}", query, "text", score=9.5 - n) for n in range(most))
            if query != "c"
            else DEAD
            for name, query, most in self.calls[-1]
        ]

    def digest(self, task: Sample) -> str:
        return task.collection


@pytest.mark.parametrize("most", [0, 3])
def test_results_are_kept_by_collection_query_and_k(most: int) -> None:
    """Against a slow cache of those used last; failures are not kept, empty results are."""
    draw, shelf = random.Random(most), Shelf()
    kept = KeptResults(shelf, most)
    slow: OrderedDict[tuple[str, str, int], None] = OrderedDict()
    expected: list[tuple[str, str, int]] = []
    for _ in range(300):
        task, query = draw.choice([*COLLECTIONS.values()]), draw.choice("abc")
        k = draw.choice((0, 2))
        key = (task.collection, query, k)
        (result,) = kept.look([(task, Look(draw.choice(("", " \n")) + query, k))])
        if key in slow:
            slow.move_to_end(key)
        else:
            expected.append(key)
            if query != "c":
                slow[key] = None
                if len(slow) > most:
                    slow.popitem(last=False)
        if query == "c":
            assert result == DEAD
        else:
            assert isinstance(result, tuple)
            assert [item.id for item in result] == [f"{task.collection}-{n}" for n in range(k)]
    assert [item for call in shelf.calls for item in call] == expected
    assert (kept.asked, kept.searched) == (300, len(expected))


def test_equal_queries_of_one_call_are_searched_once_also_where_few_are_kept() -> None:
    shelf = Shelf()
    tasks, kept = [COLLECTIONS["ada"], COLLECTIONS["berg"]], KeptResults(shelf, 1)
    result: Any = kept.look([(tasks[n % 2], Look(query, 1)) for n, query in enumerate("abaAb")])
    assert [item[0].title for item in result] == [*"abaAb"]  # case matters
    assert shelf.calls == [[("x", query, 1) for query in "abA"]]
    assert kept.look([]) == []
