"""The state of a query writer: how its pool grows, and by what a gold page is known."""

from __future__ import annotations

import pytest

from qrag_jax.environments.query_writing.state import (
    BY_HOP,
    BY_PASSAGE,
    BY_SCORE,
    BY_TITLE,
    ORDERS,
    grown,
    key_of,
    normalised_title,
)
from tests.environments.query_writing.trying import BERG, OSLO, RAIN, STATE


def test_a_pool_grows_by_hop_or_by_score() -> None:
    """Scores: Berg 5, Oslo 7, Bergen 3."""
    assert grown((), (BERG, RAIN), BY_HOP) == (BERG, RAIN)
    assert grown((BERG, RAIN), (OSLO,), BY_HOP) == (BERG, RAIN, OSLO)
    assert grown((BERG, RAIN), (OSLO,), BY_SCORE) == (OSLO, BERG, RAIN)
    assert grown((), (RAIN, BERG), BY_SCORE) == (BERG, RAIN)
    assert grown((RAIN,), (), BY_HOP) == (RAIN,)


def test_a_passage_that_is_there_keeps_its_place_and_its_score() -> None:
    again = RAIN._replace(score=9.0)
    assert grown((BERG, RAIN), (again, OSLO), BY_HOP) == (BERG, RAIN, OSLO)
    assert grown((BERG, RAIN), (again, OSLO), BY_SCORE) == (OSLO, BERG, RAIN)
    assert grown((), (OSLO, OSLO), BY_HOP) == (OSLO,)


def test_equal_scores_stay_by_hop_and_rank() -> None:
    flat = [each._replace(score=1.0) for each in (RAIN, OSLO, BERG)]
    assert grown(flat[:1], flat[1:], BY_SCORE) == tuple(flat)


@pytest.mark.parametrize("order", ORDERS)
def test_growing_leaves_the_old_pool_as_it_was(order: str) -> None:
    pool = (BERG, RAIN)
    grown(pool, (OSLO,), order)
    assert pool == (BERG, RAIN)


def test_the_next_state_is_asked_by_the_bare_prompt() -> None:
    asked = STATE.asked_by(2)
    assert (asked.variant, asked.hop, asked.pool) == (2, 1, ())
    after = asked.after((BERG,))
    assert (after.variant, after.hop, after.pool) == (0, 2, (BERG,))
    assert (after.id, after.pages, after.gold) == ("q", ("a", "b"), ("a", "b"))
    assert STATE.variant == 0


def test_a_page_is_known_by_its_passage_or_its_title() -> None:
    assert key_of(BERG, BY_PASSAGE) == "a"
    assert key_of(BERG, BY_TITLE) == "ada berg"


@pytest.mark.parametrize(
    "spellings",
    [
        ("Ada Berg", " ada  berg", "Ada_Berg", "ADA BERG"),
        ("Café Olé", "Cafe\u0301 Ole\u0301", "cafe ole"),
        ("2010–11 season", "2010-11 Season", "2010—11 season"),
        ("O’Neill", "O'Neill", "O`Neill"),
        ("Simon &amp; Garfunkel", "Simon & Garfunkel"),
        ("Straße", "STRASSE"),
        ("Word™", "word™", "wordtm"),
        ("İzmir", "Izmir"),
        ("Ｔｏｋｙｏ", "Tokyo"),
    ],
)
def test_spellings_of_one_title_agree(spellings: tuple[str, ...]) -> None:
    assert len({normalised_title(each) for each in spellings}) == 1


@pytest.mark.parametrize(
    "titles", [("!!!", "?", "..."), ("C", "C++"), ("1", "11", "1 1"), ("Oslo", "Oslo (album)")]
)
def test_other_titles_stay_other_ones(titles: tuple[str, ...]) -> None:
    found = [normalised_title(each) for each in titles]
    assert len(set(found)) == len(titles)
    assert all(found)
