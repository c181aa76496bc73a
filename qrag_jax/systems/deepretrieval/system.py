"""DeepRetrieval (arXiv 2503.00223): a language model learns to rewrite queries by what they find.

One query in, one rewritten query out; a search of it, in any engine, gives the reward. The model
learns by PPO with a critic, or by GRPO. Imitation of scripted rewritings may come before.

A run is scored on its test queries next to the weights at the end of the script (SFT alone), the
untrained ones, the original query, and its words without function words. Each way has a log, which
is not played twice, and a TREC run for each collection. Rankings are scored as trec_eval scores
them, with intervals by the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from ml_collections import ConfigDict

from qrag_jax.data.corpora import write_qrels, write_run
from qrag_jax.data.sample import Sample, world
from qrag_jax.environments.episode import Document, Look
from qrag_jax.environments.queries import REWRITTEN, Searched
from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import Evaluation
from qrag_jax.evaluators.token_scores import (
    measured,
    played_row,
    rewrite_evaluation,
    rewrite_gains,
    rewrite_summary,
    searched_row,
    shape_lines,
    shape_of_rows,
)
from qrag_jax.feedback import rewrite
from qrag_jax.learners.state import TrainState
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import one_line
from qrag_jax.metrics.bootstrap import columns_of, means, score_table
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.rollouts.experience import AgentExperience, Experience
from qrag_jax.rollouts.libraries import Collections
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_episodes import Episode, facts_of
from qrag_jax.rollouts.trajectories import REWARD, TokenTrajectory
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.runtime.run import Run, log
from qrag_jax.systems import scoring, token_system
from qrag_jax.systems.deepretrieval import inputs as of_queries
from qrag_jax.systems.deepretrieval.config import RL, SCRIPT, RewriteConfig
from qrag_jax.systems.deepretrieval.inputs import load_inputs
from qrag_jax.systems.scoring import Logs, Predictor, ScoreOptions, Way
from qrag_jax.systems.search import OWN

RUNS, QRELS = "trec", "qrels.txt"
POOLED = "all collections"
_BY_RULE = ("original", "content_words")  # logs of queries that no model writes
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "writing", "sampling", "seed")
Found = tuple[Document, ...] | Failure


class GuardedExperience(AgentExperience):
    """Its `position` has the state of the guards, too."""

    def __init__(self, beyond: Counter[str], position: Any, **how: Any) -> None:
        position = position or {"batches": 0, "guard": {}}
        self._beyond = beyond
        beyond.update(position["guard"])
        super().__init__(batches=position["batches"], **how)

    def position(self) -> tuple[Any, list[Any]]:
        batches, pending = super().position()
        return {"batches": batches, "guard": dict(self._beyond)}, pending


@dataclasses.dataclass
class DeepRetrieval(token_system.TokenSystem[RewriteConfig]):
    SHOWN: ClassVar[Mapping[str, str]] = {"loss": ".3f", "return": ".3f"}
    SETTINGS, LOAD = RewriteConfig, staticmethod(load_inputs)
    OF_QUESTIONS, SEARCH = ("queries.", "search."), of_queries.SEARCH

    def __post_init__(self) -> None:
        super().__post_init__()
        config, inputs = self.config, self.inputs
        self._shape: dict[str, float] = {}  # of the queries of the last batch
        self._beyond, self._ended = Counter[str](), ""  # of the guards, see `look`
        library, entries = inputs.library.library, {}
        if config.reward.reading_cost and isinstance(library, Collections):
            for name in {task.collection for task in inputs.train}:
                corpus = library.by_name[name].corpus
                entries[name] = rewrite.entries_of(passage.whole for passage in corpus)
        self.reward = rewrite.RewriteReward(config.reward, entries)
        self.turn = config.learned_tokens if config.rollout.query_tokens else 0
        self.line = (
            f"{len(inputs.train)} training queries, {len(inputs.dev)} that choose the best "
            f"checkpoint, searched by {config.search.engine}; {self.steps}, a step of rl by "
            f"{config.algorithm} of {config.groups} queries × {config.rule.members}; {self._where}"
        )

    def experience(self, run: Run, stop: StopSignal) -> Experience:
        self.check_server(stop)
        self._beyond = Counter[str]()
        how: Any = {"order": self.questions, "playing": self.playing(), "counts": self.counted}
        done = run.progress
        return GuardedExperience(self._beyond, done.batches, **how, pending=done.pending)

    def prepare(self, state: TrainState, step: int, stop: StopSignal) -> None:
        if self._ended:
            raise EndedEarly(self._ended)

    def update(self, state: TrainState, episodes: Any) -> tuple[TrainState, dict[str, Any]]:
        """See `System`; guards look at the metrics."""
        stage = self.stage_at(self._updates(state))
        state, metrics = super().update(state, episodes)
        limited = self.config.guards.metrics
        if stage.plan.kind == RL and limited:
            found = {name: metrics[name] for name in limited if name in metrics}
            self.look(self._shape | jax.device_get(found))
        return state, metrics

    def look(self, metrics: Mapping[str, float]) -> None:
        """Guards look at the means of an update; they may end the training before the next one."""
        warning = rewrite.beyond_limits(self.config.guards, self._beyond, metrics)
        if warning and self.config.guards.action != rewrite.TELL:
            self._ended = (
                f"{warning} The training ends here, as config.guards.action says; the best "
                "checkpoint is kept. To continue, raise the limit and give the same command."
            )
        elif warning:
            log(f"guard: {warning}")

    def _sampled(self, stage: token_system.Stage) -> int:
        config = self.config
        return config.writing.query_tokens if stage.plan.kind == SCRIPT else config.learned_tokens

    # ---------------------------------------------------------------- episodes

    def rewarded(
        self, weights: Any, tasks: Any, numbers: Any, keys: Any, stop: Any, **how: Any
    ) -> list[TokenTrajectory]:
        episodes = self.episodes(weights, tasks, keys, stop, turn=self.turn, **how)
        originals, members = self.measures(tasks, stop), keys.shape[1]
        places = [divmod(place, members) for place in range(len(episodes))]
        return [
            self.trajectory(episode, (numbers[n], member), tasks[n], originals[n])
            for episode, (n, member) in zip(episodes, places, strict=True)
        ]

    def trajectory(
        self, episode: Episode, of: tuple[int, int], task: Sample, original: float | Failure
    ) -> TokenTrajectory:
        """A played episode with the parts of its reward; none if it, or the original, failed.

        `of` are the numbers of its query, and of it among the episodes of this query.
        """
        ended, status, parts = episode.ended, episode.status, {}
        if isinstance(original, Failure):
            status = original.cause
        elif isinstance(ended, Searched):
            parts = self.reward.of(task, ended, original)
        facts = facts_of(ended)
        return TokenTrajectory(*of, episode.attempts, episode.segments, status, parts, facts)

    def searched(
        self, tasks: Sequence[Sample], k: int, stop: StopSignal, write: Callable[[str], str] = str
    ) -> list[Found]:
        """What queries by a rule find, best first; few of the searches have failed.

        `write` makes a query of a task's own one. Searches that fail are made again.
        """

        def search(some: Sequence[Sample]) -> list[Found]:
            asked = [(task, Look(one_line(write(task.question)), k)) for task in some]
            found: dict[int, Found] = {}
            left: Sequence[int] = range(len(some))
            for _ in range(self.config.rollout.attempts):
                found |= zip(left, self.inputs.library.look([asked[n] for n in left]), strict=True)
                left = [place for place in left if isinstance(found[place], Failure)]
            return [found[place] for place in range(len(some))]

        return self.patience(stop, Failure).play(tasks, search) if tasks else []

    def measures(self, tasks: Sequence[Sample], stop: StopSignal) -> list[float | Failure]:
        """The reward's measure of what each task's original query finds."""
        return [
            result if isinstance(result, Failure) else self.reward.measure(task, result)
            for task, result in zip(tasks, self.searched(tasks, self.config.reward.k, stop))
        ]

    def shape_of(self, trajectories: Sequence[TokenTrajectory]) -> dict[str, float]:
        """Means of the guards' measures of the queries, and of the parts of rewards."""
        shapes = []
        for each in trajectories:
            if query := each.facts.get("answer"):
                task = self.inputs.train[each.question]
                shapes.append(rewrite.guard_measures(task.question, query, task.answers))
        parts = means(columns_of(each.parts for each in trajectories)).items()
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
        tasks: Sequence[Sample],
        stop: StopSignal,
        stream: int = token_system.EVALUATED,
    ) -> list[RewriteRow]:
        """Plays queries for evaluation, by the draws of a stream, as deep as its measures need."""
        config, speech = self.config, self.inputs.speech
        agent, greedy = of_queries.agent_of(config, config.eval.depth), config.eval.greedy
        keys = self.keys(stream, len(tasks), 1)
        episodes = self.episodes(params, tasks, keys, stop, greedy=greedy, agent=agent)
        form = config.writing.kind.form
        return [played_row(*each, speech, form) for each in zip(tasks, episodes, strict=True)]

    def rows_by_rule(
        self, tasks: Sequence[Sample], stop: StopSignal, write: Callable[[str], str] = str
    ) -> list[RewriteRow]:
        """Those of queries that a rule writes, see `searched`."""
        found = self.searched(tasks, self.config.eval.depth, stop, write)
        return [searched_row(task, write(task.question), f) for task, f in zip(tasks, found)]

    def evaluate(self, state: TrainState, step: int, stop: StopSignal) -> Evaluation:
        settings, tasks = self.config.eval, self.inputs.dev
        rows = self.rows(state.params, tasks, stop)
        stop.check()
        originals = self.rows_by_rule(tasks, stop)
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

    # ---------------------------------------------------------------- a run is scored

    def plays(self, raw: ConfigDict, options: ScoreOptions, stop: StopSignal) -> dict[str, Any]:
        config, inputs, every = self.config, self.inputs, raw.to_dict()
        library, tasks = inputs.library.library, inputs.test

        def rows(
            params: Any, asked: Sequence[Sample], stop: StopSignal, stream: int
        ) -> list[RewriteRow]:
            played = self.rows(params, asked, stop, stream)
            known = [not isinstance(library, Collections) or library.has(task) for task in asked]
            return [
                row if there and not row.failed else dataclasses.replace(row, found=None)
                for row, there in zip(played, known, strict=True)
            ]

        record = {name: every[name] for name in ("search", *_OF_PLAY)} | {
            "queries": of_queries.digest_of(tasks),
            "greedy": config.eval.greedy,
            "depth": config.eval.depth,
            "data": {name: inputs.data[name] for name in ("model", "prompt")},
            "searched": sorted({library.digest(task) for task in tasks}),
        }
        # As many in a part as in training, whose memory suffices
        size = 0 if options.as_training else config.train.batch_size
        play = token_system.in_parts(rows, size, stop)
        return {"rows": REWRITES, "asked": tasks, "size": size, "play": play, "record": record}

    def ways(self, predictor: Predictor) -> Iterator[Way]:
        yield from map(predictor.way, predictor.ways(predictor.options.checkpoint))
        # A query that has none but function words stays as it is.
        words = world("sentences.py").content_words
        rules: list[tuple[str, Callable[[str], str]]] = [
            ("original query", str),
            ("without function words", lambda query: " ".join(words(query)) or query),
        ]

        def ruled(write: Any, tasks: Sequence[Sample], _: int) -> list[RewriteRow]:
            return self.rows_by_rule(tasks, predictor.stop, write)

        for name, (label, write) in zip(_BY_RULE, rules, strict=True):
            yield Way(name, label, partial(ruled, write), predictor.record)

    def summary(self, found: Logs, out: Path) -> tuple[dict[str, Any], list[str]]:
        tasks, settings, main = self.inputs.test, self.config.eval, found[0][0]
        rows = {label: REWRITES.read(log) for label, log in found}
        notes = _write_runs(out / RUNS, tasks, {log.stem: rows[label] for label, log in found})
        summary, text = _compared(tasks, rows, main, settings.measures)
        by_model = [label for label, log in found if log.stem not in _BY_RULE]
        shapes = {label: shape_of_rows(tasks, rows[label]) for label in by_model}
        text += ["what the models write:", *shape_lines(shapes), ""]
        about = {"main": main, "best_by": settings.best_by, "shapes": shapes, "notes": notes}
        return summary | about, text


def _compared(
    tasks: Sequence[Sample],
    rows: Mapping[str, Sequence[RewriteRow]],
    main: str,
    measures: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """`pooled` over all queries, and `collections`, each by its name; and their tables."""
    ways = {label: measured(own, measures) for label, own in rows.items()}
    places: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        places.setdefault(task.collection or OWN, []).append(number)
    every, text = dict[str, dict[str, Any]](), list[str]()
    for name, numbers in (places | {POOLED: [*range(len(tasks))]}).items():
        own = {
            label: {measure: column[numbers] for measure, column in columns.items()}
            for label, columns in ways.items()
        }
        every[name] = scoring.compared(own, main, rewrite_summary, rewrite_gains)
        if name != POOLED or len(places) > 1:
            gains = ((f"gain over {way}", gain) for way, gain in every[name]["gains"].items())
            counts = {"failed": "{failed} of {queries}"}
            scores = every[name]["scores"].items()
            text += [f"{name}:", *score_table(scores, measures, counts, gains), ""]
    return {"pooled": every.pop(POOLED), "collections": every}, text


def _write_runs(
    folder: Path, tasks: Sequence[Sample], rows: Mapping[str, Sequence[RewriteRow]]
) -> list[str]:
    """Each way's rankings and the judgements as TREC has them, a folder for each collection.

    The scores in a run are 1 / rank: trec_eval would order documents of equal scores by their
    names. Queries whose search failed are not in it, nor are those that found nothing.

    Returns:
        Why files are missing, a sentence each.
    """
    notes = []
    for collection in dict.fromkeys(task.collection for task in tasks):
        own = [n for n, task in enumerate(tasks) if task.collection == collection]
        to, ids = folder / (collection or OWN), [tasks[n].id for n in own]
        if len({*ids}) < len(ids):
            notes.append(f"{to} is not written: two queries have one id")
            continue
        try:
            write_qrels(to / QRELS, {tasks[n].id: dict(tasks[n].grades) for n in own})
            for name, each in rows.items():
                run = {
                    each[n].id: {doc: 1 / rank for rank, doc in enumerate(each[n].ranking, 1)}
                    for n in own
                }
                write_run(to / f"{name}.run", run, name)
        except InputError as error:
            notes.append(str(error))
    return notes


def rewritten_lines(rows: Sequence[RewriteRow]) -> list[str]:
    """Describes finished rows that were not searched for, a line a reason."""
    lacking = "in a collection that the run does not have"
    reasons = Counter(
        f"failed ({row.outcome})" if row.failed else lacking if row.found is None else row.outcome
        for row in rows
        if row.failed or row.found is None or row.outcome != REWRITTEN
    )
    return [f"{count} without results: {reason}" for reason, count in reasons.most_common()]


SYSTEM = DeepRetrieval
open_system = partial(token_system.open_token_system, DeepRetrieval)
score_run = partial(scoring.score_language_model, DeepRetrieval)
before_devices, check = RewriteConfig.before_devices, RewriteConfig.of
