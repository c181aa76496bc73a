"""DeepRetrieval's tiers and the remake's mix, number by number."""

from __future__ import annotations

import pytest

from qrag_jax.feedback.rewrite_tiers import ENGINES, IR, QA, REMAKE, TIERS, Judged


def reward(tiers: str, value: float, query: str = "x", *, readable: bool = True) -> float:
    return TIERS[tiers].reward(Judged(query, readable, value))


BY_RECALL = [
    (1.0, 5), (0.7, 5), (0.69999, 4), (0.5, 4), (0.49999, 3), (0.4, 3), (0.39999, 1), (0.3, 1),
    (0.29999, 0.5), (0.1, 0.5), (0.09999, 0.1), (0.05, 0.1), (0.04999, -3.5), (0.0, -3.5),
]  # fmt: skip


@pytest.mark.parametrize(("recall", "tier"), BY_RECALL)
def test_engines(recall: float, tier: float) -> None:
    assert reward(ENGINES, recall) == 1 + tier


def test_exact_shares_reach_their_tier() -> None:
    for part, whole, tier in ((7, 10, 5), (1, 2, 4), (2, 5, 3), (3, 10, 1), (1, 10, 0.5)):
        assert reward(ENGINES, part / whole) == 1 + tier
    assert reward(ENGINES, 1 / 20) == 1.1


BY_PLACE = [
    (1, 5), (5, 5), (6, 4), (20, 4), (21, 2), (50, 2), (51, 1), (100, 1), (101, 0.5), (1000, 0.5),
    (1001, 0.1), (3000, 0.1), (3001, -3.5),
]  # fmt: skip


@pytest.mark.parametrize(("place", "tier"), BY_PLACE)
def test_qa(place: int, tier: float) -> None:
    assert reward(QA, 1 / place) == 1 + tier


def test_qa_without_the_answer() -> None:
    assert reward(QA, 0.0) == -2.5


def test_every_place_is_read_back() -> None:
    """A place is told as its reciprocal."""
    for place in range(1, 3002):
        tier = next((tier for last, tier in BY_PLACE[1::2] if place <= last), -3.5)
        assert reward(QA, 1 / place) == 1 + tier


def test_ir() -> None:
    assert reward(IR, 0.25) == pytest.approx(0.35)
    assert reward(IR, 1e-9) == pytest.approx(0.1)
    assert reward(IR, 0.0) == 0.0


@pytest.mark.parametrize(("tiers", "wrong"), [(ENGINES, -4), (QA, -4), (IR, -2), (REMAKE, 0)])
def test_without_a_query_there_is_the_format_alone(tiers: str, wrong: float) -> None:
    assert reward(tiers, 0.0, "", readable=False) == wrong


@pytest.mark.parametrize(("tiers", "worth"), [(ENGINES, -3), (QA, -3), (IR, 0), (REMAKE, 0)])
def test_a_query_that_the_search_cannot_read(tiers: str, worth: float) -> None:
    assert reward(tiers, 0.0, "(x", readable=False) == worth


@pytest.mark.parametrize(
    ("query", "form"),
    [
        ("a", 0.0),
        ("a b c d e", 0.0),
        ("a b c d e f", 0.04),
        (" ".join("abcdefghij" * 3)[:57], 0.04),  # 29 words
        (" ".join("abcdefghij" * 3), 0.0),  # 30
        ("a AND b", 0.06),
        ("a or and ANDES ORAL", 0.0),
        ("(a) AND (b)", 0.16),
        ("(a OR b)OR(c)", 0.16),
        ("((a OR b) AND c) OR (d)", 0.2),
        ("(a) AND b", 0.06),
        (") AND (", 0.06),
        ("(a b c) AND (d e f)", 0.2),
    ],
)
def test_remake(query: str, form: float) -> None:
    assert reward(REMAKE, 0.0, query) == pytest.approx(form)
    assert reward(REMAKE, 0.5, query) == pytest.approx(0.4 + form)
    assert 0 <= reward(REMAKE, 1.0, query) <= 1 + 1e-12


def test_bounds() -> None:
    """DeepRetrieval's dossier: -4 to 6; the remake: 0 to 1."""
    assert (reward(ENGINES, 1.0), reward(ENGINES, 0.0, "")) == (6, -4)
    assert reward(REMAKE, 1.0, "(a b c) AND (d e f)") == pytest.approx(1)
