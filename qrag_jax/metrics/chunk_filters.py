"""Chunk filters: functions of a log's row that choose which chunks of an episode are kept.

Source: Q-RAG (arXiv 2511.07328), which filters between the retrieval log and the model that
answers. A filter keeps the episode's `ret`, cuts `pred_idx`, `q_values` and `pred_texts` alike, and
computes `f1` and `em` anew. If play was greedy, `qvalue` at a threshold keeps exactly the chunks
that an episode with this stopping rule takes, because no step depends on later steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.facts import fact_em, fact_f1
from qrag_jax.metrics.rows import Row

Filter = Callable[[Row], Row]


def none(row: Row) -> Row:
    """All chunks taken: the full budget."""
    return _keep(row, range(len(row.pred_idx)))


def qvalue(row: Row, threshold: float) -> Row:
    """The chunks before the first step whose Q is at most `threshold`."""
    if len(row.q_values) != len(row.pred_idx):
        raise InputError(
            f"sample {row.id} has {len(row.q_values)} Q values for {len(row.pred_idx)} chunks "
            "taken; give the log of a retriever's play, not a filtered one"
        )
    stops = (step for step, q in enumerate(row.q_values) if q <= threshold)
    return _keep(row, range(next(stops, len(row.pred_idx))))


def retrieval_step(row: Row, steps: int) -> Row:
    """The first `steps` chunks taken, or all if there are fewer: a fixed budget."""
    return _keep(row, range(min(steps, len(row.pred_idx))))


def early_stop(row: Row) -> Row:
    """The chunks up to the last supporting fact taken, with it; all chunks if none was taken.

    It is an oracle, as play that knows when it has found them (griver/Q-RAG,
    `EarlyStopChunkFilter`).
    """
    hits = _hits(row)
    return _keep(row, range(hits[-1] + 1 if hits else len(row.pred_idx)))


def gt(row: Row) -> Row:
    """The supporting facts themselves, taken or not, in document order; they have no Q-values."""
    facts = sorted(dict(zip(row.sf_idx, row.sf_texts, strict=True)).items())
    return _scored(row, [index for index, _ in facts], [], [text for _, text in facts])


def no_noise(row: Row) -> Row:
    """The chunks taken that are supporting facts, in the order taken."""
    return _keep(row, _hits(row))


def _hits(row: Row) -> list[int]:
    gold = set(row.sf_idx)
    return [step for step, index in enumerate(row.pred_idx) if index in gold]


# Filters that look at the supporting facts.
BY_FACTS = ("early_stop", "gt", "no_noise")
# Name → (function, the parameter it needs besides the row).
FILTERS: dict[str, tuple[Callable[..., Row], str | None]] = {
    "none": (none, None),
    "qvalue": (qvalue, "threshold"),
    "retrieval_step": (retrieval_step, "steps"),
    "early_stop": (early_stop, None),
    "gt": (gt, None),
    "no_noise": (no_noise, None),
}


def chunk_filter(name: str, parameters: Mapping[str, Any] | None = None) -> Filter:
    """The filter called `name`, with its parameter bound; parameters may be None."""
    if name not in FILTERS:
        raise InputError(f"the chunk filter {name!r} is unknown; use one of {', '.join(FILTERS)}")
    function, parameter = FILTERS[name]
    given = {key: value for key, value in (parameters or {}).items() if value is not None}
    for key in given.keys() - {parameter}:
        raise InputError(f"the chunk filter {name} takes no {key}; leave it out")
    if parameter is None:
        return function
    value = given.get(parameter)
    whole = parameter != "steps" or (isinstance(value, int) and value >= 0)
    if not (isinstance(value, (int, float)) and math.isfinite(value) and whole):
        kind = "a whole number >= 0" if parameter == "steps" else "a finite number"
        raise InputError(f"the chunk filter {name} needs {parameter}, {kind}; it is {value}")
    return functools.partial(function, **{parameter: value})


def _keep(row: Row, steps: Sequence[int]) -> Row:
    return _scored(
        row,
        [row.pred_idx[step] for step in steps],
        # Rows that were not played (those of `gt`) have no Q values to cut.
        [row.q_values[step] for step in steps] if row.q_values else [],
        [row.pred_texts[step] for step in steps],
    )


def _scored(row: Row, taken: list[int], q_values: list[float], texts: list[str]) -> Row:
    return dataclasses.replace(
        row,
        pred_idx=taken,
        q_values=q_values,
        pred_texts=texts,
        f1=fact_f1(row.sf_idx, taken) if row.sf_idx else None,
        em=fact_em(row.sf_idx, taken) if row.sf_idx else None,
    )


FULL_BUDGET, UNTIL_FOUND = "full budget", "until found"


def until_found(row: Row) -> Row:
    """The row of the episode that ends as soon as all supporting facts are found.

    The return is 1.0 if they are all found. Else the row has all its steps and the return 0.0.
    """
    missing, steps = set(row.sf_idx), 0
    for index in row.pred_idx:
        if not missing:
            break
        missing.discard(index)
        steps += 1
    return dataclasses.replace(retrieval_step(row, steps), ret=float(not missing))
