"""Scores a DeepRetrieval run on its test queries, beside all that it should be better than.

Beside the checkpoint are: the weights at the end of the script (SFT alone), the untrained ones, the
original query, and its words without function words. Each way has a log, which is not played twice,
and a TREC run for each collection. Rankings are scored by trec_eval's own code, with intervals by
the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.data.files.queries import read_query_list
from qrag_jax.data.generators.dropped_words import content_words
from qrag_jax.environments.query_rewriting.output import REWRITTEN, TAGGED
from qrag_jax.environments.query_rewriting.prompt import prompt_kind
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.environments.tools.episode import Document
from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_comparison, rewrite_log
from qrag_jax.evaluators.rewrite_comparison import compared, way_scores
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row, searched_row, shape_of_rows
from qrag_jax.feedback.llm import FeedbackLost
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics import trec
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import NAME, PPO, RL, SCRIPT, RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import (
    SEARCH,
    IfThere,
    agent_of,
    fingerprint,
    listed_inputs,
    load_inputs,
)
from qrag_jax.systems.lm_card import ExportedSystem, Fields, Scores
from qrag_jax.systems.query_search import OWN
from qrag_jax.systems.saved_token_run import (
    SavedWeights,
    Weights,
    digest_of_weights,
    mesh_of_run,
)
from qrag_jax.systems.scoring import (
    NOT_KEPT,
    PREDICTED,
    PlayedParts,
    ScoreOptions,
    Way,
    WayLogs,
    are_others,
    write_summary,
)

TABLE, RUNS, QRELS = "table.txt", "trec", "qrels.txt"
OF_QUERIES = ("queries.", "search.")
KIND = "queries of a rewriter"  # in the record beside a file
POOLED = "all collections"
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "writing", "sampling", "seed")


def score_rewriter(workdir: Path, given: ConfigDict, options: ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint on `config.queries.test`; returns the summary."""
    given = given.copy_and_resolve_references()
    out = options.out or workdir / "eval"
    others = are_others(workdir, given, OF_QUERIES, options.out)
    search = out / SEARCH if others else None
    with open_rewriter(given, workdir, samples=options.samples, search=search) as rewriter:
        system, tasks, stop = rewriter.system, rewriter.tasks, rewriter.stop
        ways = Ways(system, tasks, stop).all(options.checkpoint)
        logs = WayLogs(
            out,
            rewrite_log.LOG,
            read=lambda path: _whole(path, tasks),
            record=lambda way: _record(way, system, tasks, given),
        )
        rows, notes = logs.played(ways, stop, restart=options.restart)
        config = system.config
    named = {way.told: way.name for way in ways}
    notes += _write_runs(out / RUNS, tasks, {named[told]: own for told, own in rows.items()})
    main = ways[0].told
    found = _compared(tasks, rows, main, config)
    models = {way.told for way in ways if way.by_model}
    shapes = {told: shape_of_rows(tasks, own) for told, own in rows.items() if told in models}
    text = _table(found, shapes, main, config)
    text += [f"note: {note}" for note in notes]
    about = {"main": main, "best_by": config.eval.best_by, "shapes": shapes, "notes": notes}
    found = write_summary(out, given, found | about)
    write_whole(out / TABLE, "\n".join(text) + "\n")
    print("\n".join(text))
    print(f"logs, runs and summary: {out}")
    return found


def drawn(tasks: Sequence[RewriteTask], samples: int, seed: int) -> list[RewriteTask]:
    """So many of the queries, in their order; 0: all."""
    order = np.random.default_rng(seed).permutation(len(tasks))[: samples or len(tasks)]
    return [tasks[number] for number in sorted(order.tolist())]


@dataclasses.dataclass(frozen=True)
class Ways:
    """All ways to write some queries.

    Attributes:
        system: the run's.
        tasks: the queries.
        stop: looked at while they are played.
    """

    system: DeepRetrieval
    tasks: Sequence[RewriteTask]
    stop: StopSignal

    def all(self, checkpoint: str) -> list[Way[RewriteRow]]:
        """The ways, the run's own first.

        Args:
            checkpoint: "best" or "last".
        """
        config, saved = self.system.config, SavedWeights(self.system)
        own, end = saved.checkpoint(checkpoint), config.first_steps

        def imitated() -> list[RewriteRow] | str:
            if not {SCRIPT, RL} <= {*config.stages}:
                return f"the run has the stage {config.stages[0]} alone"
            if own.step == end:
                return f"the {checkpoint} checkpoint is that of its end"
            kept = saved.after(end)
            return NOT_KEPT if kept is None else self._by(kept)

        def without_function_words() -> list[RewriteRow]:
            queries = [task.question for task in self.tasks]
            # A query that has none but function words stays as it is.
            return self._searched([" ".join(content_words(each)) or each for each in queries])

        return [
            Way(own.name, own.told, lambda: self._by(own.params), by=digest_of_weights(own.params)),
            Way(f"script-{end}", f"SFT alone, step {end}", imitated),
            Way("untrained", "untrained", lambda: self._by(self.system.untrained)),
            Way(
                "original",
                "original query",
                lambda: self._searched([task.question for task in self.tasks]),
                by_model=False,
            ),
            Way("content_words", "without function words", without_function_words, by_model=False),
        ]

    def _by(self, params: Any) -> list[RewriteRow]:
        """Rewritings by these weights."""
        system, config = self.system, self.system.config
        episodes = system.play(params, self.tasks, self.stop, greedy=config.eval.greedy)
        speech, form = system.inputs.speech, config.writing.kind.form
        return [
            played_row(task, episode, speech, form)
            for task, episode in zip(self.tasks, episodes, strict=True)
        ]

    def _searched(self, queries: Sequence[str]) -> list[RewriteRow]:
        """What queries find; searches that fail are repeated."""
        system, rules = self.system, self.system.config.rollout
        depth = system.config.eval.depth
        found: list[tuple[Document, ...] | Failure] = [Failure("connection", "", 0)] * len(queries)
        failed = [*range(len(queries))]
        for _ in range(rules.attempts):
            self.stop.check()
            again = [self.tasks[n] for n in failed], depth, [queries[n] for n in failed]
            for number, each in zip(failed, system.episodes.searched(*again), strict=True):
                found[number] = each
            failed = [n for n, each in enumerate(found) if isinstance(each, Failure)]
            if not failed:
                break
        if len(failed) > rules.max_failed_share * len(queries):
            first = found[failed[0]]
            assert isinstance(first, Failure)
            raise FeedbackLost(
                f"{len(failed)} of {len(queries)} searches failed, for example: "
                f"{first.message.rstrip('.')}; config.rollout.max_failed_share allows "
                f"{rules.max_failed_share:g}"
            )
        return [searched_row(*each) for each in zip(self.tasks, queries, found, strict=True)]


def _record(
    way: Way[RewriteRow], system: DeepRetrieval, tasks: Sequence[RewriteTask], given: ConfigDict
) -> dict[str, Any]:
    """All that the rows of a way depend on."""
    data, every = system.inputs.data, json.loads(json.dumps(given.to_dict()))
    record = {
        "way": way.name,
        "by": way.by,
        "queries": fingerprint(tasks),
        "corpus": data["search"],
        "search": every["search"],
        "depth": system.config.eval.depth,
    }
    if way.by_model:
        record |= {name: every[name] for name in _OF_PLAY}
        record |= {"of_model": data["model"], "of_prompt": data["prompt"]}
        record["greedy"] = every["eval"]["greedy"]
    return record


def _whole(path: Path, tasks: Sequence[RewriteTask]) -> list[RewriteRow]:
    rows = rewrite_log.read(path)
    if not rewrite_log.of_queries(rows, [(task.collection, task.id) for task in tasks]):
        raise InputError(f"{path} has other queries; give --restart to throw it away.")
    return rows


def _compared(
    tasks: Sequence[RewriteTask],
    rows: Mapping[str, Sequence[RewriteRow]],
    main: str,
    config: RewriteConfig,
) -> dict[str, Any]:
    """`pooled` over all queries, and `collections`, each by its name."""
    ways = {told: way_scores(tasks, own, config.eval.measures) for told, own in rows.items()}
    places: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        places.setdefault(task.collection or OWN, []).append(number)

    def on(numbers: Sequence[int]) -> dict[str, Any]:
        return compared(ways, main, np.array(numbers), config.eval.best_by)

    return {
        "pooled": on(range(len(tasks))),
        "collections": {name: on(numbers) for name, numbers in places.items()},
    }


def _table(
    found: Mapping[str, Any],
    shapes: Mapping[str, Mapping[str, float | None]],
    main: str,
    config: RewriteConfig,
) -> list[str]:
    every, by = dict(found["collections"]), config.eval.best_by
    if len(every) > 1:
        every[POOLED] = found["pooled"]
    text: list[str] = []
    for name, own in every.items():
        text += [*rewrite_comparison.lines(name, own, main, by), ""]
    return [*text, "what the models write:", *rewrite_comparison.shape_lines(shapes), ""]


def _write_runs(
    folder: Path, tasks: Sequence[RewriteTask], rows: Mapping[str, Sequence[RewriteRow]]
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
            trec.write_qrels(to / QRELS, {tasks[n].id: dict(tasks[n].grades) for n in own})
            for name, each in rows.items():
                run = {
                    each[n].id: {doc: 1 / rank for rank, doc in enumerate(each[n].ranking, 1)}
                    for n in own
                }
                trec.write_run(to / f"{name}.run", run, name)
        except InputError as error:
            notes.append(str(error))
    return notes


@dataclasses.dataclass(frozen=True)
class Rewriter:
    """Rewrites with the model of one run.

    Attributes:
        given: the config.
        system: the run's.
        tasks: the queries.
        stop: looked at between parts.
    """

    given: ConfigDict
    system: DeepRetrieval
    tasks: Sequence[RewriteTask]
    stop: StopSignal

    def weights(self, which: str) -> Weights | None:
        """The weights of "best", "last", "first" or "sft".

        "sft" are those at the end of the script. None: nothing followed the script, or its end is
        not kept.
        """
        config = self.system.config
        ends = config.first_steps if {SCRIPT, RL} <= {*config.stages} else 0
        return SavedWeights(self.system).named(which, ends, "SFT alone")

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> list[RewriteRow]:
        """Rewrites all queries that the file lacks; returns all rows. See `PlayedParts`."""
        size = self.system.config.train.batch_size  # as in training, whose memory suffices
        parts = PlayedParts(
            rows=rewrite_log.LOG,
            asked=self.tasks,
            size=size,
            play=lambda tasks, first: self._played(
                weights.params, tasks, PREDICTED + first // size
            ),
            is_of=lambda row, task: (row.collection, row.id) == (task.collection, task.id),
            names=("query", "queries"),
        )
        parts.into(log, self._record(weights), self.stop, restart=restart)
        return rewrite_log.read(log)

    def _record(self, weights: Weights) -> dict[str, Any]:
        """All that the rows depend on."""
        inputs, every = self.system.inputs, json.loads(json.dumps(self.given.to_dict()))
        return {
            "kind": KIND,
            "checkpoint": weights.told,
            "queries": fingerprint(self.tasks),
            "data": {name: inputs.data[name] for name in ("model", "prompt")},
            "searched": sorted({inputs.library.library.digest(task) for task in self.tasks}),
            "weights": digest_of_weights(weights.params),
            "greedy": self.system.config.eval.greedy,
            "depth": self.system.config.eval.depth,
            **{name: every[name] for name in ("search", *_OF_PLAY)},
        }

    def _played(self, params: Any, tasks: Sequence[RewriteTask], stream: int) -> list[RewriteRow]:
        system, config = self.system, self.system.config
        episodes = system.player.on_device(
            params,
            system.player.starts(tasks, 1, stream),
            self.stop,
            greedy=config.eval.greedy,
            agent=agent_of(config, config.eval.depth),
        )
        library, speech = system.inputs.library.library, system.inputs.speech
        rows = []
        for task, episode in zip(tasks, episodes, strict=True):
            row = played_row(task, episode, speech, config.writing.kind.form)
            missing = isinstance(library, IfThere) and not library.has(task)
            found = None if row.failed or missing else row.found
            rows.append(dataclasses.replace(row, found=found))
        return rows


def rewritten_lines(rows: Sequence[RewriteRow]) -> list[str]:
    """What people are told of finished rows: how many have no query, failed or searched nothing."""
    unread = Counter(row.outcome for row in rows if row.outcome != REWRITTEN and not row.failed)
    failed = sum(row.failed for row in rows)
    unsearched = sum(row.found is None for row in rows) - failed
    told = []
    if unread:
        parts = ", ".join(f"{count} {outcome}" for outcome, count in unread.most_common())
        told.append(f"{sum(unread.values())} of them without a query to search for: {parts}")
    if failed:
        told.append(f"{failed} searches failed; what they would have found is not known")
    if unsearched:
        told.append(
            f"{unsearched} queries were not searched for: the run does not have their collection"
        )
    return told


@contextlib.contextmanager
def open_rewriter(
    given: ConfigDict,
    workdir: Path,
    *,
    queries: Path | None = None,
    samples: int = 0,
    search: Path | None = None,
) -> Iterator[Rewriter]:
    """Opens the model of a run, and the queries to rewrite.

    Args:
        given: the config.
        workdir: the run's folder.
        queries: a file of them, see `data.files.query_lists`; None: `config.queries.test`.
        samples: so many of them; 0: all.
        search: folder of the collections of other queries; None: the run's own.
    """
    config = RewriteConfig.of(given)
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        if queries is not None:
            inputs = listed_inputs(config, workdir, mesh, read_query_list(queries))
        else:
            inputs = load_inputs(
                config, workdir, mesh, test=config.queries.test, trains=False, search=search
            )
        tasks = drawn(inputs.test, samples, config.eval.seed)
        yield Rewriter(given, DeepRetrieval(config, mesh, inputs, workdir), tasks, stop)


def search_beside(
    workdir: Path, given: ConfigDict, queries: Path | None, out: Path | None
) -> Path | None:
    """The folder of the collections of other queries than the run's; None: the run's own.

    Args:
        queries: a file of them; None: those of the config.
        out: the file that is named for what is written; None: none is.
    """
    if queries is not None:
        if out is None:
            raise InputError(
                "the queries of --questions are not the run's own; give the file to write, for "
                "example --out=rewritten.jsonl."
            )
        return None
    others = are_others(workdir, given, OF_QUERIES, out, "rewritten.jsonl")
    return out.with_suffix(f".{SEARCH}") if out and others else None


def _told(fields: Fields) -> str:
    writing, queries = fields["writing"], fields["queries"]
    kind = prompt_kind(writing["prompt"], writing["form"], boolean=writing["boolean"])
    writes = (
        '`<think>…</think><answer>{"query": "…"}</answer>`'
        if kind.form == TAGGED
        else "the query alone"
    )
    told = (
        f"Its prompt is `config.writing.prompt={writing['prompt']}`, and its output is {writes}. "
        f"It was trained on `config.queries.train={queries['train']}`."
    )
    if RL in fields["stages"] and fields["algorithm"] == PPO and fields["ppo"]["critic"] != NONE:
        told += " PPO's critic, with its value head, is not part of this model."
    return told


def _scores(summary: Fields, checkpoint: str) -> Scores:
    found = dict(summary["collections"])
    if len(found) > 1:
        found[POOLED] = summary["pooled"]
    return {
        f"{name}, {own['scored']} queries": {
            measure: each["mean"] for measure, each in own["scores"][checkpoint].items()
        }
        for name, own in found.items()
        if checkpoint in own["scores"]
    }


DEEPRETRIEVAL = ExportedSystem(
    name=NAME,
    title="DeepRetrieval",
    learned="rewrite search queries",
    read=RewriteConfig.of,
    told=_told,
    scored="collection",
    scores=_scores,
    private=("engine.email", "engine.url", "llm.url"),
)
