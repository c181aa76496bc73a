"""Episodes of a script as token trajectories: what a policy imitates before it learns by rewards.

The script says text, which is encoded as a policy would best sample it. There are no
log-probabilities: a script draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from qrag_jax.environments.demonstrations import Written
from qrag_jax.environments.episode import (
    Agent,
    Ended,
    Look,
    Open,
    Reply,
    Said,
    Speak,
    ToolTally,
    ToolTask,
)
from qrag_jax.environments.queries import QueryPrompt, Searched
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.rollouts.token_episodes import Library, Speech, TokenEpisode
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import Turn


class Script(Protocol):
    """Plays one episode."""

    def say(self, shown: Sequence[str]) -> str:
        """The text of the next turn, from the texts of all tool results so far."""
        ...


class Talk(NamedTuple):
    """An episode of a script as text.

    Attributes:
        ended: how it ended.
        turns: for each turn the messages before it, since the last turn, and what was said.
    """

    ended: Ended
    turns: tuple[tuple[Messages, str], ...]


def scripted_talk(agent: Agent, task: ToolTask, script: Script, library: Library) -> Talk:
    """Plays one episode of a script."""
    play, shown = agent.play(task), list[str]()
    turns: list[tuple[Messages, str]] = []
    step = next(play)
    while True:
        reply: Reply
        if isinstance(step, Speak):
            if turns:  # the first messages are the prompt
                shown += [text for _, text in step.messages]
            turns.append((step.messages, script.say(shown)))
            reply = Said(turns[-1][1], "stop")
        elif isinstance(step, Look):
            (reply,) = library.look([(task, step)])
        else:
            assert isinstance(step, Open)
            reply = library.open(task, step)
        try:
            step = play.send(reply)
        except StopIteration as end:
            return Talk(end.value, tuple(turns))


def encoded(talk: Talk, speech: Speech) -> TokenEpisode:
    """The episode as tokens.

    Raises:
        ValueError: it is longer than `speech.room`, or the chat template rewrites turns.
    """
    scaffold, turns = speech.scaffold, list[Turn]()
    for messages, text in talk.turns:
        if turns:
            observed = scaffold.after(turns[-1].sampled, messages)
        else:
            observed = scaffold.opening(messages)
        ids = speech.tokenizer(text, add_special_tokens=False).input_ids
        sampled = np.array([*ids, scaffold.stop_ids[0]], np.int32)
        turns.append(Turn(observed, sampled, np.zeros(len(sampled), np.float32), STOP))
    length = sum(len(turn.observed) + len(turn.sampled) for turn in turns)
    if length > speech.room:
        raise ValueError(f"a script has {length} tokens, and there is room for {speech.room}")
    return TokenEpisode(talk.ended, (tuple(turns),), 1)


def all_sampled(episode: TokenEpisode) -> TokenEpisode:
    """The same episode as if all of it but its first token had been sampled, so that all trains."""
    segments = []
    for segment in episode.segments:
        ids = np.concatenate([part for turn in segment for part in (turn.observed, turn.sampled)])
        nothing = np.zeros(len(ids) - 1, np.float32)
        segments.append((Turn(ids[:1], ids[1:], nothing, segment[-1].finish),))
    return episode._replace(segments=tuple(segments))


def styled_episodes(
    hops: Sequence[Written], prompt: QueryPrompt, speech: Speech
) -> list[TokenEpisode]:
    """Each hop of a demonstration as an episode of one turn: its prompt, its query, the stop.

    Args:
        hops: in their order.
        prompt: with `demonstrations.style_variants`, which the numbers of prompts mean.
        speech: between text and ids.
    """
    return [_episode(each, prompt, speech) for each in hops]


def _episode(hop: Written, prompt: QueryPrompt, speech: Speech) -> TokenEpisode:
    messages = prompt.messages(hop.state)
    try:
        episode = encoded(Talk(_ended(hop), ((messages, hop.query),)), speech)
    except ValueError as error:
        raise InputError(
            f"a demonstration of question {hop.state.id!r} does not fit ({error}); raise "
            "config.sampling.room, or show fewer words of passages."
        ) from None
    ((turn,),) = episode.segments
    if len(turn.sampled) > speech.turn:
        raise InputError(
            f"a demonstrated query has {len(turn.sampled)} tokens, and a turn may sample "
            f"{speech.turn}; raise that number, or lower config.styles.most_words."
        )
    return episode


def _ended(hop: Written) -> Searched:
    return Searched(
        answer=hop.query,
        seen=tuple(each.id for each in hop.found),
        tally=ToolTally(turns=1, searches=1),
        found=hop.found,
    )
