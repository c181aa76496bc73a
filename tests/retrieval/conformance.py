"""What every engine of search must do, as checks that are run with each engine.

`run_with(ENGINE, CHECKS)` is a test with these checks: an engine needs one line in its test file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import (
    NONE,
    Hits,
    Index,
    Passage,
    Queries,
    VectorIndex,
    Where,
)

WIDTH = 13
WORDS = ("red", "green", "blue", "round", "square", "heavy", "light", "old", "new", "fast")


class Engine(NamedTuple):
    """An engine under test.

    make: builds it from a corpus and its vectors float32 `[passages, width]`.
    open: opens it from the folder that it was saved in.
    save: writes its files.
    """

    make: Callable[[StoredCorpus, np.ndarray], Index]
    open: Callable[[Path, StoredCorpus], Index]
    save: Callable[[Any, Path], None] = lambda index, folder: index.save(folder)


class Task(NamedTuple):
    """A corpus with vectors of whole numbers, many of them equal, and queries of that kind."""

    corpus: StoredCorpus
    vectors: np.ndarray
    queries: Queries


Check = Callable[[Engine, Path], None]


def task_of(folder: Path, passages: int, width: int = WIDTH, queries: int = 9) -> Task:
    """A task drawn at random; vectors 0 and 1 are zero, and every third is one of four."""
    rng = np.random.default_rng(passages * 1000 + width)
    vectors = rng.integers(-8, 9, (passages, width)).astype(np.float32)
    vectors[::3] = vectors[:4][np.arange(len(vectors[::3])) % min(4, passages)]
    vectors[:2] = 0
    given = rng.integers(-8, 9, (queries, width)).astype(np.float32)
    given[-1] = 0
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(queries)]
    return Task(corpus_of(folder, passages), vectors, Queries(texts, given))


def corpus_of(folder: Path, passages: int) -> StoredCorpus:
    """A corpus of so many passages; `kind` is the number modulo 5, `rare` is in number 2 alone."""
    rng = np.random.default_rng(passages)
    return write_corpus(
        folder,
        (
            Passage(
                f"id {number}",
                " ".join(rng.choice(WORDS, 4)),
                metadata={"kind": number % 5} | ({"rare": True} if number == 2 else {}),
            )
            for number in range(passages)
        ),
    )


def searched(task: Task, k: int, where: Where | None = None) -> Hits:
    """The hits by NumPy in float64."""
    scores = task.queries.vectors.astype(np.float64) @ task.vectors.astype(np.float64).T
    if where is not None:
        scores[:, ~task.corpus.matching(where)] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(scores, order, axis=1)
    short = ((0, 0), (0, k - order.shape[1]))
    return Hits(
        np.pad(np.where(best == -np.inf, NONE, order), short, constant_values=NONE),
        np.pad(best, short, constant_values=-np.inf).astype(np.float32),
    )


def assert_same(found: Hits, wanted: Hits) -> None:
    """To the bit."""
    np.testing.assert_array_equal(found.numbers, wanted.numbers)
    np.testing.assert_array_equal(found.scores, wanted.scores)


def assert_well_formed(hits: Hits, queries: int, k: int) -> None:
    """Shapes, dtypes and order; no passage is there twice."""
    numbers, scores = hits
    assert (numbers.shape, numbers.dtype) == ((queries, k), np.int64)
    assert (scores.shape, scores.dtype) == ((queries, k), np.float32)
    for row, values in zip(numbers, scores, strict=True):
        there = row != NONE
        assert (values[~there] == -np.inf).all()
        assert np.isfinite(values[there]).all()
        assert len(set(row[there])) == there.sum()
        pairs = list(zip(-values[there], row[there], strict=True))
        assert pairs == sorted(pairs)
        assert not there[len(pairs) :].any()


def hits_are_well_formed(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index = engine.make(task.corpus, task.vectors)
    assert index.corpus is task.corpus
    for k in (1, 10, 83, 200):
        hits = index.search(task.queries, k)
        assert_well_formed(hits, len(task.queries), k)
    assert_well_formed(index.search(Queries([], np.zeros((0, WIDTH), np.float32)), 3), 0, 3)


def fewer_are_the_first_of_more(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index = engine.make(task.corpus, task.vectors)
    many = index.search(task.queries, 60)
    few = index.search(task.queries, 7)
    assert_same(few, Hits(many.numbers[:, :7], many.scores[:, :7]))


def queries_do_not_matter_to_each_other(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index = engine.make(task.corpus, task.vectors)
    together = index.search(task.queries, 10)
    for number, text in enumerate(task.queries.texts):
        one = slice(number, number + 1)
        alone = index.search(Queries([text], task.queries.vectors[one]), 10)
        assert_same(alone, Hits(together.numbers[one], together.scores[one]))


def filters_hold(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index = engine.make(task.corpus, task.vectors)
    everything = index.search(task.queries, 83)
    for where in ({"kind": 3}, {"kind": [1, 4]}, {"kind": 2, "rare": True}, {"kind": 77}, {}):
        hits = index.search(task.queries, 20, where)
        assert_well_formed(hits, len(task.queries), 20)
        allowed = np.append(task.corpus.matching(where), False)
        for found, every in zip(hits.numbers, everything.numbers, strict=True):
            wanted = every[allowed[every]][:20]
            np.testing.assert_array_equal(found[: len(wanted)], wanted)
            assert (found[len(wanted) :] == NONE).all()
    assert_same(index.search(task.queries, 83), everything)  # the filter is gone


def an_unknown_field_is_refused(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 20)
    with pytest.raises(InputError, match="'colour'"):
        engine.make(task.corpus, task.vectors).search(task.queries, 3, {"colour": "red"})


def k_must_be_positive(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 20)
    with pytest.raises(InputError, match="k is 0"):
        engine.make(task.corpus, task.vectors).search(task.queries, 0)


def what_was_saved_finds_the_same(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index = engine.make(task.corpus, task.vectors)
    wanted = index.search(task.queries, 12, {"kind": [0, 1, 2]})
    for _ in range(2):  # a second time over the first
        engine.save(index, folder)
    opened = engine.open(folder, StoredCorpus(folder))
    assert_same(opened.search(task.queries, 12, {"kind": [0, 1, 2]}), wanted)


def another_corpus_is_refused(engine: Engine, folder: Path) -> None:
    task = task_of(folder / "one", 20)
    engine.save(engine.make(task.corpus, task.vectors), folder / "one")
    other = corpus_of(folder / "other", 21)
    with pytest.raises(InputError, match="field corpus"):
        engine.open(folder / "one", other)


def numbers_are_those_of_numpy(engine: Engine, folder: Path) -> None:
    """Also: k beyond the corpus, one passage, odd widths, equal vectors, filters."""
    for passages, width in ((1, 1), (2, 5), (15, 1), (83, WIDTH), (1003, 7)):
        task = task_of(folder / f"{passages}x{width}", passages, width)
        index = engine.make(task.corpus, task.vectors)
        for k in (1, 5, 40):
            assert_same(index.search(task.queries, k), searched(task, k))
            for where in ({"kind": 0}, {"kind": [0, 3]}):
                assert_same(index.search(task.queries, k, where), searched(task, k, where))


def all_vectors_alike(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 300)
    for value in (0.0, 2.0, -3.0):
        alike = task._replace(vectors=np.full_like(task.vectors, value))
        index = engine.make(task.corpus, alike.vectors)
        assert_same(index.search(task.queries, 25), searched(alike, 25))


def random_numbers(engine: Engine, folder: Path) -> None:
    """Numbers may differ where scores differ by a rounding only."""
    task = task_of(folder, 700, 24)
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((700, 24)).astype(np.float32)
    queries = rng.standard_normal((9, 24)).astype(np.float32)
    task = Task(task.corpus, vectors, Queries(task.queries.texts, queries))
    found, wanted = engine.make(task.corpus, vectors).search(task.queries, 50), searched(task, 50)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)
    every = queries.astype(np.float64) @ vectors.astype(np.float64).T
    by_number = np.take_along_axis(every, found.numbers, axis=1)
    np.testing.assert_allclose(by_number, found.scores, rtol=1e-5, atol=1e-5)
    assert (found.numbers == wanted.numbers).mean() > 0.99


def vectors_come_back(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 83)
    index: VectorIndex = engine.make(task.corpus, task.vectors)  # type: ignore[assignment]
    found = index.vectors([82, 0, 5, 5])
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, task.vectors[[82, 0, 5, 5]])
    with pytest.raises(IndexError):
        index.vectors([83])
    with pytest.raises(IndexError):
        index.vectors([NONE])


def bad_queries_are_refused(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 20)
    index = engine.make(task.corpus, task.vectors)
    bad = np.full((1, WIDTH), np.nan, np.float32)
    for vectors, message in (
        (None, "have no vectors"),
        (np.zeros((1, WIDTH + 1), np.float32), f"not .number, {WIDTH}."),
        (np.zeros((2, WIDTH), np.float32), "2 vectors for 1 queries"),
        (bad, "the vector 0, counted from 0, holds NaN"),
    ):
        with pytest.raises(InputError, match=message):
            index.search(Queries(["red"], vectors), 3)


def bad_vectors_are_refused(engine: Engine, folder: Path) -> None:
    task = task_of(folder, 20)
    with pytest.raises(InputError, match="19 vectors for 20 passages"):
        engine.make(task.corpus, task.vectors[:19])
    for value in (np.nan, np.inf, -np.inf):
        vectors = task.vectors.copy()
        vectors[7, 3] = value
        with pytest.raises(InputError, match="the vector 7, counted from 0, holds NaN or an inf"):
            engine.make(task.corpus, vectors)


# Of every engine, and of those that compare vectors.
OF_ALL: tuple[Check, ...] = (
    hits_are_well_formed,
    fewer_are_the_first_of_more,
    queries_do_not_matter_to_each_other,
    filters_hold,
    an_unknown_field_is_refused,
    k_must_be_positive,
    what_was_saved_finds_the_same,
    another_corpus_is_refused,
)
OF_VECTORS: tuple[Check, ...] = (
    *OF_ALL,
    numbers_are_those_of_numpy,
    all_vectors_alike,
    random_numbers,
    vectors_come_back,
    bad_queries_are_refused,
    bad_vectors_are_refused,
)


def run_with(engine: Engine, checks: Sequence[Check]) -> Callable[..., None]:
    """A test that runs each check with the engine, in a folder of its own."""

    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    def test(check: Check, tmp_path: Path) -> None:
        check(engine, tmp_path)

    return test
