"""What LeReT's stages learn from, batch by batch: demonstrations, best tries, pairs of tries.

An iteration's tries are made when its first step is due. They and the log-probabilities of the
reference are kept in the run's folder, so that a resumed run learns from the same.
"""

from __future__ import annotations

import json
import time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from qrag_jax.environments.query_writing.styles import Start, StyledPlay, draw_styles
from qrag_jax.errors import InputError
from qrag_jax.feedback.later_credit import credited
from qrag_jax.feedback.pairs_report import check_pairs, report_of
from qrag_jax.feedback.preference_pairs import pairs_of
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.learners.policy_state import PolicyState
from qrag_jax.learners.preference_update import pair_episodes, pair_shardings, row_log_probs
from qrag_jax.learners.token_update import episode_shardings, token_episodes
from qrag_jax.rollouts.agent_experience import QuestionOrder
from qrag_jax.rollouts.scripted_tokens import all_sampled
from qrag_jax.rollouts.styled_tokens import styled_episodes
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape, choose_shape
from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import Segment, Turn
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.run import log
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.leret_config import PREFERENCE, SCRIPT, SFT, StagePlan
from qrag_jax.systems.leret_inputs import search_by
from qrag_jax.systems.leret_lessons import (
    PAIR,
    Lessons,
    PairLesson,
    check_some,
    imitation_batch,
    lessons_of,
    pairs_batch,
)
from qrag_jax.systems.leret_tries import FOLDER

if TYPE_CHECKING:
    from qrag_jax.systems.leret import Leret

_START, _REFERENCE, _REPORT = "start.json", "reference.npy", "report.json"


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
        self._shapes: dict[tuple[str, int], BlockShape] = {}

    def next(self, state: PolicyState, number: int, stop: StopSignal) -> Any:
        """See `Experience`.

        Raises:
            InputError: the tries give nothing to learn from, or kept files are not this run's.
        """
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
        return self._system.counted()

    def longest(self, kind: str) -> Any:
        """Shapes of a batch of a stage whose rows are as long as they may be."""
        config = self._system.config
        count, room = getattr(config, kind).batch_size, config.sampling.room
        query = np.zeros(config.writing.query_tokens, np.int32)
        opening = np.zeros(room - len(query), np.int32)
        segment: Segment = (Turn(opening, query, query.astype(np.float32), STOP),)
        found: Any
        if kind == PREFERENCE:
            pairs = pairs_batch([PairLesson(segment, segment, 1.0)] * count, room)
            zeros, ones = np.zeros(PAIR * count, np.float32), np.ones(count, np.float32)
            shape = self._shape(kind, 0, pairs)
            found = pair_episodes(self._learner(kind).policy, pairs, shape, zeros, ones)
        else:
            rows = imitation_batch([segment] * count, room)
            found = token_episodes(self._learner(kind).policy, rows, self._shape(kind, 0, rows))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)

    # ---------------------------------------------------------------- batches

    def _learner(self, kind: str) -> Any:
        return self._system.learner(kind)

    def _on_devices(self, kind: str, batch: TokenBatch, shape: BlockShape) -> Any:
        mesh = self._system.mesh
        episodes = token_episodes(self._learner(kind).policy, batch, shape)
        return jax.device_put(episodes, episode_shardings(mesh))

    def _script(self, number: int) -> Any:
        """Demonstrations of the styles, all their hops."""
        system = self._system
        config, inputs = system.config, system.inputs
        size = config.script.batch_size
        numbers, epochs = QuestionOrder(len(inputs.train), size, config.seed).at(number)
        starts = [
            Start(
                inputs.train[each],
                inputs.scripted[each],
                draw_styles(config.styles, config.seed, number * size + n, config.writing.hops),
            )
            for n, each in enumerate(numbers.tolist())
        ]
        segments: list[Segment] = []
        for hops in self._styled.play(starts):
            for episode in styled_episodes(hops, inputs.agent.prompt, inputs.speech):
                shown = all_sampled(episode) if config.script.observed else episode
                segments += shown.segments
        self.samples = np.stack([numbers, epochs], axis=1)
        batch = imitation_batch(segments, config.sampling.room)
        return self._on_devices(SCRIPT, batch, self._shape_of(SCRIPT, batch))

    @cached_property
    def _styled(self) -> StyledPlay:
        config, inputs = self._system.config, self._system.inputs
        search = search_by(inputs.library, config.writing.k, inputs.train[0])
        return StyledPlay(search, config.writing.order, config.styles.most_words)

    def _imitated(self, stage: StagePlan, lessons: Lessons, number: int) -> Any:
        room, every = self._system.config.sampling.room, lessons.imitated
        numbers = self._drawn(stage, len(every), number)
        batch = imitation_batch([every[n] for n in numbers], room)
        shape = self._shape(SFT, stage.iteration, imitation_batch(every, room))
        return self._on_devices(SFT, batch, shape)

    def _paired(self, stage: StagePlan, lessons: Lessons, number: int) -> Any:
        system, room = self._system, self._system.config.sampling.room
        numbers = self._drawn(stage, len(lessons.pairs), number)
        chosen = [lessons.pairs[n] for n in numbers]
        shape = self._shape(PREFERENCE, stage.iteration, pairs_batch(lessons.pairs, room))
        reference = self._reference[stage.iteration].reshape(-1, PAIR)[numbers].reshape(-1)
        episodes = pair_episodes(
            self._learner(PREFERENCE).policy,
            pairs_batch(chosen, room),
            shape,
            reference,
            np.array([pair.weight for pair in chosen], np.float32),
        )
        return jax.device_put(episodes, pair_shardings(system.mesh))

    def _drawn(self, stage: StagePlan, count: int, number: int) -> list[int]:
        """The lessons of a step, each once an epoch."""
        config = self._system.config
        size = min(getattr(config, stage.kind).batch_size, count)
        order = QuestionOrder(count, size, config.seed + stage.first)
        numbers, epochs = order.at(number - stage.first)
        self.samples = np.stack([numbers, epochs], axis=1)
        return numbers.tolist()

    def _shape(self, kind: str, iteration: int, every: TokenBatch) -> BlockShape:
        """One shape for all batches of a stage, so that one program is compiled."""
        if (kind, iteration) not in self._shapes:
            self._shapes[kind, iteration] = self._shape_of(kind, every)
        return self._shapes[kind, iteration]

    def _shape_of(self, kind: str, batch: TokenBatch) -> BlockShape:
        config = self._system.config
        tokens = config.model.tokens(Platform.of(self._system.mesh))
        pairs = kind == PREFERENCE
        members, room = PAIR if pairs else 1, config.sampling.room
        return choose_shape(batch, tokens, members, room=room, whole=pairs)

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
            self._reference[stage.iteration] = self._of_reference(stage, lessons, state, number)
        if stage.kind == SFT:
            check_some(len(lessons.imitated), "queries to imitate", SFT)
        return lessons

    def _made(self, iteration: int, state: PolicyState, number: int, stop: StopSignal) -> Lessons:
        system = self._system
        config = system.config
        weights = self._weights(iteration, state, number)
        play = system.play(state, stop)
        prompt = system.prompt(play)
        found = system.tries.iteration(iteration, partial(play, prompt), weights, stop)
        tries = credited(found.tries, found.grown_from, config.reward)
        by_state: dict[StateKey, list[Try]] = {}
        for each in tries:
            by_state.setdefault(each.at, []).append(each)
        states = [
            pairs_of(own, config.pairs, (config.seed, iteration)) for own in by_state.values()
        ]
        report = report_of(states)
        lessons = lessons_of(states, found.states, prompt, system.inputs.speech)
        told = report.to_json() | {
            "iteration": iteration,
            "tries": len(tries),
            "unscored": sum(not each.scored for each in tries),
            "too_long": lessons.too_long,
            "prompts": [prompt.names[variant] for variant in config.tries.variants],
        }
        self._folder(iteration).mkdir(parents=True, exist_ok=True)
        write_whole(self._folder(iteration) / _REPORT, json.dumps(told, indent=1) + "\n")
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

    def _weights(self, iteration: int, state: PolicyState, number: int) -> str:
        """A digest of the weights that make the tries of an iteration.

        Raises:
            InputError: its tries were made by other weights, or nobody knows by which.
        """
        from qrag_jax.systems.leret import digest_of_weights

        path = self._folder(iteration) / _START
        first = min(each.first for each in self._system.config.plan if each.iteration == iteration)
        kept = json.loads(path.read_text())["weights"] if path.exists() else None
        if number > first:
            if kept is None:
                raise InputError(f"{path} is missing; bring it back, or begin a new --workdir.")
            return kept
        own = digest_of_weights(state.params)
        if kept not in (None, own):
            raise InputError(
                f"the tries in {path.parent} were made by other weights than those of step {number}"
                "; delete the folder, and they are made again."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"step": number, "weights": own}) + "\n")
        return own

    def _of_reference(
        self, stage: StagePlan, lessons: Lessons, state: PolicyState, number: int
    ) -> np.ndarray:
        """Log-probabilities of all pairs' queries by the weights of the stage's start: `[2·P]`.

        Raises:
            InputError: they were kept for other pairs, or lost.
        """
        path = self._folder(stage.iteration) / _REFERENCE
        if path.exists():
            found = np.load(path, allow_pickle=False)
            if len(found) == PAIR * len(lessons.pairs):
                return found
        if number > stage.first:
            raise InputError(
                f"{path} is missing or of other pairs; bring it back, or begin a new --workdir."
            )
        system, room = self._system, self._system.config.sampling.room
        batch = pairs_batch(lessons.pairs, room)
        shape = self._shape(PREFERENCE, stage.iteration, batch)
        log_probs = row_log_probs(self._learner(PREFERENCE).policy)
        found = log_probs(state.params, batch, shape, *system.base)
        building = path.with_suffix(".partial")
        with building.open("wb") as file:
            np.save(file, found)
        building.replace(path)
        return found
