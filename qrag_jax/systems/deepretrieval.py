"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from qrag_jax.environments.episode import Document, Look
from qrag_jax.environments.queries import RewriteTask, Searched
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.token_scores import REWARD, played_row, rewrite_evaluation
from qrag_jax.feedback import rewrite
from qrag_jax.feedback.rewards import Patience
from qrag_jax.learners.state import TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.rows import RewriteRow
from qrag_jax.rollouts.experience import AgentExperience, Experience, Playing
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_episodes import Episode, Talk, facts_of
from qrag_jax.rollouts.trajectories import TokenTrajectory
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.runtime.run import Run, log
from qrag_jax.systems import token_system
from qrag_jax.systems.deepretrieval_config import RL, SCRIPT, RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import agent_of, load_inputs
from qrag_jax.systems.search import Collections

Found = tuple[Document, ...] | Failure


class GuardedExperience(AgentExperience):
    """An experience that guards may end; its `position` has their state, too."""

    ended = ""  # why the training ends before its next update; "": it goes on

    def __init__(
        self,
        order: Any,
        playing: Playing,
        counts: Any,
        guards: rewrite.GuardsConfig,
        *,
        position: Any = None,
        pending: Sequence[Any] = (),
    ) -> None:
        position = position or {"batches": 0, "guard": {}}
        self._guards, self._beyond = guards, Counter[str](position["guard"])
        super().__init__(order, playing, counts, position["batches"], pending=pending)

    def look(self, metrics: Mapping[str, float]) -> None:
        warning = rewrite.beyond_limits(self._guards, self._beyond, metrics)
        if warning and self._guards.action != rewrite.TELL:
            self.ended = (
                f"{warning} The training ends here, as config.guards.action says; the best "
                "checkpoint is kept. To continue, raise the limit and give the same command."
            )
        elif warning:
            log(f"guard: {warning}")

    def next(self, state: Any, number: int, stop: StopSignal) -> Any:
        if self.ended:
            raise EndedEarly(self.ended)
        return super().next(state, number, stop)

    def position(self) -> tuple[Any, list[Any]]:
        batches, pending = super().position()
        return {"batches": batches, "guard": dict(self._beyond)}, pending


@dataclasses.dataclass
class DeepRetrieval(token_system.BatchSystem[RewriteConfig]):
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".3f"}

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._shape: dict[str, float] = {}  # of the queries of the last batch
        self._experience: GuardedExperience | None = None
        library, entries = inputs.library.library, {}
        if config.reward.reading_cost and isinstance(library, Collections):
            for name in {task.collection for task in inputs.train}:
                corpus = library.by_name[name].corpus
                entries[name] = rewrite.entries_of(passage.whole for passage in corpus)
        self.reward = rewrite.RewriteReward(config.reward, entries)
        self.turn = config.learned_tokens if config.rollout.query_tokens else 0
        # Of original queries, by the whole task: ids are unique within a part of the data alone.
        self._measures: dict[RewriteTask, float] = {}
        self.line = (
            f"{len(inputs.train)} training queries, {len(inputs.dev)} that choose the best "
            f"checkpoint, searched by {config.search.engine}; {self.steps}, a step of rl by "
            f"{config.algorithm} of {config.groups} queries × {config.rule.members}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        self.check_server(stop)
        self._experience = GuardedExperience(
            self.questions,
            self._playing(),
            self.counted,
            self.config.guards,
            position=run.progress.batches,
            pending=run.progress.pending,
        )
        return self._experience

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        """See `System`; guards look at the metrics."""
        stage = self.stage_at(self._updates(state))
        state, metrics = super().update(state, episodes)
        limited = self.config.guards.metrics
        if stage.plan.kind == RL and limited and self._experience is not None:
            found = {name: metrics[name] for name in limited if name in metrics}
            self._experience.look(self._shape | jax.device_get(found))
        return state, metrics

    def _sampled(self, stage: token_system.Stage) -> int:
        config = self.config
        return config.writing.query_tokens if stage.plan.kind == SCRIPT else config.learned_tokens

    # ---------------------------------------------------------------- episodes

    def _demonstration(self, number: int, index: int) -> Talk:
        return self.inputs.script.talk(self.config, self.inputs.agent, number, index)

    def _played(
        self, weights: Any, numbers: Sequence[int], step: int, stop: StopSignal
    ) -> list[TokenTrajectory]:
        members, tasks = self.config.rule.members, [self.inputs.train[n] for n in numbers]
        episodes = self.play(weights, self.starts(tasks, members, step), stop, turn=self.turn)
        originals = self.measures(tasks, self.patience(stop, Failure))
        places = [divmod(place, members) for place in range(len(episodes))]
        return [
            self.trajectory(episode, (numbers[n], member), tasks[n], originals[n])
            for episode, (n, member) in zip(episodes, places, strict=True)
        ]

    def trajectory(
        self, episode: Episode, of: tuple[int, int], task: RewriteTask, original: float | Failure
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it, or the original, failed.

        Args:
            of: numbers of its query, and of it among the episodes of this query.
        """
        ended, status, parts = episode.ended, episode.status, {}
        if isinstance(original, Failure):
            status = original.cause
        elif isinstance(ended, Searched):
            parts = self.reward.of(task, ended, original)
        facts = facts_of(ended)
        return TokenTrajectory(*of, episode.attempts, episode.segments, status, parts, facts)

    def searched(
        self, tasks: Sequence[RewriteTask], k: int, queries: Sequence[str] | None = None
    ) -> list[Found]:
        """What queries find, best first; those that fail are searched for again.

        Args:
            queries: None: the original ones.
        """
        texts = [task.question for task in tasks] if queries is None else queries
        looks = [Look(one_line(text), k) for text in texts]
        found: list[Any] = [None] * len(tasks)
        left: Sequence[int] = range(len(tasks))
        for _ in range(self.config.rollout.attempts if tasks else 0):
            again = self.inputs.library.look([(tasks[n], looks[n]) for n in left])
            for place, result in zip(left, again, strict=True):
                found[place] = result
            if not (left := [place for place in left if isinstance(found[place], Failure)]):
                break
        return found

    def originals(self, tasks: Sequence[RewriteTask], k: int, patience: Patience) -> list[Found]:
        """What each task's original query finds, best first; few of the searches have failed."""
        return patience.play(tasks, lambda some: self.searched(some, k)) if tasks else []

    def measures(self, tasks: Sequence[RewriteTask], patience: Patience) -> list[float | Failure]:
        """The reward's measure of what each task's original query finds; it is kept."""
        new = [task for task in dict.fromkeys(tasks) if task not in self._measures]
        found, failed = self.originals(new, self.config.reward.k, patience), {}
        for task, result in zip(new, found, strict=True):
            if isinstance(result, Failure):
                failed[task] = result
            else:
                self._measures[task] = self.reward.measure(task, result)
        return [failed.get(task) or self._measures[task] for task in tasks]

    def shape_of(self, trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
        """Means of the guards' measures of the queries, and of the parts of rewards."""
        shapes = []
        for each in trajectories:
            if query := each.facts.get("answer"):
                task = self.inputs.train[each.question]
                shapes.append(rewrite.guard_measures(task.question, query, task.answers))
        parts = token_system.means_of_parts(trajectories).items()
        return {
            name: float(np.mean([each[name] for each in shapes])) if shapes else float("nan")
            for name in rewrite.GUARD_MEASURES
        } | {f"train/{name}": mean for name, mean in parts if name != REWARD}

    def _batch(self, stage: token_system.Stage, trajectories: Sequence[TokenTrajectory]) -> Any:
        if stage.plan.kind == RL:
            self._shape = self.shape_of(trajectories)
        return super()._batch(stage, trajectories)

    def rows(
        self,
        params: Any,
        tasks: Sequence[RewriteTask],
        stop: StopSignal,
        stream: int = token_system.EVALUATED,
    ) -> list[RewriteRow]:
        """Plays queries for evaluation; they find as many documents as its measures need.

        Args:
            stream: another one has other draws.
        """
        config, speech = self.config, self.inputs.speech
        agent, greedy = agent_of(config, config.eval.depth), config.eval.greedy
        starts = self.starts(tasks, 1, stream)
        episodes = self.play(params, starts, stop, greedy=greedy, agent=agent)
        form = config.writing.kind.form
        return [played_row(*each, speech, form) for each in zip(tasks, episodes, strict=True)]

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        settings, tasks = self.config.eval, self.inputs.dev
        rows = self.rows(state.params, tasks, stop)
        stop.check()
        found = self.originals(tasks, settings.depth, self.patience(stop, Failure))
        originals = [None if isinstance(e, Failure) else tuple(d.id for d in e) for e in found]
        by: Any = {"measures": settings.measures, "best_by": settings.best_by}
        return rewrite_evaluation(step, tasks, rows, originals=originals, **by)

    def _counted(self, counts: Counts) -> dict[str, float]:
        library = self.inputs.library
        own = np.array([library.searched, library.asked])
        searched, asked = hosts.of_each(own).sum(axis=0).tolist()
        shape = {name: value for name, value in self._shape.items() if not np.isnan(value)}
        return shape | {
            "failed_episodes": float(counts.failed),
            "searches": float(searched),
            "kept_search_share": 1.0 - searched / max(asked, 1),
        }


open_system = partial(token_system.open_token_system, DeepRetrieval, RewriteConfig, load_inputs)
before_devices, check = RewriteConfig.before_devices, RewriteConfig.of
