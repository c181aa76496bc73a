"""Signs that a training does not learn: each is found where it is, and not where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.runtime.not_learning import (
    EQUAL_Q,
    FLAT,
    FLAT_GROUPS,
    KINDS,
    NO_ENTROPY,
    NO_GRADIENT,
    ONE_RETURN,
    SKIPPED,
    WORSE,
    Course,
    Evaluated,
    Line,
    Watch,
    findings,
)
from tests.entry_points import ROOT, Commands
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
) -> Course:
    """A training of 100 steps, evaluated every 20, with lines of 5 steps each.

    Args:
        scores: of the evaluations, from step 0 on.
        each: scores of the questions at step 0.
        means: in place of those of a sound training; a function of the line's number, or a number.
    """
    found = Course(steps=100, counted=5 * lines)
    first = half_right() if each is None else each
    found.evaluations = [
        Evaluated(20 * number, score, () if number else first, 0.4)
        for number, score in enumerate(scores)
    ]
    for number in range(lines):
        own = {"return": 0.5 + 0.01 * number} | SOUND | means
        values = {name: value(number) if callable(value) else value for name, value in own.items()}
        found.lines.append(Line(5 * (number + 1), 5, values))
    return found


def kinds(of: Course) -> list[str]:
    return [found.kind for found in findings(of)]


FLAT_SCORES = (0.5, 0.52, 0.47, 0.55)


def test_a_training_that_learns_shows_no_sign() -> None:
    assert kinds(course()) == []
    assert findings(Course(steps=100)) == []


def test_scores_within_the_first_interval_are_flat() -> None:
    (found,) = findings(course(FLAT_SCORES))
    assert found.kind == FLAT
    assert "evaluations scored 0.520, 0.470, 0.550, all 3 so far within" in found.measured
    assert "interval of the untrained weights, 0.402 to 0.598 (100 questions)" in found.measured


@pytest.mark.parametrize(
    "other",
    [
        {"scores": FLAT_SCORES[:3]},  # too few evaluations
        {"scores": (*FLAT_SCORES, 0.75)},  # it has risen
        {"scores": FLAT_SCORES, "each": half_right(18)},  # too few questions
    ],
)
def test_flat_scores_are_told_only_if_much_is_known(other: dict[str, Any]) -> None:
    assert FLAT not in kinds(course(**other))


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
    assert kinds(dataclasses.replace(of, skipped=9)) == []
    (found,) = findings(dataclasses.replace(of, skipped=10))
    assert (found.kind, found.measured[:24]) == (SKIPPED, "10 of 50 steps (20%) lea")
    assert kinds(dataclasses.replace(of, skipped=10, counted=19)) == []


def test_each_sign_is_told_once() -> None:
    watch = Watch(100)
    of, told = course((*FLAT_SCORES, 0.5, 0.5)), list[str]()
    for number, evaluation in enumerate(of.evaluations):
        told += watch.evaluated(evaluation)
        if number < 5:
            for line in range(4):
                watch.line(20 * number + 5 * line + 5, 5, SOUND | {"flat_groups": 1.0}, 0)
    assert len(told) == 2
    assert told[0].startswith("step 40: the run may not be learning: 100% or more of the groups")
    assert told[0].endswith("docs/troubles.md#flat-groups")
    assert told[1].startswith("step 60: the run may not be learning: the last 3 evaluations scored")
    assert told[1].endswith("docs/troubles.md#flat")


def test_the_docs_have_a_section_for_each_kind() -> None:
    text = (ROOT / "docs" / "troubles.md").read_text()
    headings = {line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")}
    assert headings >= set(KINDS)


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
    assert told.startswith("step 6: the run may not be learning: the last 3 evaluations scored ")
    assert told.endswith("see docs/troubles.md#flat")
    assert any(line.startswith("step 10: ") for line in lines)
    (memory,) = [at for at, line in enumerate(lines) if line.startswith("memory of the update: ")]
    (first,) = [at for at, line in enumerate(lines) if line.startswith("first step after ")]
    assert memory < first
