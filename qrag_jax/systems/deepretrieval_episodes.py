"""What a query rewriter learns from: demonstrations, and played episodes with their rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Document, Look
from qrag_jax.evaluators.tool_scores import REWARD
from qrag_jax.feedback.llm import Patience
from qrag_jax.feedback.rewrite import (
    GUARD_MEASURES,
    TELL,
    Entries,
    Guards,
    GuardsConfig,
    RewriteReward,
    guard_measures,
)
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.rollouts.experience import AgentExperience, Playing
from qrag_jax.rollouts.scripted_tokens import Talk, all_sampled, encoded
from qrag_jax.rollouts.token_episodes import TokenEpisode, facts_of
from qrag_jax.rollouts.trajectories import DONE, TokenTrajectory
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import Inputs
from qrag_jax.systems.query_search import Collections
from qrag_jax.systems.token_system import SCRIPTED

Found = tuple[Document, ...] | Failure


class _Search(NamedTuple):
    """A search as `Patience` takes it."""

    ended: Found


@dataclasses.dataclass
class OriginalQueries:
    """Searches original queries.

    Attributes:
        search: (queries, k) → what the original ones find, best first.
        reward: measures what is found.
        attempts: a search that fails is done again, so often in all.
    """

    search: Callable[[Sequence[RewriteTask], int], list[Found]]
    reward: RewriteReward
    attempts: int

    def __post_init__(self) -> None:
        # By the whole task: ids are unique within a part of the data alone.
        self._measures: dict[RewriteTask, float] = {}

    def found(self, tasks: Sequence[RewriteTask], k: int, patience: Patience) -> list[Found]:
        """What each task's original query finds, best first; few of the searches have failed.

        Args:
            patience: says how many may fail; its `broken` is `Failure`.
        """
        if not tasks:
            return []
        played = patience.play(tasks, lambda some: [*map(_Search, self._searched(some, k))])
        return [each.ended for each in played]

    def measures(self, tasks: Sequence[RewriteTask], patience: Patience) -> list[float | Failure]:
        """The reward's measure of what each task's original query finds; it is kept."""
        new = [each for each in dict.fromkeys(tasks) if each not in self._measures]
        failed: dict[RewriteTask, Failure] = {}
        for task, found in zip(new, self.found(new, self.reward.config.k, patience), strict=True):
            if isinstance(found, Failure):
                failed[task] = found
            else:
                self._measures[task] = self.reward.measure(task, found)
        return [failed[each] if each in failed else self._measures[each] for each in tasks]

    def _searched(self, tasks: Sequence[RewriteTask], k: int) -> list[Found]:
        found = self.search(tasks, k)
        for _ in range(self.attempts - 1):
            places = [n for n, each in enumerate(found) if isinstance(each, Failure)]
            if not places:
                break
            again = self.search([tasks[n] for n in places], k)
            for place, each in zip(places, again, strict=True):
                found[place] = each
        return found


class RewriteEpisodes:
    """Makes trajectories of the queries of a run."""

    def __init__(self, config: RewriteConfig, inputs: Inputs) -> None:
        self.reward = RewriteReward(config.reward, _entries(config, inputs))
        self._config, self._inputs = config, inputs
        self.originals = OriginalQueries(self.searched, self.reward, config.rollout.attempts)

    def imitated(self, numbers: Sequence[int], step: int) -> list[TokenTrajectory]:
        """The demonstrations of a step of the stage script, of these queries."""
        config, inputs, found = self._config, self._inputs, []
        assert inputs.script is not None
        for place, number in enumerate(numbers):
            shown = inputs.script.at(config, number, step * config.script.batch_size + place)
            talk = Talk(
                Rewritten(answer=shown.query),
                ((inputs.agent.prompt.messages(shown.task), shown.query),),
            )
            episode = encoded(talk, inputs.speech)
            if config.script.observed:
                episode = all_sampled(episode)
            found.append(
                TokenTrajectory(
                    question=number,
                    member=0,
                    attempt=1,
                    segments=episode.segments,
                    status=DONE,
                    parts={REWARD: 0.0},
                    facts={SCRIPTED: True},
                )
            )
        return found

    def trajectories(
        self, episodes: Sequence[TokenEpisode], numbers: Sequence[int], patience: Patience
    ) -> list[TokenTrajectory]:
        """Played episodes with their rewards.

        Args:
            episodes: as many of each query, which are neighbours.
            numbers: of the training queries.
            patience: with searches of original queries; its `broken` is `Failure`.
        """
        members = len(episodes) // max(len(numbers), 1)
        tasks = [self._inputs.train[number] for number in numbers]
        originals = self.originals.measures(tasks, patience)
        return [
            self.trajectory(
                episode,
                (numbers[place // members], place % members),
                tasks[place // members],
                originals[place // members],
            )
            for place, episode in enumerate(episodes)
        ]

    def trajectory(
        self,
        episode: TokenEpisode,
        of: tuple[int, int],
        task: RewriteTask,
        original: float | Failure,
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it, or the original, failed.

        Args:
            of: numbers of its query, and of it among the episodes of this query.
        """
        ended, status, parts = episode.ended, episode.status, {}
        if isinstance(original, Failure):
            status = original.cause
        elif isinstance(ended, Rewritten):
            parts = self.reward.of(task, ended, original)
        return TokenTrajectory(
            question=of[0],
            member=of[1],
            attempt=episode.attempts,
            segments=episode.segments,
            status=status,
            parts=parts,
            facts=facts_of(ended),
        )

    def searched(
        self, tasks: Sequence[RewriteTask], k: int, queries: Sequence[str] | None = None
    ) -> list[tuple[Document, ...] | Failure]:
        """What queries find, best first.

        Args:
            queries: None: the original ones.
        """
        given = [each.question for each in tasks] if queries is None else queries
        looks = [Look(one_line(query), k) for query in given]
        return self._inputs.library.look([*zip(tasks, looks, strict=True)])

    def shape_of(self, trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
        """Means of the guards' measures of the queries, and of the parts of rewards."""
        shapes = []
        for each in trajectories:
            if query := each.facts.get("answer"):
                task = self._inputs.train[each.question]
                shapes.append(guard_measures(task.question, query, task.answers))
        return {
            name: float(np.mean([each[name] for each in shapes])) if shapes else float("nan")
            for name in GUARD_MEASURES
        } | _parts_of(trajectories)


def _entries(config: RewriteConfig, inputs: Inputs) -> dict[str, Entries]:
    """Of the collections of the training queries; none unless reading costs."""
    library = inputs.library.library
    if not config.reward.reading_cost or not isinstance(library, Collections):
        return {}
    names = {task.collection for task in inputs.train}
    return {
        name: Entries.of(passage.whole for passage in own.corpus)
        for name, own in library.by_name.items()
        if name in names
    }


def _parts_of(trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
    """Means of the parts of rewards but the reward itself, over the episodes that have them."""
    rows = [each.parts for each in trajectories if each.parts]
    names = [name for name in (rows[0] if rows else {}) if name != REWARD]
    return {f"train/{name}": float(np.mean([row[name] for row in rows])) for name in names}


_GUARD, _BATCHES = "guard", "batches"  # in the position of an experience


class RewriteGuard:
    """Looks at updates; see `feedback.rewrite.Guards`.

    Attributes:
        ended: why the training ends before its next update; "": it goes on.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self.ended = ""
        self._config, self._guards = config, Guards(config)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that it looks at."""
        return self._config.metrics

    def look(self, metrics: Mapping[str, float]) -> None:
        """Looks at one update, and settles what happens."""
        told = self._guards.look(metrics)
        if told is None:
            return
        if self._config.action == TELL:
            log(f"guard: {told}")
        else:
            self.ended = (
                f"{told} The training ends here, as config.guards.action says; the best checkpoint "
                "is kept. To go on all the same, raise the limit and give the same command."
            )

    def state(self) -> dict[str, Any]:
        """All that it remembers, as JSON has it."""
        return {"counts": self._guards.state()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave."""
        self._guards.restore(saved["counts"])


class GuardedExperience(AgentExperience):
    """An experience that a guard may end; its position has the guard's state, too.

    Args:
        guard: restored from `position`.
        position: what `position` gave of the batches that were learned from; None: nothing was.
        pending: see `AgentExperience`.
    """

    def __init__(
        self,
        order: Any,
        playing: Playing,
        counts: Callable[[], dict[str, float]],
        guard: RewriteGuard,
        *,
        position: Any = None,
        pending: Sequence[Any] = (),
    ) -> None:
        self._guard = guard
        if position:
            guard.restore(position[_GUARD])
        done = int(position[_BATCHES]) if position else 0
        super().__init__(order, playing, counts, done, pending=pending)

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        """See `AgentExperience`.

        Raises:
            EndedEarly: the guard ends the training.
            Stopped: as there.
        """
        if self._guard.ended:
            raise EndedEarly(self._guard.ended)
        return super().next(state, number, stop)

    def position(self) -> tuple[Any, list[Any]]:
        """See `AgentExperience`."""
        batches, pending = super().position()
        return {_BATCHES: batches, _GUARD: self._guard.state()}, pending
