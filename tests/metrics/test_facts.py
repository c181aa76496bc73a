from __future__ import annotations

import dataclasses

import pytest

from qrag_jax.metrics.facts import (
    fact_columns,
    fact_em,
    fact_f1,
    fact_precision,
    fact_recall,
    recall_at,
    summarise,
)
from qrag_jax.metrics.retrieval_log import Row


def row(sf_idx: list[int], pred_idx: list[int], ret: float = 0.0, name: str = "q") -> Row:
    return Row(
        id=name,
        question="?",
        answer="",
        sf_idx=sf_idx,
        pred_idx=pred_idx,
        q_values=[0.0] * len(pred_idx),
        sf_texts=[""] * len(sf_idx),
        pred_texts=[""] * len(pred_idx),
        ret=ret,
        text_len=1,
        f1=0.123,  # wrong on purpose: the summary counts from the indices
        em=0.456,
    )


@pytest.mark.parametrize(
    ("support", "predicted", "em", "precision", "recall", "f1"),
    [
        ([1, 4], [4, 1], 1.0, 1.0, 1.0, 1.0),
        ([1, 4], [4, 2, 1, 7], 1.0, 0.5, 1.0, 2 / 3),  # extra chunks cost F1, not EM
        ([1, 4], [4], 0.0, 1.0, 0.5, 2 / 3),
        ([1, 4, 6], [4, 2], 0.0, 0.5, 1 / 3, 0.4),
        ([1, 4], [2, 3], 0.0, 0.0, 0.0, 0.0),
        ([1, 4], [], 0.0, 0.0, 0.0, 0.0),
        ([0, 0, 3], [3, 3, 0], 1.0, 1.0, 1.0, 1.0),  # sets: doubles count once
    ],
)
def test_metrics_by_hand(
    support: list[int], predicted: list[int], em: float, precision: float, recall: float, f1: float
) -> None:
    assert fact_em(support, predicted) == em
    assert fact_precision(support, predicted) == pytest.approx(precision)
    assert fact_recall(support, predicted) == pytest.approx(recall)
    assert fact_f1(support, predicted) == pytest.approx(f1)


def test_recall_at_looks_at_the_first_k_in_the_order_taken() -> None:
    assert [recall_at([5, 2], [9, 5, 2], k) for k in (1, 2, 3, 4)] == [0.0, 0.5, 1.0, 1.0]
    assert recall_at([5, 2], [], 1) == 0.0


@pytest.mark.parametrize("metric", [fact_em, fact_f1, fact_precision, fact_recall])
def test_empty_support_and_padding_are_refused(metric) -> None:
    with pytest.raises(ValueError, match="support is empty"):
        metric([], [1])
    with pytest.raises(ValueError, match="negative"):
        metric([1], [1, -1])
    with pytest.raises(ValueError, match="negative"):
        metric([-1], [])


def test_recall_at_refuses_k_below_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        recall_at([1], [1], 0)


def test_summary_of_a_small_log() -> None:
    rows = [
        row([0, 1], [0, 1], ret=1.0),
        row([0, 1], [1, 5, 0], ret=0.5),
        row([2], [3], ret=0.0),
        row([2, 3], [], ret=0.0),
    ]
    summary = summarise(rows)
    assert list(summary) == [
        *("fact_em", "fact_f1", "fact_precision", "fact_recall", "steps"),
        *("recall@1", "recall@2", "recall@3", "return", "samples"),
    ]
    assert summary["samples"] == 4
    means = {name: value["mean"] for name, value in summary.items() if name != "samples"}
    assert means == pytest.approx(
        {
            "fact_em": 0.5,
            "fact_f1": (1.0 + 0.8) / 4,
            "fact_precision": (1.0 + 2 / 3) / 4,
            "fact_recall": 0.5,
            "steps": 1.5,
            "recall@1": 0.25,
            "recall@2": 1.5 / 4,
            "recall@3": 0.5,
            "return": 0.375,
        }
    )
    for name in means:
        assert summary[name]["low"] < summary[name]["mean"] < summary[name]["high"]


def test_summary_of_a_retriever_that_always_stopped_at_once() -> None:
    summary = summarise([row([1], []), row([2, 3], [], ret=0.5)])
    assert list(summary) == [
        *("fact_em", "fact_f1", "fact_precision", "fact_recall", "steps", "return", "samples")
    ]
    for name in ("fact_em", "fact_f1", "fact_precision", "fact_recall", "steps"):
        assert summary[name] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert summary["return"]["mean"] == 0.25


def test_scores_that_need_facts_are_left_out_without_them() -> None:
    """Not 0: a mean over the rows that have facts, or no such score at all."""

    def without(text: str, answer: str, ret: float | None) -> Row:
        one = row([], [1], name="own-1", ret=0.0)
        return dataclasses.replace(one, pred_texts=[text], answer=answer, ret=ret, f1=None, em=None)

    found, missed = without("It is Oslo.", "oslo", 0.5), without("Bergen", "Oslo", None)
    wordless = without("yes", "Yes", 1.0)  # no passage says it
    summary = summarise([row([1], [1], ret=1.0), found, missed, wordless])
    means = {name: value["mean"] for name, value in summary.items() if isinstance(value, dict)}
    assert means["fact_em"] == means["recall@1"] == 1.0
    assert means["steps"] == 1.0
    assert means["return"] == pytest.approx(2.5 / 3)
    assert (summary["samples"], summary["with_facts"]) == (4, 1)
    assert means["answer_found"] == 0.5  # of the two rows whose answers have words
    only = summarise([missed, found])
    assert list(only) == ["steps", "answer_found", "return", "samples", "with_facts"]
    assert only["answer_found"]["mean"] == only["return"]["mean"] == 0.5
    assert "answer_found" not in summarise([wordless])
    assert "return" not in summarise([missed])


def test_summary_needs_a_row() -> None:
    with pytest.raises(ValueError, match="hotpot-7"):
        fact_columns([row([1], [1]), row([], [1], name="hotpot-7")])
    with pytest.raises(ValueError, match="least one row"):
        summarise([])
