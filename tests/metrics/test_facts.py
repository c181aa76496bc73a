"""Facts found, what filters keep of a row, and the threshold at which play should stop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from qrag_jax.metrics.facts import (
    chunk_filter,
    fact_columns,
    fact_em,
    fact_f1,
    fact_precision,
    fact_recall,
    qvalue,
    summarise,
)
from qrag_jax.metrics.row_log import Row
from qrag_jax.metrics.stopping import OBJECTIVES, choose, sweep_thresholds


def row(
    sf_idx: list[int], pred_idx: list[int], q_values: list[float] | None = None, ret: float = 0.0
) -> Row:
    """F1 and EM are wrong on purpose: they shall be counted from the indices."""
    q = [1.0 - 0.125 * i for i in range(len(pred_idx))] if q_values is None else q_values
    texts = ([f"chunk {index}" for index in indices] for indices in (sf_idx, pred_idx))
    return Row("hotpot-7", "?", "", sf_idx, pred_idx, q, *texts, ret, 99, 0.123, 0.456)


def test_facts_by_hand() -> None:
    for support, taken, em, precision, recall, f1 in (
        ([1, 4], [4, 1], 1.0, 1.0, 1.0, 1.0),
        ([1, 4], [4, 2, 1, 7], 1.0, 0.5, 1.0, 2 / 3),  # extra chunks cost F1, not EM
        ([1, 4, 6], [4, 2], 0.0, 0.5, 1 / 3, 0.4),
        ([1, 4], [2, 3], 0.0, 0.0, 0.0, 0.0),
        ([1, 4], [], 0.0, 0.0, 0.0, 0.0),
        ([0, 0, 3], [3, 3, 0], 1.0, 1.0, 1.0, 1.0),  # sets: doubles count once
    ):
        found = [m(support, taken) for m in (fact_em, fact_precision, fact_recall, fact_f1)]
        assert found == pytest.approx([em, precision, recall, f1])


def test_summary_of_a_small_log() -> None:
    rows = [row([0, 1], [0, 1], ret=1.0), row([0, 1], [1, 5, 0], ret=0.5)]
    summary = summarise([*rows, row([2], [3]), row([2, 3], [])])
    wanted = {"fact_em": 2, "fact_f1": 1.8, "fact_precision": 1 + 2 / 3, "fact_recall": 2}
    wanted |= {"steps": 6, "recall@1": 1, "recall@2": 1.5, "recall@3": 2, "return": 1.5}
    assert {name: 4 * value["mean"] for name, value in summary.items()} == pytest.approx(wanted)
    stopped = summarise([row([1], []), row([2, 3], [], ret=0.5)])  # always at once
    assert not any(name.startswith("recall@") for name in stopped)
    assert stopped["fact_f1"] == stopped["steps"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_scores_that_need_facts_are_left_out_without_them() -> None:
    """Not 0: a mean over the rows that have facts, or no such score at all."""

    def without(text: str, answer: str, ret: float | None) -> Row:
        fields: dict[str, Any] = {"answer": answer, "ret": ret, "f1": None, "em": None}
        return dataclasses.replace(row([], [1]), pred_texts=[text], **fields)

    found, missed = without("It is Oslo.", "oslo", 0.5), without("Bergen", "Oslo", None)
    wordless = without("yes", "Yes", 1.0)  # no passage says it
    summary = summarise([row([1], [1], ret=1.0), found, missed, wordless])
    means = {name: value["mean"] for name, value in summary.items()}
    assert means["fact_em"] == means["recall@1"] == means["steps"] == 1.0
    assert means["return"] == pytest.approx(2.5 / 3)
    assert means["answer_found"] == 0.5  # of the two rows whose answers have words
    assert summarise([missed, found]).keys() == {"steps", "answer_found", "return"}
    assert "answer_found" not in summarise([wordless])
    assert "return" not in summarise([missed])


def test_what_filters_keep() -> None:
    played = row([6, 2], [4, 2, 9, 6, 1], [0.5, 0.75, 0.25, 0.5, -0.25])
    for name, parameters, kept in (
        ("none", {}, [0, 1, 2, 3, 4]),
        ("qvalue", {"threshold": 0.3}, [0, 1]),  # the later 0.5 comes after the stop
        ("qvalue", {"threshold": 0.25}, [0, 1]),  # a Q equal to the threshold stops
        ("retrieval_step", {"steps": 0}, []),
        ("retrieval_step", {"steps": 3}, [0, 1, 2]),
        ("early_stop", {}, [0, 1, 2, 3]),
        ("no_noise", {}, [1, 3]),
    ):
        hits = len({1, 3} & {*kept})
        assert chunk_filter(name, parameters)(played) == dataclasses.replace(
            played,
            pred_idx=[played.pred_idx[i] for i in kept],
            q_values=[played.q_values[i] for i in kept],
            pred_texts=[played.pred_texts[i] for i in kept],
            f1=pytest.approx(2 * hits / (2 + len(kept))),
            em=float(hits == 2),
        )
        empty = chunk_filter(name, parameters)(row([3, 8], []))
        assert (empty.pred_idx, empty.f1, empty.em) == ([], 0.0, 0.0)
    facts = chunk_filter("gt")(played)  # in the order of the document
    assert (facts.pred_idx, facts.q_values, facts.f1, facts.em) == ([2, 6], [], 1.0, 1.0)


def random_rows(ties: bool) -> list[Row]:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        steps = int(rng.integers(0, 7))  # rows that stopped at once, too
        q = rng.normal(0.5, 0.3, size=steps) - 0.1 * np.arange(steps)
        q = np.round(q, 1) if ties else q.astype(np.float32)
        taken = rng.permutation(8)[:steps].tolist()
        facts = rng.permutation(8)[: rng.integers(1, 4)].tolist()
        rows.append(row(facts, taken, q.tolist()))
    return rows


def by_hand(rows: list[Row], threshold: float) -> dict[str, float]:
    columns = fact_columns([qvalue(row, threshold) for row in rows])
    return {name: float(np.mean(values)) for name, values in columns.items()}


@pytest.mark.parametrize("ties", [True, False])
def test_every_score_is_that_of_the_rows_cut_at_the_threshold(ties: bool) -> None:
    """And no threshold at all does better than the chosen one."""
    rows = random_rows(ties)
    thresholds, scores = sweep_thresholds(rows)
    assert {*scores} == {*OBJECTIVES, "steps"}
    for k, threshold in enumerate(thresholds):
        found = {name: values[k] for name, values in scores.items()}
        assert found == pytest.approx(by_hand(rows, threshold), abs=1e-12)
    q = np.array([value for row in rows for value in row.q_values])
    # At each Q, just below and above it, and beyond both ends.
    grid = np.unique([*q, *np.nextafter(q, -9), *np.nextafter(q, 9), -2, 3])
    on_grid = [by_hand(rows, threshold) for threshold in grid]
    for objective in OBJECTIVES:
        best = choose(scores[objective], scores["steps"])
        top = max(score[objective] for score in on_grid)
        fewest = min(score["steps"] for score in on_grid if score[objective] >= top - 1e-12)
        assert scores[objective][best] == pytest.approx(top, abs=1e-12)
        assert scores["steps"][best] == pytest.approx(fewest)
    # Equal scores go to the fewest steps, also those that are equal but for rounding.
    assert choose([0.1 + 0.2, 0.3], [2.0, 1.0]) == 1
    assert choose([0.3 + 1e-8, 0.3], [2.0, 1.0]) == 0


def test_candidates_lie_between_running_minima_and_half_a_gap_beyond_them() -> None:
    # 0.75 comes after 0.5, where play has stopped: it decides nothing.
    rows = [row([0], [0, 1, 2], [1.0, 0.5, 0.75]), row([1], [2, 1], [0.5, 0.0])]
    thresholds, scores = sweep_thresholds(rows)
    np.testing.assert_array_equal(thresholds, [1.25, 0.75, 0.25, -0.25])
    np.testing.assert_array_equal(scores["steps"], [0.0, 0.5, 2.0, 2.5])
    low = np.float32(0.7)  # a device distinguishes neighbouring numbers, too
    high = np.nextafter(low, np.float32(1.0))
    rows = [row([0], [0], [float(high)]), row([1], [0], [float(low)])]
    thresholds, scores = sweep_thresholds(rows)
    assert low <= np.float32(thresholds[choose(scores["fact_f1"], scores["steps"])]) < high
