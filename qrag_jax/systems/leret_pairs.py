"""What LeReT's stages learn from: demonstrations; then of an iteration's tries the best, and pairs.

An iteration's tries are made when its first step is due. They and the log-probabilities of the
reference are kept in the run's folder, so that a resumed run learns from the same.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from qrag_jax.environments.demonstrations import draw_renamed
from qrag_jax.environments.queries import QueryPrompt, QueryState
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import (
    StateKey,
    StatePairs,
    Try,
    check_found,
    check_pairs,
    credited,
    pairs_of,
    report_of,
)
from qrag_jax.learners.preference_update import pair_episodes, pair_shardings, row_log_probs
from qrag_jax.learners.state import TrainState
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import episode_shardings, token_episodes
from qrag_jax.rollouts.experience import QuestionOrder
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import Speech, all_sampled, styled_episodes
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import (
    DONE,
    SCORED,
    BatchRules,
    Segment,
    TokenBatch,
    TokenTrajectory,
    Turn,
    token_batch,
)
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.mesh import put_whole
from qrag_jax.runtime.run import log
from qrag_jax.runtime.saved_config import read_fields
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.leret_config import PREFERENCE, SCRIPT, SFT, LeretConfig, StagePlan
from qrag_jax.systems.leret_inputs import Inputs
from qrag_jax.systems.leret_tries import Iteration

PAIR = 2  # rows of a pair: the winner, then the loser
_MEASURED = 8  # states whose prompts are measured for the longest


def states_of(config: LeretConfig, number: int, found: Iteration) -> list[StatePairs]:
    """What is learned at each state that was tried in iteration `number`."""
    by_state: dict[StateKey, list[Try]] = {}
    for each in credited(found.tries, found.grown_from, config.reward):
        by_state.setdefault(each.at, []).append(each)
    return [pairs_of(tries, config.pairs) for tries in by_state.values()]


class Lesson(NamedTuple):
    """A query to imitate; or a pair of them behind one prompt, the better one first."""

    queries: tuple[Segment, ...]
    question: int


@dataclasses.dataclass(frozen=True)
class Lessons:
    """What one iteration learns from."""

    imitated: list[Lesson]  # the best query of each state
    pairs: list[Lesson]
    # The longest rows that the tries might have given. The shape of blocks is chosen with them, so
    # that iterations whose lessons differ share a program.
    longest: list[Segment]
    too_long: int  # states that were left out, because prompt and query have more tokens than fit

    def of(self, kind: str) -> list[Lesson]:
        """Those of a stage."""
        return self.imitated if kind == SFT else self.pairs


def lessons_of(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> Lessons:
    """The lessons of all states."""
    imitated, pairs, too_long = list[Lesson](), list[Lesson](), 0
    for each in states:
        if each.at is None or (each.target is None and not each.pairs):
            continue
        opening = speech.scaffold.opening(prompt.messages(shown[each.at].asked_by(0)))
        longest = max(len(query.sampled) for query in each.queries)
        if len(opening) + longest > speech.room:
            too_long += 1
            continue
        turns, question = [(_turn(opening, query),) for query in each.queries], each.at.question
        if each.target is not None:
            imitated.append(Lesson((turns[each.target],), question))
        pairs += [Lesson((turns[p.winner], turns[p.loser]), question) for p in each.pairs]
    return Lessons(imitated, pairs, _longest(states, shown, prompt, speech), too_long)


def _longest(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> list[Segment]:
    asked = {each.at: each.queries for each in states if each.at is not None and each.queries}
    queries = [query for of_state in asked.values() for query in of_state]
    if not queries:
        return []
    longest = max(queries, key=lambda query: len(query.sampled))
    messages = [prompt.messages(shown[at].asked_by(0)) for at in asked]
    # Texts of more characters have more tokens, or nearly so many.
    messages.sort(key=lambda each: sum(len(text) for _, text in each))
    openings = map(speech.scaffold.opening, messages[-_MEASURED:])
    return [
        (_turn(opening, longest),)
        for opening in openings
        if len(opening) + len(longest.sampled) <= speech.room
    ]


def _turn(opening: np.ndarray, query: Try) -> Turn:
    ids = np.array(query.sampled, np.int32)
    return Turn(opening, ids, np.zeros(len(ids), np.float32), STOP)


def lesson_batch(lessons: Sequence[Sequence[Segment]], room: int) -> TokenBatch:
    """The arrays of lessons: a row for each of their queries, those of a pair side by side."""
    rows = [
        TokenTrajectory(number, 0, 1, (segment,), DONE)
        for number, queries in enumerate(lessons)
        for segment in queries
    ]
    return token_batch(rows, BatchRules(len(lessons[0]), (), SCORED, room))


def check_some(count: int, what: str, stage: str) -> None:
    """Refuses a stage that has nothing to learn from."""
    if not count:
        raise InputError(
            f"the tries gave no {what} for the stage {stage}; use more or other prompts "
            "(config.tries.prompts), more tries of each (config.tries.samples) at a higher "
            "config.sampling.temperature, or leave the stage out."
        )


class Tried(NamedTuple):
    """The tries of an iteration."""

    found: Iteration
    prompt: QueryPrompt
    variants: Sequence[int]  # numbers of those that tried
    folder: Path


# (iteration, state, signal) → its tries. The state has the weights that make those that are
# missing; None: these are gone.
TriesOf = Callable[[int, TrainState | None, StopSignal], Tried]


@dataclasses.dataclass
class LessonExperience:
    """See `rollouts.experience.Experience`."""

    config: LeretConfig
    inputs: Inputs
    mesh: Mesh
    policies: Mapping[str, TokenPolicy[Any]]
    asked: Sequence[int]  # numbers of the training questions that are tried
    base: tuple[Any, ...]
    tries_of: TriesOf
    shape_of: Callable[..., BlockShape]  # see `TokenSystem.block_shape`
    counted: Callable[[], dict[str, float]]
    batches: int = 0

    def __post_init__(self) -> None:
        self.waited = {"play": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._folder = Path()  # of the present iteration
        self._lessons: dict[int, Lessons] = {}  # by iteration; the present one alone
        self._reference: dict[int, np.ndarray] = {}
        self._shapes: dict[int, BlockShape] = {}  # by the first step of the present stage

    def next(self, state: TrainState, number: int, stop: StopSignal) -> Any:
        """See `Experience`."""
        stop.check()
        stage = self.config.stage_at(number)
        before = time.monotonic()
        if stage.kind == SCRIPT:
            batch = self._script(number)
        else:
            lessons = self._prepared(stage, state, number, stop)
            batch = self._learned(stage, lessons, number)
        self.waited["play"] += time.monotonic() - before
        self.batches += 1
        return batch

    def prepare(self, state: Any) -> None:
        """See `Experience`; there is nothing to prepare."""

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`."""
        return self.batches, []

    def counts(self) -> dict[str, float]:
        """See `Experience`."""
        return self.counted()

    def longest(self, kind: str) -> Any:
        """A batch of a stage whose rows are as long as they may be."""
        config = self.config
        count, room = getattr(config, kind).batch_size, config.sampling.room
        query = np.zeros(config.writing.query_tokens, np.int32)
        opening = np.zeros(room - len(query), np.int32)
        segment: Segment = (Turn(opening, query, query.astype(np.float32), STOP),)
        pairs = kind == PREFERENCE
        rows = lesson_batch([(segment,) * (PAIR if pairs else 1)] * count, room)
        shape = self._shape_of(kind, rows)
        if pairs:
            zeros, ones = np.zeros(PAIR * count, np.float32), np.ones(count, np.float32)
            return pair_episodes(self.policies[kind], rows, shape, zeros, ones)
        return token_episodes(self.policies[kind], rows, shape)

    # ---------------------------------------------------------------- batches

    def _on_devices(self, kind: str, batch: TokenBatch, shape: BlockShape) -> Any:
        episodes = token_episodes(self.policies[kind], batch, shape)
        return put_whole(episodes, episode_shardings(self.mesh))

    def _script(self, number: int) -> Any:
        """Demonstrations of the styles, all their hops."""
        config, inputs, size = self.config, self.inputs, self.config.script.batch_size
        script = inputs.script
        assert script is not None  # the config has this stage
        numbers, epochs = QuestionOrder(len(script.demonstrated), size, config.seed).at(number)
        starts = script.starts(config, [*map(int, numbers)], number * size)
        segments: list[Segment] = []
        for index, hops in enumerate(script.play(config, starts), number * size):
            shown_hops = draw_renamed(config.styles, config.seed, index, hops)
            for episode in styled_episodes(shown_hops, script.prompt, inputs.speech):
                shown = all_sampled(episode) if config.script.observed else episode
                segments += shown.segments
        self.samples = np.stack([numbers, epochs], axis=1)
        batch = lesson_batch([(segment,) for segment in segments], config.sampling.room)
        return self._on_devices(SCRIPT, batch, self._shape_of(SCRIPT, batch))

    def _learned(self, stage: StagePlan, lessons: Lessons, number: int) -> Any:
        """The batch of a step that learns from tries."""
        every = lessons.of(stage.kind)
        numbers = self._drawn(stage, every, number)
        batch = lesson_batch([every[n].queries for n in numbers], self.config.sampling.room)
        shape = self._shape(stage, lessons)
        if stage.kind == SFT:
            return self._on_devices(SFT, batch, shape)
        reference = self._reference[stage.iteration].reshape(-1, PAIR)[numbers].reshape(-1)
        weights = np.ones(len(numbers), np.float32)
        episodes = pair_episodes(self.policies[PREFERENCE], batch, shape, reference, weights)
        return put_whole(episodes, pair_shardings(self.mesh))

    def _drawn(self, stage: StagePlan, every: Sequence[Lesson], number: int) -> list[int]:
        """The lessons of a step, each once an epoch; a batch may hold several epochs of few."""
        size = getattr(self.config, stage.kind).batch_size
        order = QuestionOrder(len(every), size, self.config.seed + stage.first)
        numbers, epochs = order.at(number - stage.first)
        questions = np.array([self.asked[every[n].question] for n in numbers], np.int32)
        self.samples = np.stack([questions, epochs], axis=1)
        return numbers.tolist()

    def _shape(self, stage: StagePlan, lessons: Lessons) -> BlockShape:
        """One shape for all batches of a stage, so that one program is compiled.

        It depends on the tries, and not on when the run was begun anew.
        """
        if stage.first not in self._shapes:
            every = [each.queries for each in lessons.of(stage.kind)]
            every += [(segment,) * len(every[0]) for segment in lessons.longest]
            batch = lesson_batch(every, self.config.sampling.room)
            self._shapes = {stage.first: self._shape_of(stage.kind, batch)}
        return self._shapes[stage.first]

    def _shape_of(self, kind: str, batch: TokenBatch) -> BlockShape:
        pairs = kind == PREFERENCE
        return self.shape_of(batch, PAIR if pairs else 1, whole=pairs)

    # ---------------------------------------------------------------- lessons

    def _prepared(
        self, stage: StagePlan, state: TrainState, number: int, stop: StopSignal
    ) -> Lessons:
        """The lessons of an iteration; for pairs, the reference is there as well."""
        iteration = stage.iteration
        if iteration not in self._lessons:
            first = min(each.first for each in self.config.plan if each.iteration == iteration)
            # Later steps have other weights, by which nothing may be made that is missing.
            tried = self.tries_of(iteration, state if number == first else None, stop)
            self._folder, self._reference = tried.folder, {}
            self._lessons = {iteration: self._made(iteration, tried)}
        lessons = self._lessons[iteration]
        if stage.kind == SFT:
            check_some(len(lessons.imitated), "queries to imitate", SFT)
        elif iteration not in self._reference:
            check_some(len(lessons.pairs), "pairs", PREFERENCE)
            begins = number == stage.first
            found = self._of_reference(stage, lessons, state if begins else None, stop)
            self._reference[iteration] = found
        return lessons

    def _made(self, iteration: int, tried: Tried) -> Lessons:
        """The lessons of an iteration, with a report of its tries."""
        found, prompt = tried.found, tried.prompt
        check_found(found.tries)
        states = states_of(self.config, iteration, found)
        report = report_of(states)
        lessons = lessons_of(states, found.states, prompt, self.inputs.speech)
        told = report | {
            "iteration": iteration,
            "tries": len(found.tries),
            "unscored": sum(not each.scored for each in found.tries),
            "too_long": lessons.too_long,
            "prompts": [prompt.names[variant] for variant in tried.variants],
        }
        _write(tried.folder / "report.json", told, indent=1)
        log(
            f"iteration {iteration}: {report['pairs']} pairs and {report['targets']} best queries "
            f"of {len(states)} states ({report['shares']['paired']:.0%} have pairs), "
            f"{report['queries']:.2f} different queries a state; "
            f"{told['unscored']} tries without a score"
        )
        if any(each.kind == PREFERENCE for each in self.config.plan):
            check_pairs(report)
        return lessons

    def _of_reference(
        self, stage: StagePlan, lessons: Lessons, state: TrainState | None, stop: StopSignal
    ) -> np.ndarray:
        """Log-probabilities of all pairs' queries by the weights of the stage's start: `[2·P]`.

        Args:
            state: of these weights; None: they are gone.
        """
        path = self._folder / "reference.json"
        if state is None:
            if not path.exists():
                raise InputError(f"{path} is missing; bring it back, or begin a new --workdir.")
            return np.array(read_fields(path)["log_probs"], np.float32)
        room, size = self.config.sampling.room, self.config.preference.batch_size
        shape, parts = self._shape(stage, lessons), []
        pairs = [each.queries for each in lessons.pairs]
        for first in range(0, len(pairs), size):  # as many as in an update: one program
            stop.check()
            batch = lesson_batch(pairs[first : first + size], room)
            parts.append(self._log_probs(state.params, batch, shape, *self.base))
        found = np.concatenate(parts)
        _write(path, {"log_probs": found.tolist()})
        return found

    @cached_property
    def _log_probs(self) -> Any:
        return row_log_probs(self.policies[PREFERENCE])


def _write(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Lets the first host write a file; the others wait."""
    text = json.dumps(content, indent=indent) + "\n"
    hosts.first_does(partial(write_whole, path, text))
