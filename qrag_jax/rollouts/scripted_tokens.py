"""Episodes of a script as token trajectories: what a policy imitates before it learns by rewards.

The script says text, which is encoded as a policy would best sample it. There are no
log-probabilities: a script draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qrag_jax.environments.tools.episode import (
    Agent,
    Ended,
    Look,
    Open,
    Reply,
    Said,
    Speak,
    ToolTask,
)
from qrag_jax.rollouts.token_episodes import Library, Speech, TokenEpisode
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import Turn


class Script(Protocol):
    """Plays one episode."""

    def say(self, shown: Sequence[str]) -> str:
        """The text of the next turn, from the texts of all tool results so far."""
        ...


def scripted_episode(
    agent: Agent, task: ToolTask, script: Script, library: Library, speech: Speech
) -> TokenEpisode:
    """One episode of a script.

    Raises:
        ValueError: it is longer than `speech.room`, or its chat template rewrites turns.
    """
    play, shown = agent.play(task), list[str]()
    turns: list[Turn] = []
    ended: Ended
    step = next(play)
    while True:
        reply: Reply
        if isinstance(step, Speak):
            shown += [text for role, text in step.messages if role != "system"] if turns else []
            text = script.say(shown)
            turns.append(_turn(step, text, turns, speech))
            reply = Said(text, "stop")
        elif isinstance(step, Look):
            (reply,) = library.look([(task, step)])
        else:
            assert isinstance(step, Open)
            reply = library.open(task, step)
        try:
            step = play.send(reply)
        except StopIteration as end:
            ended = end.value
            break
    length = sum(len(turn.observed) + len(turn.sampled) for turn in turns)
    if length > speech.room:
        raise ValueError(f"the script of {task.id!r} has {length} tokens; there are {speech.room}")
    return TokenEpisode(ended, (tuple(turns),), 1)


def _turn(step: Speak, text: str, before: Sequence[Turn], speech: Speech) -> Turn:
    scaffold = speech.scaffold
    if before:
        observed = scaffold.after(before[-1].sampled, step.messages)
    else:
        observed = scaffold.opening(step.messages)
    ids = speech.tokenizer(text, add_special_tokens=False).input_ids
    sampled = np.array([*ids, scaffold.stop_ids[0]], np.int32)
    return Turn(observed, sampled, np.zeros(len(sampled), np.float32), STOP)
