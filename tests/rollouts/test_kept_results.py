"""Results of searches that are kept: what is the same search, and what is asked again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document, Look, Open, ToolTask
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.kept_results import KeptResults

DEAD = Failure("server", "status 500")
ADA = RewriteTask.judged("1", "Where was Ada Berg born?", {"x-1": 2}, collection="x")
BERG = RewriteTask.judged("2", "Who is Ada Berg?", {"x-0": 1}, collection="x")
OTHER = RewriteTask.judged("1", "Where was Ada Berg born?", {}, collection="y")


class Shelf:
    """Finds k documents of the task's collection; the title of each is what was searched for."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str, int]]] = []
        self.broken: set[str] = set()

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        self.calls.append([(self.digest(task), step.query, step.most) for task, step in asked])
        return [
            DEAD
            if step.query in self.broken
            else tuple(
                Document(f"{self.digest(task)}-{n}", step.query, "text", n == 0, 9.5 - n)
                for n in range(step.most)
            )
            for task, step in asked
        ]

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        return Document(step.doc_id, "", self.digest(task), False)

    def digest(self, task: ToolTask) -> str:
        assert isinstance(task, RewriteTask)
        return task.collection

    @property
    def queries(self) -> list[str]:
        return [query for call in self.calls for _, query, _ in call]


def kept_by(most: int = 100) -> tuple[Shelf, KeptResults]:
    shelf = Shelf()
    return shelf, KeptResults(shelf, most)


def one(kept: KeptResults, query: str, task: RewriteTask = ADA, k: int = 2) -> Any:
    (found,) = kept.look([(task, Look(query, k))])
    return found


def test_an_equal_query_is_searched_once_whoever_asks() -> None:
    shelf, kept = kept_by()
    both = kept.look([(ADA, Look("berg", 2)), (BERG, Look("berg", 2)), (ADA, Look("ada", 2))])
    assert shelf.calls == [[("x", "berg", 2), ("x", "ada", 2)]]
    again = kept.look([(BERG, Look("ada", 2)), (ADA, Look("berg", 2))])
    assert len(shelf.calls) == 1
    assert again[1] == both[0]
    assert [each.id for each in both[0]] == ["x-0", "x-1"]  # type: ignore[union-attr]


def test_what_comes_back_is_what_the_library_finds_but_for_the_tasks_own_gold() -> None:
    shelf, kept = kept_by()
    first, second = one(kept, "berg"), one(kept, "berg", BERG)
    (plain,) = shelf.look([(ADA, Look("berg", 2))])
    assert [each._replace(is_supporting=False) for each in first] == [
        each._replace(is_supporting=False)
        for each in plain  # type: ignore[union-attr]
    ]
    assert [each.is_supporting for each in first] == [False, True]
    assert [each.is_supporting for each in second] == [True, False]
    assert [each.is_supporting for each in one(kept, "berg")] == [False, True]


def test_blanks_do_not_matter_and_case_does() -> None:
    shelf, kept = kept_by()
    assert one(kept, "ada AND berg") == one(kept, "  ada \n AND\tberg ")
    assert shelf.queries == ["ada AND berg"]
    one(kept, "ada and berg")
    assert shelf.queries == ["ada AND berg", "ada and berg"]


def test_k_and_the_collection_make_another_search() -> None:
    shelf, kept = kept_by()
    assert len(one(kept, "berg", k=2)) == 2
    assert len(one(kept, "berg", k=3)) == 3
    assert [each.id for each in one(kept, "berg", OTHER)] == ["y-0", "y-1"]
    assert len(one(kept, "berg", k=2)) == 2
    assert [call[0] for call in shelf.calls] == [
        ("x", "berg", 2),
        ("x", "berg", 3),
        ("y", "berg", 2),
    ]


def test_failures_are_not_kept() -> None:
    shelf, kept = kept_by()
    shelf.broken = {"berg"}
    found = kept.look([(ADA, Look("berg", 2)), (ADA, Look("ada", 2)), (BERG, Look("berg", 2))])
    assert found[0] == found[2] == DEAD
    assert isinstance(found[1], tuple)
    assert shelf.queries == ["berg", "ada"]
    assert one(kept, "berg") == DEAD
    shelf.broken = set()
    assert len(one(kept, "berg")) == len(one(kept, "berg")) == 2
    assert shelf.queries == ["berg", "ada", "berg", "berg"]
    assert (kept.asked, kept.searched, kept.failed) == (6, 4, 2)


def test_an_empty_result_is_kept() -> None:
    shelf, kept = kept_by()
    assert one(kept, "nothing", k=0) == one(kept, "nothing", k=0) == ()
    assert shelf.queries == ["nothing"]


def test_those_used_longest_ago_go_first() -> None:
    shelf, kept = kept_by(2)
    for query in ("a", "b", "a", "c"):  # "b" goes
        one(kept, query)
    for query in ("a", "c"):
        one(kept, query)
    assert shelf.queries == ["a", "b", "c"]
    one(kept, "b")  # "a" goes
    one(kept, "c")
    assert shelf.queries == ["a", "b", "c", "b"]
    one(kept, "a")
    assert shelf.queries == ["a", "b", "c", "b", "a"]


def test_a_call_that_asks_for_more_than_is_kept_is_answered_whole() -> None:
    shelf, kept = kept_by(1)
    found = kept.look([(ADA, Look(query, 1)) for query in "abcab"])
    assert [each[0].title for each in found] == [*"abcab"]  # type: ignore[index]
    assert shelf.queries == [*"abc"]
    one(kept, "b", k=1)
    assert shelf.queries == [*"abc"]  # the one that was used last


def test_nothing_is_kept_where_none_may_be() -> None:
    shelf, kept = kept_by(0)
    assert one(kept, "a") == one(kept, "a") != ()
    assert shelf.queries == ["a", "a"]


def test_counts() -> None:
    _, kept = kept_by()
    assert kept.look([]) == []
    kept.look([(ADA, Look("a", 1)), (BERG, Look("a", 1)), (ADA, Look("b", 1))])
    one(kept, "a", k=1)
    assert (kept.asked, kept.searched, kept.failed) == (4, 2, 0)


def test_a_document_is_opened_by_the_library() -> None:
    _, kept = kept_by()
    assert kept.open(OTHER, Open("y-7")) == Document("y-7", "", "y", False)


def test_several_threads_may_ask() -> None:
    _, kept = kept_by(3)
    wrong: list[str] = []

    def ask(number: int) -> None:
        for turn in range(200):
            query = f"q{(number + turn) % 7}"
            if [each.title for each in one(kept, query)] != [query] * 2:
                wrong.append(query)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert kept.asked == 800
