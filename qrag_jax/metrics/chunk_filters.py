"""Which of the chunks taken are shown to whoever answers: filters on the rows of a retrieval log.

`qvalue` is also how a rule for stopping is judged without playing again: greedy play that stops at
a threshold takes exactly the chunks that the filter leaves (Q-RAG, arXiv 2511.07328, evaluation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from qrag_jax.errors import InputError
from qrag_jax.metrics.facts import fact_em, fact_f1
from qrag_jax.metrics.retrieval_log import Row

GROUND_TRUTH = "gt"


def _all(row: Row, value: float) -> Sequence[int]:
    return range(len(row.pred_idx))


def _above(row: Row, value: float) -> Sequence[int]:
    below = (step for step, q in enumerate(row.q_values) if q <= value)
    return range(next(below, len(row.q_values)))


def _first(row: Row, value: float) -> Sequence[int]:
    return range(min(int(value), len(row.pred_idx)))


def _to_last_fact(row: Row, value: float) -> Sequence[int]:
    hits = _facts(row, value)
    return range(hits[-1] + 1 if hits else 0)


def _facts(row: Row, value: float) -> list[int]:
    support = set(row.sf_idx)
    return [step for step, chunk in enumerate(row.pred_idx) if chunk in support]


# name → the steps that are kept of a row, given the filter's value
_STEPS: dict[str, Callable[[Row, float], Sequence[int]]] = {
    "none": _all,
    "qvalue": _above,
    "retrieval_step": _first,
    "early_stop": _to_last_fact,
    "no_noise": _facts,
}
VALUES = {"qvalue": "the threshold of Q", "retrieval_step": "the number of steps"}
FILTERS = (*_STEPS, GROUND_TRUTH)


def filter_chunks(name: str, row: Row, value: float | None = None) -> Row:
    """The row with the chunks that a filter leaves, `f1` and `em` computed anew.

    - `none`: all. `no_noise`: the supporting facts among them.
    - `qvalue`: those before the first step whose Q is at most `value`.
    - `retrieval_step`: the first `value`.
    - `early_stop`: up to the last supporting fact taken: the shortest play of the same recall.
    - `gt`: the supporting facts themselves, in document order, without Q.

    Raises:
        InputError: see `check_filter`.
    """
    check_filter(name, value)
    if name == GROUND_TRUTH:
        order = sorted(zip(row.sf_idx, row.sf_texts, strict=True))
        chunks, texts = [index for index, _ in order], [text for _, text in order]
        q_values: list[float] = []
    else:
        steps = _STEPS[name](row, 0.0 if value is None else value)
        chunks = [row.pred_idx[step] for step in steps]
        q_values = [row.q_values[step] for step in steps]
        texts = [row.pred_texts[step] for step in steps]
    return dataclasses.replace(
        row,
        pred_idx=chunks,
        q_values=q_values,
        pred_texts=texts,
        f1=fact_f1(row.sf_idx, chunks),
        em=fact_em(row.sf_idx, chunks),
    )


def check_filter(name: str, value: float | None) -> None:
    """Refuses a filter that is not there, or that lacks its value.

    Raises:
        InputError: the name is unknown, a value is missing or one too many, or steps below 0.
    """
    if name not in FILTERS:
        raise InputError(f"the chunk filter {name!r} is unknown; use one of {', '.join(FILTERS)}.")
    if name in VALUES and value is None:
        raise InputError(f"the chunk filter {name} needs {VALUES[name]}; write {name}:VALUE.")
    if name not in VALUES and value is not None:
        raise InputError(f"the chunk filter {name} takes no value; write {name} alone.")
    if name == "retrieval_step" and value is not None and (value < 0 or value != int(value)):
        raise InputError(f"the chunk filter retrieval_step:{value:g} needs a count from 0 up.")
