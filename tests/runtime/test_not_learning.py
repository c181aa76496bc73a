"""Signs that a training does not learn: each is found where it is, and not where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.runtime.not_learning import (
    EQUAL_Q,
    FLAT,
    FLAT_GROUPS,
    NO_ENTROPY,
    NO_GRADIENT,
    ONE_RETURN,
    SKIPPED,
    WORSE,
    Evaluated,
    Watch,
)
from tests.entry_points import Commands
from tests.support import worlds

SOUND = {"entropy": 0.6, "grad_norm": 0.3, "flat_groups": 0.2}


def half_right(questions: int = 100) -> list[float]:
    """Scores of a mean of 0.5, whose 95 % interval is about 0.5 ± 0.098 for 100 questions."""
    return [float(i % 2) for i in range(questions)]


def course(
    scores: Sequence[float] = (0.5, 0.7, 0.8, 0.9),
    *,
    each: Sequence[float] | None = None,
    lines: int = 10,
    **means: Any,
) -> Watch:
    """A training of 100 steps, evaluated every 20, with lines of 5 steps each.

    Args:
        scores: of the evaluations, from step 0 on.
        each: scores of the questions at step 0.
        means: in place of those of a sound training; a function of the line's number, or a number.
    """
    found = Watch(100)
    first = half_right() if each is None else each
    found.evaluations = [
        Evaluated(20 * number, score, () if number else first, 0.4)
        for number, score in enumerate(scores)
    ]
    for number in range(lines):
        own = {"return": 0.5 + 0.01 * number} | SOUND | means
        values = {name: value(number) if callable(value) else value for name, value in own.items()}
        found.line(5, values, 0)
    return found


def kinds(of: Watch, skipped: int = 0, counted: int = 50) -> list[str]:
    of.skipped, of.counted = skipped, counted
    return [kind for kind, _ in of.findings()]


FLAT_SCORES = (0.5, 0.52, 0.47, 0.55)


def test_a_training_that_learns_shows_no_sign() -> None:
    assert kinds(course()) == []
    assert Watch(100).findings() == []


def test_scores_within_the_first_interval_are_flat() -> None:
    ((kind, measured),) = course(FLAT_SCORES).findings()
    assert kind == FLAT
    assert "0.402 to 0.598 (100 questions)" in measured


def test_flat_scores_are_told_only_if_much_is_known() -> None:
    assert FLAT not in kinds(course(FLAT_SCORES[:3]))  # too few evaluations
    assert FLAT not in kinds(course((*FLAT_SCORES, 0.75)))  # it has risen
    assert FLAT not in kinds(course(FLAT_SCORES, each=half_right(18)))  # too few questions


def test_scores_below_the_first_interval_are_worse() -> None:
    assert kinds(course((0.5, 0.3, 0.2, 0.3))) == [WORSE]
    assert kinds(course((0.5, 0.3, 0.2, 0.45))) == []


@pytest.mark.parametrize(
    ("kind", "means"),
    [
        (NO_ENTROPY, {"entropy": 0.009}),
        (NO_GRADIENT, {"grad_norm": 0.0}),
        (FLAT_GROUPS, {"flat_groups": 0.96}),
        (ONE_RETURN, {"return": 0.0}),
    ],
)
def test_means_of_steps_show_it_unless_the_score_has_risen(
    kind: str, means: dict[str, float]
) -> None:
    assert kinds(course(FLAT_SCORES, **means)) == [FLAT, kind]
    assert kinds(course(**means)) == []  # it is sure of itself, because it has learned
    assert kinds(course(FLAT_SCORES, lines=3, **means)) == [FLAT]  # 15 steps
    assert kinds(course(FLAT_SCORES, lines=4, **means)) == [FLAT, kind]
    (name, value), *_ = means.items()
    once = {name: lambda line: 0.5 if line == 8 else value}
    assert kinds(course(FLAT_SCORES, **once)) == [FLAT]  # one of the last lines is sound
    unknown = {name: lambda line: float("nan") if line == 9 else value}
    assert kinds(course(FLAT_SCORES, **unknown)) == [FLAT]
    resumed = course(FLAT_SCORES, **means)
    del resumed.evaluations[0]
    assert kinds(resumed) == []


def test_q_values_that_are_all_equal_are_told_of_trained_weights_alone() -> None:
    for spread, found in ((1e-7, [EQUAL_Q]), (0.0, [EQUAL_Q]), (1e-4, []), (None, [])):
        of = course()
        of.evaluations[-1] = of.evaluations[-1]._replace(q_spread=spread)
        assert kinds(of) == found
    first = course((0.5,))
    first.evaluations[0] = first.evaluations[0]._replace(q_spread=0.0)
    assert kinds(first) == []


def test_a_fifth_of_the_steps_skipped_is_told() -> None:
    of = course()
    for skipped, counted, found in ((9, 50, []), (10, 50, [SKIPPED]), (10, 19, [])):
        assert kinds(of, skipped, counted) == found


def test_each_sign_is_told_once() -> None:
    watch = Watch(100)
    of, told = course((*FLAT_SCORES, 0.5, 0.5)), list[str]()
    for number, evaluation in enumerate(of.evaluations):
        told += watch.evaluated(evaluation)
        if number < 5:
            for _ in range(4):
                watch.line(5, SOUND | {"flat_groups": 1.0}, 0)
    first, second = told
    assert first.startswith("step 40: ")
    assert first.endswith("docs/troubles.md#flat-groups")
    assert second.startswith("step 60: ")
    assert second.endswith("docs/troubles.md#flat")


def test_a_training_that_does_not_learn_says_so_and_goes_on(
    commands: Commands, tmp_path: Path
) -> None:
    """A real one, whose learning rate is too low to change anything."""
    said = commands.succeed(
        "train",
        "--config=configs/quickstart.py:tiny",
        f"--workdir={tmp_path / 'run'}",
        "--config.optimizer.learning_rate=1e-12",
        f"--config.data.path={worlds.path_of('more_questions')}",
        "--config.eval.samples=40",
        "--config.train.steps=10",
        "--config.train.eval_every=2",
    )
    lines = said.splitlines()
    (told,) = [line for line in lines if "may not be learning" in line]
    assert told.startswith("step 6: ")
    assert "docs/troubles.md#flat" in told
    assert any(line.startswith("step 10: ") for line in lines)
    (memory,) = [at for at, line in enumerate(lines) if line.startswith("memory of the update: ")]
    (first,) = [at for at, line in enumerate(lines) if line.startswith("first step after ")]
    assert memory < first
