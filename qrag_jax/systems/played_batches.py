"""What systems share that play a batch of questions for each update: RLVR and DeepRetrieval."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from qrag_jax.llm.text.prompts import Messages
from qrag_jax.rollouts.agent_experience import Drawn, Playing, QuestionOrder
from qrag_jax.rollouts.trajectories import TokenTrajectory
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.token_system import TokenSystem

_CHECKED = 8  # prompts by which a server that samples is checked


@dataclasses.dataclass(frozen=True)
class StagedOrder:
    """The order of questions of two stages, see `agent_experience.QuestionOrder`.

    Attributes:
        first_steps: of the first stage.
        first, then: each stage has its own order, and its own size of batches.
    """

    first_steps: int
    first: QuestionOrder
    then: QuestionOrder

    def at(self, step: int) -> Drawn:
        """The questions of the batch that step `step` learns from, from 0."""
        if step < self.first_steps:
            return self.first.at(step)
        return self.then.at(step - self.first_steps)


def playing_of(
    system: TokenSystem[Any, Any],
    play: Callable[[Any, Sequence[int], int, StopSignal], list[TokenTrajectory]],
    batch: Callable[[Sequence[TokenTrajectory]], Any],
) -> Playing:
    """How the batches of a system are played; see `Playing`."""
    return Playing(
        play=play,
        batch=batch,
        save=TokenTrajectory.to_json,
        restore=TokenTrajectory.from_json,
        params=system.weights,
        staleness=system.staleness(system.config),
        steps=system.config.train.steps,
    )


def check_server(
    system: TokenSystem[Any, Any], openings: Iterable[Messages], stop: StopSignal
) -> None:
    """Waits for the server that samples, and compares what it samples with the first weights.

    It does nothing if the device samples.

    Args:
        openings: first prompts of questions, of which a few are asked.

    Raises:
        Stopped: the run is told to stop.
    """
    if system.served is None:
        return
    system.served.wait(stop)
    scaffold = system.inputs.speech.scaffold
    prompts = [
        np.array(scaffold.opening(messages), np.int32)
        for messages in itertools.islice(openings, _CHECKED)
    ]
    player = system.player
    params = player.here(system.untrained)
    distance = system.served.check(params, player.base, prompts, stop)
    log(f"the server's log-probabilities are {distance:.2g} nats a token from the trainer's")
