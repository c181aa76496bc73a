"""Settings of pairs that cannot be used are refused in one sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.preference_config import PreferenceConfig


def test_the_defaults_are_those_of_leret() -> None:
    assert PreferenceConfig() == PreferenceConfig("ipo", 0.05, False, 0.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
def test_labels_of_dpo_may_be_smoothed(smoothing: float) -> None:
    assert PreferenceConfig("dpo", label_smoothing=smoothing).label_smoothing == smoothing


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"loss": "kto"}, "config.preference.loss is 'kto'; use one of ipo, dpo."),
        (
            {"beta": 0.0},
            "config.preference.beta is 0.0; use a number above 0, such as 0.05.",
        ),
        (
            {"beta": -1.0},
            "config.preference.beta is -1.0; use a number above 0, such as 0.05.",
        ),
        ({"beta": float("nan")}, "config.preference.beta is nan; use a number above 0"),
        ({"beta": float("inf")}, "config.preference.beta is inf; use a number above 0"),
        (
            {"loss": "dpo", "label_smoothing": 0.5},
            "config.preference.label_smoothing is 0.5; it must be at least 0 and below 0.5.",
        ),
        (
            {"loss": "dpo", "label_smoothing": -0.1},
            "config.preference.label_smoothing is -0.1; it must be at least 0 and below 0.5.",
        ),
        (
            {"label_smoothing": 0.1},
            "config.preference.label_smoothing is 0.1, which is of dpo alone; leave it at 0 or set "
            "config.preference.loss to 'dpo'.",
        ),
    ],
)
def test_refusals(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        PreferenceConfig(**fields)
