"""Each chunk filter against its definition, on rows made by hand and on greedy play."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import chunk_filters
from qrag_jax.metrics.chunk_filters import FILTERS, chunk_filter
from qrag_jax.metrics.retrieval_log import Row


def row(sf_idx: list[int], pred_idx: list[int], q_values: list[float] | None = None) -> Row:
    return Row(
        id="hotpot-7",
        question="?",
        answer="!",
        sf_idx=sf_idx,
        pred_idx=pred_idx,
        q_values=[1.0 - 0.125 * i for i in range(len(pred_idx))] if q_values is None else q_values,
        sf_texts=[f"chunk {index}" for index in sf_idx],
        pred_texts=[f"chunk {index}" for index in pred_idx],
        ret=0.75,
        text_len=99,
        f1=0.123,  # wrong on purpose: a filter counts from the indices
        em=0.456,
    )


PLAYED = row([6, 2], [4, 2, 9, 6, 1], [0.5, 0.75, 0.25, 0.5, -0.25])


@pytest.mark.parametrize(
    ("name", "parameters", "kept"),
    [
        ("none", {}, [0, 1, 2, 3, 4]),
        ("qvalue", {"threshold": 0.3}, [0, 1]),  # the later 0.5 comes after the stop
        ("qvalue", {"threshold": 0.25}, [0, 1]),  # a Q equal to the threshold stops
        ("qvalue", {"threshold": 0.2}, [0, 1, 2, 3]),
        ("qvalue", {"threshold": 0.5}, []),
        ("qvalue", {"threshold": -1}, [0, 1, 2, 3, 4]),
        ("retrieval_step", {"steps": 0}, []),
        ("retrieval_step", {"steps": 3}, [0, 1, 2]),
        ("retrieval_step", {"steps": 9}, [0, 1, 2, 3, 4]),
        ("early_stop", {}, [0, 1, 2, 3]),
        ("no_noise", {}, [1, 3]),
    ],
)
def test_what_is_kept(name: str, parameters: dict, kept: list[int]) -> None:
    result = chunk_filter(name, parameters)(PLAYED)
    assert result.pred_idx == [PLAYED.pred_idx[i] for i in kept]
    assert result.q_values == [PLAYED.q_values[i] for i in kept]
    assert result.pred_texts == [PLAYED.pred_texts[i] for i in kept]
    hits = len({2, 6} & set(result.pred_idx))
    assert result.em == float(hits == 2)
    assert result.f1 == pytest.approx(2 * hits / (2 + len(kept)))
    unchanged = {"pred_idx", "q_values", "pred_texts", "f1", "em"}
    for field in dataclasses.fields(Row):
        if field.name not in unchanged:
            assert getattr(result, field.name) == getattr(PLAYED, field.name)


def test_gt_is_the_facts_in_document_order_whatever_was_taken() -> None:
    for taken in ([4, 9], [6, 2], []):
        result = chunk_filter("gt")(row([6, 2], taken))
        assert result.pred_idx == [2, 6]
        assert result.pred_texts == ["chunk 2", "chunk 6"]
        assert result.q_values == []  # they were not played
        assert (result.f1, result.em) == (1.0, 1.0)


def test_early_stop_keeps_all_when_nothing_was_found_and_stops_at_a_part() -> None:
    nothing_found = row([3], [1, 2])
    assert chunk_filters.early_stop(nothing_found) == dataclasses.replace(
        nothing_found, f1=0.0, em=0.0
    )
    partly = chunk_filters.early_stop(row([3, 8], [1, 3, 2]))
    assert partly.pred_idx == [1, 3]
    assert (partly.f1, partly.em) == (0.5, 0.0)


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "gt"])
def test_a_row_that_took_nothing_stays_empty(name: str) -> None:
    parameter = FILTERS[name][1]
    result = chunk_filter(name, {parameter: 1} if parameter else {})(row([3, 8], []))
    assert (result.pred_idx, result.q_values, result.pred_texts) == ([], [], [])
    assert (result.f1, result.em) == (0.0, 0.0)


def test_rows_that_were_not_played_can_be_cut_but_not_by_q() -> None:
    facts = chunk_filter("gt")(PLAYED)
    assert chunk_filter("retrieval_step", {"steps": 1})(facts).pred_idx == [2]
    with pytest.raises(InputError, match="hotpot-7 has 0"):
        chunk_filter("qvalue", {"threshold": 0.0})(facts)


def greedy_play(rng_seed: int, chunks: int, steps: int, stop: float | None) -> Row:
    """Plays a document whose Q depends on all that was taken; stops at the first max Q <= stop."""
    taken: list[int] = []
    q_values: list[float] = []
    while len(taken) < steps:
        q = np.random.default_rng([rng_seed, *taken]).normal(0.3, 0.5, size=chunks)
        q[taken] = -np.inf
        if stop is not None and q.max() <= stop:
            break
        taken.append(int(q.argmax()))
        q_values.append(float(q.max()))
    return row([0, 1], taken, q_values)


def test_cutting_a_log_equals_stopping_in_play() -> None:
    lengths = set()
    for seed in range(60):
        whole = greedy_play(seed, chunks=6, steps=5, stop=None)
        on_a_tie = sorted(whole.q_values)[2]
        for threshold in (0.4, 0.7, 0.9, 1.2, on_a_tie):
            stopped = greedy_play(seed, chunks=6, steps=5, stop=threshold)
            cut = chunk_filter("qvalue", {"threshold": threshold})(whole)
            assert cut == dataclasses.replace(stopped, f1=cut.f1, em=cut.em)
            lengths.add(len(cut.pred_idx))
    assert lengths == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("best", {}, "'best'"),
        ("qvalue", {}, "qvalue needs threshold"),
        ("qvalue", {"threshold": None}, "qvalue needs threshold"),
        ("qvalue", {"threshold": math.nan}, "finite number"),
        ("qvalue", {"threshold": 0.1, "steps": 2}, "takes no steps"),
        ("retrieval_step", {}, "retrieval_step needs steps"),
        ("retrieval_step", {"steps": -1}, "whole number"),
        ("retrieval_step", {"steps": 1.5}, "whole number"),
        ("retrieval_step", {"steps": math.inf}, "whole number"),
        ("gt", {"threshold": 0.1}, "takes no threshold"),
    ],
)
def test_refusals(name: str, parameters: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        chunk_filter(name, parameters)
