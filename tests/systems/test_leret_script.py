"""Which questions LeReT's script demonstrates, and what their queries search."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.leret_experience import LessonExperience, Script
from tests.systems.query_play import SCRIPT_STEPS, opened, small


def demonstrations(system) -> Script:
    script = system.inputs.script
    assert script is not None
    return script


def test_demonstrations_are_of_the_corpus(tmp_path: Path) -> None:
    with opened(small(), tmp_path / "run") as system:
        script = demonstrations(system)
        assert script.library is system.inputs.library
        demonstrated = [state.id for state, _ in script.demonstrated]
        assert demonstrated == [state.id for state in system.inputs.train]


def test_a_batch_has_the_demonstrations_of_its_numbers(tmp_path: Path) -> None:
    with opened(small(questions__bridge_corpus=8), tmp_path / "run") as system:
        script, tried = demonstrations(system), {state.id for state in system.inputs.train}
        assert len(script.demonstrated) == 8 > len(tried)
        experience, state = LessonExperience(system, 0), system.first_state()
        first = experience.next(state, 0, StopSignal())
        numbers = experience.samples[:, 0]
        again = LessonExperience(system, 0).next(state, 0, StopSignal())
        np.testing.assert_array_equal(first.blocks.tokens, again.blocks.tokens)
        assert system._names(numbers) == [script.demonstrated[n][0].id for n in numbers]
        system._step = SCRIPT_STEPS + 1  # the stage is over: numbers are of what is tried
        assert system._names([0]) == [system.inputs.train[0].id]
        texts = [*script.texts(system.config)]
        asked = {question.question for _, question in script.demonstrated}
        assert all(any(each in text for text in texts) for each in asked)


@pytest.mark.parametrize("ways", ["styles", "bare"])
def test_marks_are_demonstrated_whatever_tries_are_asked_by(tmp_path: Path, ways: str) -> None:
    with opened(small(tries__ways=ways, styles__marked=1.0), tmp_path / "run") as system:
        experience, state = LessonExperience(system, 0), system.first_state()
        blocks = jax.device_get(experience.next(state, 0, StopSignal())).blocks
        speech = system.inputs.speech
        read = "".join(speech.text(row) for row in blocks.tokens)
        assert "style: " in read
        assert system.variants == ((0,) if ways == "bare" else (1, 2))


def test_names_are_spelled_anew_in_what_is_imitated(tmp_path: Path) -> None:
    read = []
    for renamed in (0.0, 1.0):
        config = small(styles__renamed=renamed)
        with opened(config, tmp_path / f"run{renamed}") as system:
            experience, state = LessonExperience(system, 0), system.first_state()
            blocks = jax.device_get(experience.next(state, 0, StopSignal())).blocks
            script = demonstrations(system)
            numbers = experience.samples[:, 0]
            speech = system.inputs.speech
            told = "".join(speech.text(row) for row in blocks.tokens)
            questions = [script.demonstrated[n][1] for n in numbers]
            read.append([each.entity in told for each in questions])
    assert all(read[0])
    assert not any(read[1])


def test_a_run_without_the_stage_demonstrates_nothing(tmp_path: Path) -> None:
    config = small(stages=("sft", "preference"), tries__ways="bare")
    with opened(config, tmp_path / "run") as system:
        assert system.inputs.script is None
        assert system._names([0]) == [system.inputs.train[0].id]


@pytest.mark.parametrize("first", [0, 7])
def test_draws_depend_on_the_number_of_a_demonstration(tmp_path: Path, first: int) -> None:
    with opened(small(styles__marked=0.5), tmp_path / "run") as system:
        script = demonstrations(system)
        every = script.starts(system.config, [0, 1, 2] * 4, 0)
        some = script.starts(system.config, ([0, 1, 2] * 4)[first : first + 3], first)
        assert some == every[first : first + 3]
