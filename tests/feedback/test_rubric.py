"""Rewards of episodes with tools: parts by hand, RLVR's rewards by hand, and their bounds."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from qrag_jax.environments.tools.episode import Closed, Document, ToolTask
from qrag_jax.errors import InputError
from qrag_jax.feedback.rubric import HOP_FACTORS, PARTS, PRESETS, Rubric, preset, score

DOCUMENTS = tuple(Document(str(at), "", f"text {at}", at in (1, 3)) for at in range(5))
TASK = ToolTask("q", "Where?", ("New York City", "NYC"), DOCUMENTS, hops=2)


def test_parts_by_hand() -> None:
    """Said 2 of 3 words of the best alias, saw 1 of 2 gold in 3, cited 1 gold in 3, 2 fields."""
    closed = Closed("the York City", cited=("1", "9", "0", "1"), seen=("3", "0", "4"), fields=2)
    found = score(closed, TASK)
    assert tuple(found) == PARTS
    assert found == pytest.approx(
        {
            "em": 0.0,
            "f1": 0.8,  # precision 2/2, recall 2/3
            "recall": 1 / 2,
            "precision": 1 / 3,
            "citation": 1 / 2,
            "citation_precision": 1 / 3,
            "citation_f1": 0.4,
            "format": 2 / 3,
        }
    )
    right = score(Closed("nyc.", cited=("3", "1"), seen=("1", "3"), fields=3), TASK)
    assert right == dict.fromkeys(PARTS, 1.0)


def test_nothing_said_is_worth_nothing() -> None:
    assert score(Closed(""), TASK) == dict.fromkeys(PARTS, 0.0)
    article = dataclasses.replace(TASK, answers=("The The",))
    assert score(Closed("the"), article)["em"] == 1.0
    for unsaid in ("", " \n"):
        assert score(Closed(unsaid), article)["em"] == 0.0
        assert score(Closed(unsaid), article)["f1"] == 0.0


def test_without_gold_documents() -> None:
    none = dataclasses.replace(TASK, documents=DOCUMENTS[:1])
    found = score(Closed("NYC", cited=("0",), seen=("0",)), none)
    assert (found["recall"], found["precision"]) == (0.0, 0.0)
    assert found["citation"] == found["citation_f1"] == 1.0
    corpus = ToolTask("q", "Where?", ("NYC",), hops=2, gold_ids=("p7", "p8"))
    assert score(Closed("NYC", seen=("p8",)), corpus)["recall"] == 0.5


# All parts but `em` are given other values, so that no two weights can be taken for each other.
GIVEN = {
    "em": 1.0,
    "f1": 0.5,
    "recall": 0.75,
    "precision": 0.25,
    "citation": 0.6,
    "citation_precision": 0.1,
    "citation_f1": 0.3,
    "format": 2 / 3,
}
BY_HAND = {  # preset → rewards at 2, 3 and 4 hops
    "F": (1.5 + 1.35, 2.25 + 1.35, 3.0 + 1.35),
    "R_0808": (0.75 + 0.375,) * 3,
    "X_0809": (0.375 + 0.345, 0.25 + 0.345, 0.1875 + 0.345),
    "X_0809b": (
        (0.725 + 0.36 + 0.3 + 0.2 / 3) / 3,
        (1.45 / 3 + 0.66 + 0.2 / 3) / 3,
        (0.3625 + 0.66 + 0.2 / 3) / 3,
    ),
    "X_0830": (
        (0.725 + 0.75 + 0.1 + 0.36 + 0.2 / 3) / 4,
        (1.45 / 3 + 1.21 + 0.2 / 3) / 4,
        (0.3625 + 1.21 + 0.2 / 3) / 4,
    ),
    "X_0913": tuple(factor * (1.45 + 1.21 + 0.2 / 3) / 4 for factor in (1.0, 1.5, 2.0)),
    "H_1002": tuple(
        factor * (1.0 + 0.4 + 0.45 + 0.1 + 0.24 + 0.2 / 3) / 3.7 for factor in (1.0, 1.5, 2.0)
    ),
    "head": tuple(
        factor * (0.9 + 0.5 + 0.75 + 0.1 + 0.36 + 0.2 / 3) / 4 for factor in (1.0, 1.5, 2.0)
    ),
}


@pytest.mark.parametrize("name", PRESETS)
def test_rewards_by_hand(name: str) -> None:
    rewards = [preset(name).reward(GIVEN, hops) for hops in (2, 3, 4)]
    assert rewards == pytest.approx(BY_HAND[name], abs=1e-12)


def test_one_hop() -> None:
    """The factor that is cut at 1 is not cut below it."""
    assert PRESETS["R_0808"].reward(GIVEN, 1) == pytest.approx(0.375 + 0.375)
    assert PRESETS["head"].bounds(1) == pytest.approx((0.0, 0.5))
    assert [factor(1) for factor in HOP_FACTORS.values()] == [1.0, 0.5, 0.5, 1.0]


def test_what_the_last_reward_is_made_of() -> None:
    """RLVR's dossier: at most h/2, 47.5 % of it for the answer; 0.35 h/2 by searches alone."""
    head = PRESETS["head"]
    for hops in (2, 3, 4):
        assert head.bounds(hops) == pytest.approx((0.0, hops / 2))
        nothing = dict.fromkeys(PARTS, 0.0)
        assert head.reward(nothing | {"em": 1, "f1": 1}, hops) == pytest.approx(0.475 * hops / 2)
        assert head.reward(nothing | {"recall": 1, "precision": 1}, hops) == pytest.approx(
            0.35 * hops / 2
        )


@pytest.mark.parametrize("name", PRESETS)
def test_bounds_are_those_of_all_corners(name: str) -> None:
    rubric = PRESETS[name]
    for hops in (1, 2, 3, 4):
        corners = [
            rubric.reward(dict.fromkeys(PARTS, 0.0) | dict(zip(rubric.weights, corner)), hops)
            for corner in itertools.product((0.0, 1.0), repeat=len(rubric.weights))
        ]
        assert rubric.bounds(hops) == pytest.approx((min(corners), max(corners)))


def test_a_part_may_cost() -> None:
    rubric = Rubric({"em": 1.0, "precision": -0.5}, divisor=2.0)
    assert rubric.bounds(3) == (-0.25, 0.5)
    assert rubric.reward(GIVEN, 3) == pytest.approx(0.4375)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": {}}, "config.rubric.weights is empty"),
        ({"weights": {"ems": 1.0}}, "'ems'"),
        ({"weights": {"em": float("nan")}}, "config.rubric.weights.em is nan"),
        ({"weights": {"em": True}}, "config.rubric.weights.em is True"),
        ({"hops": "half"}, r"config.rubric.hops"),
        ({"scales": "some"}, r"config.rubric.scales"),
        ({"divisor": 0.0}, "config.rubric.divisor is 0.0"),
    ],
)
def test_a_rubric_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Rubric(**{"weights": {"em": 1.0}} | fields)


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match="'tail'"):
        preset("tail")
    with pytest.raises(ValueError, match="hop at least"):
        PRESETS["head"].reward(GIVEN, 0)
