"""A small LeReT run that went through all stages, and what several tests ask of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.environments.episode import Look, Said, Speak, ToolTask
from qrag_jax.environments.queries import QueryAgent, QueryState
from qrag_jax.feedback.pairs import Try
from qrag_jax.rollouts.token_episodes import Speech, Talk, TokenEpisode, TokenStart, encoded
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.leret import Leret, LessonExperience
from tests.systems.small_runs import opened, small_leret

SCRIPT_STEPS, SFT_STEPS, PAIR_STEPS = 12, 2, 2  # of `small_leret`

FIRST_SFT, FIRST_PAIRS = SCRIPT_STEPS, SCRIPT_STEPS + SFT_STEPS
PERIOD = SFT_STEPS + PAIR_STEPS
STOP = StopSignal()


@dataclasses.dataclass
class Trained:
    """A run that went through all stages."""

    system: Leret  # its
    states: list[Any]  # the state before each step, on the host, and the last one
    batches: list[Any]  # what each step learned from
    samples: list[np.ndarray]  # the questions and epochs of each step
    metrics: list[dict[str, float]]  # of each step


@contextlib.contextmanager
def trained_run(workdir: Path) -> Iterator[Trained]:
    """Trains it."""
    with opened(small_leret(), workdir) as system:
        experience, state = LessonExperience(system), system.first_state()
        made = Trained(system, [], [], [], [])
        for number in range(system.train.steps):
            made.states.append(jax.device_get(state))
            batch = experience.next(state, number, STOP)
            made.batches.append(jax.device_get(batch))
            made.samples.append(experience.samples)
            state, metrics = system.update(state, batch)
            made.metrics.append({name: float(value) for name, value in metrics.items()})
        made.states.append(jax.device_get(state))
        yield made


def tries_of(system: Leret, iteration: int) -> list[Try]:
    """The tries of an iteration, from their files."""
    folder = system.workdir / "tries" / f"iteration-{iteration}"
    rows = [
        json.loads(line)
        for hop in (1, 2)
        for line in (folder / f"hop-{hop}.jsonl").read_text().splitlines()
    ]
    return [bounded_json.typed(Try, row) for row in rows]


def again(trained: Trained, workdir: Path) -> tuple[Leret, LessonExperience]:
    """System and experience of a run that was killed and goes on in a copy of its folder."""
    shutil.copytree(trained.system.workdir, workdir, dirs_exist_ok=True)
    system = dataclasses.replace(trained.system, workdir=workdir)
    system._step = None
    return system, LessonExperience(system)


def said(agent: Any, library: Any, speech: Speech, task: ToolTask, text: str) -> TokenEpisode:
    """The episode of a model that writes `text`."""
    play = agent.play(task)
    asked: Any = next(play)
    assert isinstance(asked, Speak)
    messages = asked.messages
    reply: Any = Said(text, "stop")
    try:
        while True:
            asked = play.send(reply)
            assert isinstance(asked, Look)
            (reply,) = library.look([(task, asked)])
    except StopIteration as end:
        return encoded(Talk(end.value, ((messages, text),)), speech)


Writes = Callable[[QueryState, np.ndarray], str]  # (state, key) → query


def play_by(system: Any, writes: Writes) -> Callable[..., list[TokenEpisode]]:
    """A stand-in for `system.play`: plays tries by a rule, asked by a prompt."""

    def play(prompt: Any, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        inputs = system.inputs
        agent = QueryAgent(prompt, inputs.agent.k, inputs.agent.stop)
        return [
            said(agent, inputs.library, inputs.speech, each.task, writes(each.task, each.key))
            for each in starts
        ]

    return play
