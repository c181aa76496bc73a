"""Pools of a query writer as rows of a retrieval log."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators.answers import corpus_of, pool_rows
from qrag_jax.feedback.pairs import PoolScores
from qrag_jax.metrics.facts import fact_recall
from qrag_jax.metrics.rows import HOPS, Hop, Searched
from qrag_jax.retrieval.corpus import StoredCorpus, write_corpus
from qrag_jax.retrieval.protocol import Passage

PASSAGES = [
    Passage("p0", "It is by Ada.", "The Mill"),
    Passage("p1", "It has ``two'' wheels.", "The Mill!"),
    Passage("p2", "Ada was born in Oslo.", "Ada"),
    Passage("the mill", "Nothing.", ""),  # an id that reads as the key of a title
]
SCORES = {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "search"
    write_corpus(folder / "corpus", PASSAGES)
    return folder


@pytest.fixture
def corpus(folder: Path) -> StoredCorpus:
    return corpus_of(folder)


def log_of(
    path: Path, pages: tuple[str, ...], *pools: tuple[str, ...], by: str = "title", clean=False
) -> Path:
    hops = tuple(Hop("mill", "searched", pool, SCORES) for pool in pools)
    row = Searched("q1", "Where was its founder born?", ("Oslo", "Kristiania"), pages, hops)
    path = path / "log.jsonl"
    HOPS.write(path, [row], {"search": {"gold_by": by, "clean": clean}})
    return path


def test_the_last_pool_is_what_was_taken(tmp_path: Path, corpus: StoredCorpus) -> None:
    pages = ("p0", "p2")
    (row,) = pool_rows(log_of(tmp_path, pages, ("p1",), ("p1", "p2"), by="passage"), corpus)
    assert (row.id, row.answer, row.aliases) == ("q1", "Oslo", ["Kristiania"])
    assert (row.sf_idx, row.pred_idx, row.q_values) == ([0, 2], [1, 2], [])
    assert row.pred_texts == ["# The Mill!\nIt has ``two'' wheels.", "# Ada\nAda was born in Oslo."]
    assert row.sf_texts[0] == "# The Mill\nIt is by Ada."
    assert (row.ret, row.f1, row.em) == (None, 0.5, 0.0)
    assert row.text_len == sum(map(len, row.pred_texts))


@pytest.mark.parametrize(
    ("pool", "gold"),
    [
        (("p2",), [0, 2]),
        (("p2", "p1"), [1, 2]),
        (("p1", "p0"), [1, 2]),
        (("p0", "p2", "p1"), [0, 2]),
    ],
)
def test_a_page_counts_once_as_in_the_logs_scores(
    tmp_path: Path, corpus: StoredCorpus, pool: tuple[str, ...], gold: list[int]
) -> None:
    (row,) = pool_rows(log_of(tmp_path, ("the mill", "ada"), pool, clean=True), corpus)
    assert row.sf_idx == gold
    pages = [{"p0": "the mill", "p1": "the mill", "p2": "ada"}[name] for name in pool]
    scores = PoolScores(k=3, cut=3).of(pages, ("the mill", "ada"), hop=1)
    assert (row.em, fact_recall(row.sf_idx, row.pred_idx)) == (scores["all_gold"], scores["recall"])
    if 1 in gold:
        assert row.sf_texts[0] == '# The Mill!\nIt has "two" wheels.'


def test_another_corpus_and_missing_records_are_refused(
    tmp_path: Path, corpus: StoredCorpus
) -> None:
    for pages, pool, word in ((("ada", "bern"), ("p2",), "'bern'"), (("ada",), ("p9",), "'p9'")):
        with pytest.raises(InputError, match=word):
            pool_rows(log_of(tmp_path, pages, pool), corpus)
    (empty,) = pool_rows(log_of(tmp_path, ("ada",), ()), corpus)  # nothing was found
    assert (empty.pred_idx, empty.pred_texts, empty.em) == ([], [], 0.0)
    path = log_of(tmp_path, ("ada",), ("p2",))
    path.with_suffix(".json").unlink()
    with pytest.raises(InputError, match="gold"):
        pool_rows(path, corpus)
