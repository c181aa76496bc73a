"""What LeReT's stages learn from, batch by batch: demonstrations, best tries, pairs of tries.

An iteration's tries are made when its first step is due. They and the log-probabilities of the
reference are kept in the run's folder, so that a resumed run learns from the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from qrag_jax.data.scripted import BridgeQuestion
from qrag_jax.environments.query_writing.prompt import QueryPrompt
from qrag_jax.environments.query_writing.state import Pool, QueryState
from qrag_jax.environments.query_writing.styles import (
    Start,
    StyledPlay,
    draw_renamed,
    draw_styles,
    style_variants,
)
from qrag_jax.environments.tools.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import (
    StatePairs,
    check_found,
    check_pairs,
    credited,
    pairs_of,
    report_of,
)
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.preference_update import pair_episodes, pair_shardings, row_log_probs
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import episode_shardings, token_episodes
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.rollouts.experience import QuestionOrder
from qrag_jax.rollouts.libraries import CorpusLibrary
from qrag_jax.rollouts.query_tries import states_on
from qrag_jax.rollouts.scripted_tokens import all_sampled, styled_episodes
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.rollouts.token_episodes import Speech
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
from qrag_jax.systems.leret_tries import FOLDER, START
from qrag_jax.systems.query_search import check_same_corpus
from qrag_jax.systems.saved_token_run import digest_of_weights

if TYPE_CHECKING:
    from qrag_jax.systems.leret import Leret

PAIR = 2  # rows of a pair: the winner, then the loser
_MEASURED = 8  # states whose prompts are measured for the longest


class BestLesson(NamedTuple):
    """A query to imitate.

    Attributes:
        best: the best query of a state, behind its prompt.
        question: its number.
    """

    best: Segment
    question: int


class PairLesson(NamedTuple):
    """A pair to learn from.

    Attributes:
        better, worse: the two queries of one state, behind the same prompt.
        question: its number.
    """

    better: Segment
    worse: Segment
    question: int


@dataclasses.dataclass(frozen=True)
class Lessons:
    """What one iteration learns from.

    Attributes:
        imitated: a prompt and the query that is imitated, each.
        pairs: of queries.
        longest: the longest rows that the tries might have given, two of a state. The shape of
            blocks is chosen with them, so that iterations whose lessons differ share a program.
        too_long: states that were left out, because prompt and query have more tokens than fit.
    """

    imitated: list[BestLesson]
    pairs: list[PairLesson]
    longest: list[PairLesson]
    too_long: int


def lessons_of(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> Lessons:
    """The lessons of all states.

    Args:
        states: what is learned at each.
        shown: the states themselves.
        prompt: asks by its bare form.
    """
    lessons = Lessons([], [], _longest(states, shown, prompt, speech), 0)
    too_long = 0
    for each in states:
        if each.at is None or (each.target is None and not each.pairs):
            continue
        opening = speech.scaffold.opening(prompt.messages(shown[each.at].asked_by(0)))
        longest = max(len(query.sampled) for query in each.queries)
        if len(opening) + longest > speech.room:
            too_long += 1
            continue
        turns = [(_turn(opening, query),) for query in each.queries]
        if each.target is not None:
            lessons.imitated.append(BestLesson(turns[each.target], each.at.question))
        lessons.pairs.extend(
            PairLesson(turns[pair.winner], turns[pair.loser], each.at.question)
            for pair in each.pairs
        )
    return dataclasses.replace(lessons, too_long=too_long)


def _longest(
    states: Sequence[StatePairs],
    shown: Mapping[StateKey, QueryState],
    prompt: QueryPrompt,
    speech: Speech,
) -> list[PairLesson]:
    asked = {each.at: each.queries for each in states if each.at is not None and each.queries}
    queries = [query for own in asked.values() for query in own]
    if not queries:
        return []
    longest = max(queries, key=lambda query: len(query.sampled))

    def characters(at: StateKey) -> int:
        return sum(len(text) for _, text in prompt.messages(shown[at].asked_by(0)))

    found = []
    # Texts of more characters have more tokens, or nearly so many.
    for at in sorted(asked, key=characters)[-_MEASURED:]:
        opening = speech.scaffold.opening(prompt.messages(shown[at].asked_by(0)))
        if len(opening) + len(longest.sampled) <= speech.room:
            turn = (_turn(opening, longest),)
            found.append(PairLesson(turn, turn, at.question))
    return found


def _turn(opening: np.ndarray, query: Try) -> Turn:
    ids = np.array(query.sampled, np.int32)
    return Turn(opening, ids, np.zeros(len(ids), np.float32), STOP)


def imitation_batch(segments: Sequence[Segment], room: int) -> TokenBatch:
    """The arrays of queries to imitate, an episode each."""
    rows = [_row(segment, number) for number, segment in enumerate(segments)]
    return token_batch(rows, BatchRules(1, (), SCORED, room))


def pairs_batch(pairs: Sequence[PairLesson], room: int) -> TokenBatch:
    """The arrays of pairs: episodes 2g and 2g + 1 are the better and the worse query of pair g."""
    rows = [
        _row(segment, number)
        for number, pair in enumerate(pairs)
        for segment in (pair.better, pair.worse)
    ]
    return token_batch(rows, BatchRules(PAIR, (), SCORED, room))


def _row(segment: Segment, group: int) -> TokenTrajectory:
    return TokenTrajectory(group, 0, 1, (segment,), DONE)


def check_some(count: int, what: str, stage: str) -> None:
    """Refuses a stage that has nothing to learn from."""
    if not count:
        raise InputError(
            f"the tries gave no {what} for the stage {stage}; use more or other prompts "
            "(config.tries.prompts), more tries of each (config.tries.samples) at a higher "
            "config.sampling.temperature, or leave the stage out."
        )


_READ_FOR_TOKENIZER = 300  # demonstrations on which a tiny model's tokenizer is trained


@dataclasses.dataclass(frozen=True)
class Script:
    """Demonstrations before they are drawn.

    Attributes:
        library: what their queries search.
        demonstrated: the questions, and what the script knows of them: all of the corpus, so more
            than those that are tried, because a model that sees few names often learns them by
            heart, and not to copy. (To see none twice was worse: names were copied later.)
        prompt: the bare one and those with the marks of the styles, whatever tries are asked by.
    """

    library: CorpusLibrary
    demonstrated: Sequence[tuple[QueryState, BridgeQuestion]]
    prompt: QueryPrompt

    def starts(self, config: LeretConfig, numbers: Sequence[int], first: int) -> list[Start]:
        """The demonstrations `first`, `first` + 1 and so on, of the questions of these numbers."""
        hops = config.writing.hops
        return [
            Start(*self.demonstrated[each], draw_styles(config.styles, config.seed, draw, hops))
            for draw, each in enumerate(numbers, first)
        ]

    def play(self, config: LeretConfig) -> StyledPlay:
        """How they are played."""
        search = search_by(self.library, config.writing.k, self.demonstrated[0][0])
        return StyledPlay(search, config.writing.order, config.styles.most_words)

    def texts(self, config: LeretConfig) -> Iterator[str]:
        """The texts of the first demonstrations, prompts included."""
        few = range(min(_READ_FOR_TOKENIZER, len(self.demonstrated)))
        for hops in self.play(config).play(self.starts(config, few, 0)):
            for hop in hops:
                yield from (text for _, text in self.prompt.messages(hop.state))
                yield hop.query


def script_of(
    config: LeretConfig, made: Sequence[BridgeQuestion], library: CorpusLibrary
) -> Script:
    """Demonstrations of these questions, whose passages `library` has."""
    by_id = {each.id: each for each in made}
    states = states_on([each.query for each in made], library.corpus, config.search.gold_by).states
    words = config.writing.passage_words
    prompt = QueryPrompt(prompts.load(config.writing.prompt), style_variants(), words)
    return Script(library, [(state, by_id[state.id]) for state in states], prompt)


def search_by(library: CorpusLibrary, k: int, state: QueryState):
    """Queries → what each finds, for scripts; `state` is any question's."""

    def search(queries: Sequence[str]) -> list[Pool | Failure]:
        return library.look([(state, Look(query, k)) for query in queries])

    return search


_REFERENCE, _REPORT = "reference.json", "report.json"
_LOST = "bring it back, or begin a new --workdir"


class LessonExperience:
    """See `rollouts.experience.Experience`.

    Args:
        system: the run's.
        batches: number of batches learned from before.
    """

    def __init__(self, system: Leret, batches: int) -> None:
        self.waited = {"play": 0.0}
        self.samples = np.zeros((0, 2), np.int32)
        self._system, self._batches = system, batches
        self._lessons: dict[int, Lessons] = {}  # by iteration; the present one alone
        self._reference: dict[int, np.ndarray] = {}
        self._shapes: dict[int, BlockShape] = {}  # by the first step of the present stage

    def next(self, state: PolicyState, number: int, stop: StopSignal) -> Any:
        """See `Experience`."""
        stop.check()
        stage = self._system.config.stage_at(number)
        before = time.monotonic()
        if stage.kind == SCRIPT:
            batch = self._script(number)
        else:
            lessons = self._prepared(stage, state, number, stop)
            choose = self._imitated if stage.kind == SFT else self._paired
            batch = choose(stage, lessons, number)
        self.waited["play"] += time.monotonic() - before
        self._batches += 1
        return batch

    def prepare(self, state: Any) -> None:
        """See `Experience`; there is nothing to prepare."""

    def position(self) -> tuple[Any, list[Any]]:
        """See `Experience`."""
        return self._batches, []

    def counts(self) -> dict[str, float]:
        """See `Experience`."""
        return self._system.told_counts()

    def longest(self, kind: str) -> Any:
        """A batch of a stage whose rows are as long as they may be."""
        config = self._system.config
        count, room = getattr(config, kind).batch_size, config.sampling.room
        query = np.zeros(config.writing.query_tokens, np.int32)
        opening = np.zeros(room - len(query), np.int32)
        segment: Segment = (Turn(opening, query, query.astype(np.float32), STOP),)
        if kind == PREFERENCE:
            pairs = pairs_batch([PairLesson(segment, segment, 0)] * count, room)
            zeros, ones = np.zeros(PAIR * count, np.float32), np.ones(count, np.float32)
            shape = self._shape_of(kind, pairs)
            return pair_episodes(self._policy(kind), pairs, shape, zeros, ones)
        rows = imitation_batch([segment] * count, room)
        return token_episodes(self._policy(kind), rows, self._shape_of(kind, rows))

    # ---------------------------------------------------------------- batches

    def _policy(self, kind: str) -> TokenPolicy[Any]:
        return self._system.stage(kind).policy

    def _on_devices(self, kind: str, batch: TokenBatch, shape: BlockShape) -> Any:
        mesh = self._system.mesh
        episodes = token_episodes(self._policy(kind), batch, shape)
        return put_whole(episodes, episode_shardings(mesh))

    def _script(self, number: int) -> Any:
        """Demonstrations of the styles, all their hops."""
        system = self._system
        config, inputs = system.config, system.inputs
        size = config.script.batch_size
        assert inputs.script is not None  # the config has this stage
        many = len(inputs.script.demonstrated)
        numbers, epochs = QuestionOrder(many, size, config.seed).at(number)
        starts = inputs.script.starts(config, [*map(int, numbers)], number * size)
        segments: list[Segment] = []
        for index, hops in enumerate(self._styled.play(starts), number * size):
            shown_hops = draw_renamed(config.styles, config.seed, index, hops)
            for episode in styled_episodes(shown_hops, inputs.script.prompt, inputs.speech):
                shown = all_sampled(episode) if config.script.observed else episode
                segments += shown.segments
        self.samples = np.stack([numbers, epochs], axis=1)
        batch = imitation_batch(segments, config.sampling.room)
        return self._on_devices(SCRIPT, batch, self._shape_of(SCRIPT, batch))

    @cached_property
    def _styled(self) -> StyledPlay:
        script = self._system.inputs.script
        assert script is not None
        return script.play(self._system.config)

    def _imitated(self, stage: StagePlan, lessons: Lessons, number: int) -> Any:
        room = self._system.config.sampling.room
        numbers = self._drawn(stage, lessons.imitated, number)
        every = [each.best for each in lessons.imitated] + [each.better for each in lessons.longest]
        shape = self._shape(stage, lambda: imitation_batch(every, room))
        batch = imitation_batch([lessons.imitated[n].best for n in numbers], room)
        return self._on_devices(SFT, batch, shape)

    def _paired(self, stage: StagePlan, lessons: Lessons, number: int) -> Any:
        system, room = self._system, self._system.config.sampling.room
        numbers = self._drawn(stage, lessons.pairs, number)
        chosen = [lessons.pairs[n] for n in numbers]
        shape = self._shape_of_pairs(stage, lessons)
        reference = self._reference[stage.iteration].reshape(-1, PAIR)[numbers].reshape(-1)
        episodes = pair_episodes(
            self._policy(PREFERENCE),
            pairs_batch(chosen, room),
            shape,
            reference,
            np.ones(len(chosen), np.float32),
        )
        return put_whole(episodes, pair_shardings(system.mesh))

    def _drawn(
        self, stage: StagePlan, every: Sequence[BestLesson | PairLesson], number: int
    ) -> list[int]:
        """The lessons of a step, each once an epoch; a batch may hold several epochs of few."""
        config, asked = self._system.config, self._system.asked
        size = getattr(config, stage.kind).batch_size
        order = QuestionOrder(len(every), size, config.seed + stage.first)
        numbers, epochs = order.at(number - stage.first)
        questions = np.array([asked[every[n].question] for n in numbers], np.int32)
        self.samples = np.stack([questions, epochs], axis=1)
        return numbers.tolist()

    def _shape(self, stage: StagePlan, every: Callable[[], TokenBatch]) -> BlockShape:
        """One shape for all batches of a stage, so that one program is compiled.

        It depends on the tries, and not on when the run was begun anew.

        Args:
            every: makes the rows of all lessons of the stage.
        """
        if stage.first not in self._shapes:
            self._shapes = {stage.first: self._shape_of(stage.kind, every())}
        return self._shapes[stage.first]

    def _shape_of_pairs(self, stage: StagePlan, lessons: Lessons) -> BlockShape:
        room = self._system.config.sampling.room
        return self._shape(stage, lambda: pairs_batch(lessons.pairs + lessons.longest, room))

    def _shape_of(self, kind: str, batch: TokenBatch) -> BlockShape:
        pairs = kind == PREFERENCE
        return self._system.block_shape(batch, PAIR if pairs else 1, whole=pairs)

    # ---------------------------------------------------------------- lessons

    def _prepared(
        self, stage: StagePlan, state: PolicyState, number: int, stop: StopSignal
    ) -> Lessons:
        """The lessons of an iteration; for pairs, the reference is there as well."""
        if stage.iteration not in self._lessons:
            self._lessons = {stage.iteration: self._made(stage.iteration, state, number, stop)}
            self._reference = {}
        lessons = self._lessons[stage.iteration]
        if stage.kind == PREFERENCE and stage.iteration not in self._reference:
            check_some(len(lessons.pairs), "pairs", PREFERENCE)
            found = self._of_reference(stage, lessons, (state, number), stop)
            self._reference[stage.iteration] = found
        if stage.kind == SFT:
            check_some(len(lessons.imitated), "queries to imitate", SFT)
        return lessons

    def _made(self, iteration: int, state: PolicyState, number: int, stop: StopSignal) -> Lessons:
        system = self._system
        config = system.config
        inputs, folder = system.inputs, system.inputs.library.corpus.folder
        check_same_corpus(inputs.data["corpus"], StoredCorpus(folder).digest)
        weights, is_first = self._weights(iteration, state, number)
        # Later steps have other weights, by which nothing may be made that is missing.
        play = system.play(state, stop) if is_first else None
        prompt = system.prompt(play if iteration == 1 else None)
        by_prompt = None if play is None else partial(play, prompt)
        found = system.tries.iteration(iteration, by_prompt, weights, stop)
        check_found(found.tries)
        tries = credited(found.tries, found.grown_from, config.reward)
        by_state: dict[StateKey, list[Try]] = {}
        for each in tries:
            by_state.setdefault(each.at, []).append(each)
        states = [pairs_of(own, config.pairs) for own in by_state.values()]
        report = report_of(states)
        lessons = lessons_of(states, found.states, prompt, inputs.speech)
        told = report.to_json() | {
            "iteration": iteration,
            "tries": len(tries),
            "unscored": sum(not each.scored for each in tries),
            "too_long": lessons.too_long,
            "prompts": [prompt.names[variant] for variant in system.variants],
        }
        _write(self._folder(iteration) / _REPORT, json.dumps(told, indent=1) + "\n")
        log(
            f"iteration {iteration}: {report.pairs} pairs and {report.targets} best queries of "
            f"{report.total} states ({report.share('paired'):.0%} have pairs), "
            f"{report.queries:.2f} different queries a state; {told['unscored']} tries without a "
            "score"
        )
        if any(each.kind == PREFERENCE for each in config.plan):
            check_pairs(report)
        return lessons

    def _folder(self, iteration: int) -> Path:
        return self._system.workdir / FOLDER / f"iteration-{iteration}"

    def _weights(self, iteration: int, state: PolicyState, number: int) -> tuple[str, bool]:
        """A digest of the weights that make the tries of an iteration; whether they are these."""
        path = self._folder(iteration) / START
        first = min(each.first for each in self._system.config.plan if each.iteration == iteration)
        kept = read_fields(path)["weights"] if path.exists() else None
        if number > first:
            if kept is None:
                raise InputError(f"{path} is missing; {_LOST}.")
            return kept, False
        own = digest_of_weights(hosts.of_all(state.params))
        if kept not in (None, own):
            raise InputError(
                f"the tries in {path.parent} were made by other weights than those of step {number}"
                "; delete the folder, and they are made again."
            )
        _write(path, json.dumps({"step": number, "weights": own}) + "\n")
        return own, True

    def _of_reference(
        self,
        stage: StagePlan,
        lessons: Lessons,
        now: tuple[PolicyState, int],
        stop: StopSignal,
    ) -> np.ndarray:
        """Log-probabilities of all pairs' queries by the weights of the stage's start: `[2·P]`.

        Args:
            now: the state, and the number of its step.
        """
        path, (state, number) = self._folder(stage.iteration) / _REFERENCE, now
        digest = _digest_of_pairs(lessons)
        kept = read_fields(path) if path.exists() else {}
        if kept.get("pairs") == digest:
            return np.array(kept["log_probs"], np.float32)
        if number > stage.first:
            raise InputError(f"{path} is missing or of other pairs; {_LOST}.")
        room = self._system.config.sampling.room
        size = self._system.config.preference.batch_size
        shape = self._shape_of_pairs(stage, lessons)
        parts = []
        for first in range(0, len(lessons.pairs), size):  # as many as in an update: one program
            stop.check()
            batch = pairs_batch(lessons.pairs[first : first + size], room)
            parts.append(self._log_probs(state.params, batch, shape, *self._system.base))
        found = np.concatenate(parts)
        said = {"pairs": digest, "log_probs": found.tolist()}
        _write(path, json.dumps(said) + "\n")
        return found

    @cached_property
    def _log_probs(self) -> Any:
        return row_log_probs(self._policy(PREFERENCE))


def _write(path: Path, text: str) -> None:
    """Lets the first host write a file; the others wait."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)

    hosts.first_does(write)


def _digest_of_pairs(lessons: Lessons) -> str:
    digest = hashlib.sha256()
    for pair in lessons.pairs:
        for segment in (pair.better, pair.worse):
            for turn in segment:
                digest.update(turn.observed.tobytes() + b"\0" + turn.sampled.tobytes() + b"\1")
    return digest.hexdigest()[:16]
