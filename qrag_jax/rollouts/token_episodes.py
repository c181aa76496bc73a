"""Plays episodes of a language model with tools, hundreds at once: tokens in, tokens out.

What the model sampled stays as it is: the next prompt is the ids so far and, behind them, the ids
of what the environment says. Text is decoded only to be read by the environment.

Searches that wait are one batch, in a thread.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from qrag_jax.environments.episode import (
    Agent,
    Closed,
    Document,
    Ended,
    Failed,
    Look,
    Open,
    Reply,
    Said,
    Speak,
    ToolTally,
    ToolTask,
)
from qrag_jax.environments.queries import QueryPrompt, Searched
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.rewards import Checks
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import Scaffold
from qrag_jax.rollouts.schedule import Counts, Playing, Schedule, key_within
from qrag_jax.rollouts.trajectories import (
    DONE,
    LENGTH,
    STOP,
    TRUNCATED,
    Sampled,
    Sampler,
    SampleRequest,
    Segment,
    Turn,
    segments_from_json,
    segments_to_json,
)
from qrag_jax.runtime import hosts
from qrag_jax.runtime.bounded_json import typed
from qrag_jax.runtime.interrupt import LOOK_EVERY, Stopped


class Library(Protocol):
    """What the tools read. It is called from a thread."""

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[tuple[Document, ...] | Failure]:
        """The documents of each search, best first."""
        ...

    def open(self, task: ToolTask, step: Open) -> Document | Failure | None:
        """One document; None if there is none."""
        ...


@dataclasses.dataclass(frozen=True)
class Speech:
    """How text and ids become each other, and how long they may be."""

    tokenizer: Any  # of Hugging Face
    scaffold: Scaffold  # its chat template, cut
    turn: int  # most tokens that a turn may sample
    room: int  # most tokens of a segment

    def text(self, sampled: np.ndarray) -> str:
        ids = sampled.tolist()
        if ids and ids[-1] in self.scaffold.stop_ids:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


class TokenStart(NamedTuple):
    task: ToolTask  # the question
    key: np.ndarray  # uint32 `[2]`, data of the PRNG key of its draws


class TokenEpisode(NamedTuple):
    ended: Ended  # how it ended; a `Failed` has no reward
    segments: tuple[Segment, ...]  # what was sampled and observed
    attempts: int  # how often it was played

    @property
    def status(self) -> str:
        """As `TokenTrajectory.status`."""
        if isinstance(self.ended, Failed):
            return self.ended.cause
        return TRUNCATED if self.ended.tally.truncated else DONE


class TokenRollout(Schedule):
    def __init__(
        self,
        agent: Agent,
        sampler: Sampler,
        library: Library,
        speech: Speech,
        counts: Counts | None = None,
        *,
        stop: Checks,
        attempts: int = 2,
    ) -> None:
        super().__init__(attempts, counts or Counts(), stop)
        self._agent, self._library, self._speech = agent, library, speech
        self.sampler = sampler
        self._looking: list[tuple[Playing, tuple[ToolTask, Look | Open]]] = []

    def play(self, starts: Sequence[TokenStart]) -> list[TokenEpisode]:
        """Plays the episodes side by side; each is returned in the place of its start."""
        with ThreadPoolExecutor(1, thread_name_prefix="search") as self._thread:
            return self.run(starts)

    def episode(self, start: TokenStart, attempt: int) -> Generator[Any, Any, TokenEpisode]:
        """Asks for a `SampleRequest`, or for what a tool reads: (task, step)."""
        speech, scaffold = self._speech, self._speech.scaffold
        talk: list[tuple[str, str]] = []  # all messages so far
        segments: list[list[Turn]] = []
        play = self._agent.play(start.task)
        reply: Any = None
        while True:
            try:
                step = play.send(reply)
            except StopIteration as end:
                whole = tuple(tuple(segment) for segment in segments if segment)
                return TokenEpisode(end.value, whole, attempt)
            if not isinstance(step, Speak):
                reply = yield start.task, step
                continue
            asks = any(role == "user" for role, _ in step.messages)
            follows = bool(talk) and (scaffold.append_only or not asks)
            talk += step.messages
            if follows:
                observed = scaffold.after(segments[-1][-1].sampled, step.messages)
            else:
                observed = scaffold.opening(tuple(talk))
                segments.append([])
            before = [part for turn in segments[-1] for part in (turn.observed, turn.sampled)]
            ids = np.concatenate([*before, observed]).astype(np.int32)
            left = speech.room - len(ids)
            if left < 1:
                if len(talk) == len(step.messages):
                    raise InputError(
                        f"the prompt of question {start.task.id!r} has {len(ids)} tokens, and "
                        f"config.sampling.room is {speech.room}; raise it, up to the model's "
                        "positions, or shorten the prompt."
                    )
                reply = Said("", "length")
                continue
            # Positions of a rewritten segment were drawn at before, so it has a key of its own.
            key = key_within(start.key, attempt - 1, len(segments) - 1)
            reply = yield SampleRequest(ids, key, min(speech.turn, left))
            if isinstance(reply, Sampled):
                drawn, text = reply, speech.text(reply.ids)
                turn = (observed, drawn.ids, drawn.log_probs, drawn.finish, self.sampler.version)
                segments[-1].append(Turn(*turn))
                talk.append(("assistant", text))
                reply = Said(text, "length" if drawn.finish == LENGTH else "stop")

    def take(self, playing: Playing, step: Any) -> None:
        if isinstance(step, SampleRequest):
            self.speaking.append((step, partial(self.reply, playing)))
        else:
            self._looking.append((playing, step))

    def waits(self) -> bool:
        return bool(self.speaking or self._looking)

    def dispatch(self) -> float:
        if self._looking:
            self._search()
        self.sample()
        return LOOK_EVERY

    def _search(self) -> None:
        waiting, self._looking = self._looking, []
        self.counts.searches += len(waiting)

        def arrived(found: list[Reply]) -> None:
            for (each, _), one in zip(waiting, found, strict=True):
                self.reply(each, one)

        asked = [step for _, step in waiting]
        self.fly(self._thread.submit(_read, self._library, asked), arrived)


def _read(library: Library, steps: Sequence[tuple[ToolTask, Look | Open]]) -> list[Reply]:
    """What the tools give."""
    looks = [(task, step) for task, step in steps if isinstance(step, Look)]
    found = iter(library.look(looks)) if looks else iter(())
    return [
        next(found) if isinstance(step, Look) else library.open(task, step) for task, step in steps
    ]


def facts_of(ended: Ended) -> Mapping[str, Any]:
    found: dict[str, Any] = {"tally": dataclasses.asdict(ended.tally)}
    if isinstance(ended, Closed):
        return found | {"answer": ended.answer, "cited": [*ended.cited], "seen": [*ended.seen]}
    return found | {"message": ended.message}


# ---------------------------------------------------------------- episodes of all hosts

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Closed, Failed, Searched)}


def to_text(episodes: Iterable[TokenEpisode]) -> str:
    """Episodes as JSON; `from_text` reads them, to the last bit."""
    rows = []
    for each in episodes:
        ended = dataclasses.asdict(each.ended)
        if isinstance(each.ended, Searched):
            ended["found"] = [document._asdict() for document in each.ended.found]
        kind, segments = type(each.ended).__name__, segments_to_json(each.segments)
        rows.append((kind, ended, segments, each.attempts))
    return json.dumps(rows)


def from_text(text: str) -> list[TokenEpisode]:
    return [
        TokenEpisode(typed(_KINDS[kind], ended), segments_from_json(segments), attempts)
        for kind, ended, segments, attempts in json.loads(text)
    ]


def played_by_all(
    starts: Sequence[TokenStart], play: Callable[[Sequence[TokenStart]], list[TokenEpisode]]
) -> list[TokenEpisode]:
    """The episodes of these starts, in their order; all hosts call this together with the same.

    `play` plays episodes on this host alone. Raises `FeedbackLost` if too many of a host fail.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return play(starts)
    failure: Exception | None = None
    own = list[TokenEpisode]()
    try:
        # Neighbours stay together: those of a group have one prompt, which is read once.
        part = starts[len(starts) * index // count : len(starts) * (index + 1) // count]
        own = play(part) if part else []
    except (Stopped, FeedbackLost) as why:
        failure = why
    hosts.fail_together(failure, FeedbackLost)
    return [each for text in hosts.texts_of_each(to_text(own)) for each in from_text(text)]


# ---------------------------------------------------------------- episodes of a script
# What a policy imitates before it learns by rewards. The script says text, which is encoded as a
# policy would best sample it. There are no log-probabilities: a script draws nothing.


class Talk(NamedTuple):
    """An episode of a script as text."""

    ended: Ended  # how it ended
    # for each turn the messages before it, since the last turn, and what was said
    turns: tuple[tuple[Messages, str], ...]


def scripted_talk(agent: Agent, task: ToolTask, script: Any, library: Library) -> Talk:
    """`script.say` gives the text of the next turn, from the texts of all tool results so far."""
    play, shown = agent.play(task), list[str]()
    turns: list[tuple[Messages, str]] = []
    step = next(play)
    while True:
        if isinstance(step, Speak):
            if turns:  # the first messages are the prompt
                shown += [text for _, text in step.messages]
            turns.append((step.messages, script.say(shown)))
            reply: Reply = Said(turns[-1][1], "stop")
        else:
            assert isinstance(step, Look | Open)
            (reply,) = _read(library, [(task, step)])
        try:
            step = play.send(reply)
        except StopIteration as end:
            return Talk(end.value, tuple(turns))


def encoded(talk: Talk, speech: Speech) -> TokenEpisode:
    """The episode as tokens; raises `ValueError` if it is too long, or if turns are rewritten."""
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


def styled_episode(hop: Any, prompt: QueryPrompt, speech: Speech) -> TokenEpisode:
    """A hop of a demonstration as an episode of one turn: its prompt, its query, the stop.

    Args:
        hop: its `state`, `query` and what it `found`; see `examples/worlds/demonstrations.py`.
        prompt: with `demonstrations.style_variants`, which the numbers of prompts mean.
    """
    seen, tally = tuple(each.id for each in hop.found), ToolTally(turns=1, searches=1)
    ended = Searched(answer=hop.query, seen=seen, tally=tally, found=hop.found)
    try:
        episode = encoded(Talk(ended, ((prompt.messages(hop.state), hop.query),)), speech)
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
