"""Chunk filters on rows made by hand."""

from __future__ import annotations

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.chunk_filters import FILTERS, filter_chunks
from qrag_jax.metrics.retrieval_log import Row


def row(taken: list[int], q: list[float], support: list[int]) -> Row:
    texts = [f"chunk {i}" for i in taken]
    facts = [f"chunk {i}" for i in support]
    return Row("a", "Who?", "", support, taken, q, facts, texts, 1.0, 9, 0.0, 0.0)


ROW = row([4, 1, 7, 2, 9], [0.9, 0.5, 0.6, 0.1, 0.2], [7, 1])


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("none", None, [4, 1, 7, 2, 9]),
        ("qvalue", 0.3, [4, 1, 7]),  # 0.2 comes after the first that is too low
        ("qvalue", 0.5, [4]),  # at the threshold is not above it
        ("qvalue", 2.0, []),
        ("retrieval_step", 2, [4, 1]),
        ("retrieval_step", 9, [4, 1, 7, 2, 9]),
        ("retrieval_step", 0, []),
        ("early_stop", None, [4, 1, 7]),
        ("no_noise", None, [1, 7]),
        ("gt", None, [1, 7]),
    ],
)
def test_kept(name, value, kept) -> None:
    found = filter_chunks(name, ROW, value)
    assert found.pred_idx == kept
    assert found.pred_texts == [f"chunk {i}" for i in kept]
    if name != "gt":
        assert found.q_values == [ROW.q_values[ROW.pred_idx.index(i)] for i in kept]
    hits = len({1, 7} & set(kept))
    assert found.f1 == pytest.approx(2 * hits / (2 + len(kept)))
    assert found.em == float(hits == 2)
    assert (found.id, found.sf_idx, found.ret) == (ROW.id, ROW.sf_idx, ROW.ret)


def test_early_stop_leaves_nothing_where_no_fact_was_taken() -> None:
    assert filter_chunks("early_stop", row([4, 5], [1.0, 0.9], [1])).pred_idx == []


def test_the_rows_filtered_are_left_as_they_are() -> None:
    before = ROW.pred_idx.copy()
    for name in FILTERS:
        filter_chunks(name, ROW, 1.0 if name in ("qvalue", "retrieval_step") else None)
    assert ROW.pred_idx == before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("best", None, "'best' is unknown; use one of none, qvalue"),
        ("qvalue", None, "qvalue needs the threshold of Q"),
        ("none", 1.0, "none takes no value"),
        ("retrieval_step", -1.0, "needs a count"),
        ("retrieval_step", 1.5, "needs a count"),
    ],
)
def test_refusals(name, value, said) -> None:
    with pytest.raises(InputError, match=said):
        filter_chunks(name, ROW, value)
