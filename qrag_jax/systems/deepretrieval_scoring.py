"""Scores a DeepRetrieval run on its test queries, beside all that it should be better than.

Beside the checkpoint are: the weights at the end of the script (SFT alone), the untrained ones, the
original query, and its words without function words. Each way has a log, which is not played twice,
and a TREC run for each collection. Rankings are scored as trec_eval scores them, with intervals by
the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.corpora import read_query_list, write_qrels, write_run
from qrag_jax.data.scripted import world
from qrag_jax.environments.queries import REWRITTEN, RewriteTask
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.evaluators.token_scores import (
    measured,
    rankings_of,
    rewrite_gains,
    rewrite_summary,
    searched_row,
    shape_lines,
    shape_of_rows,
)
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.bootstrap import score_table
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import deepretrieval_inputs, scoring
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.search import OWN, Collections
from qrag_jax.systems.token_system import EVALUATED

RUNS, QRELS = "trec", "qrels.txt"
OF_QUERIES = ("queries.", "search.")
POOLED = "all collections"
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "writing", "sampling", "seed")


def score_rewriter(workdir: Path, raw: ConfigDict, options: scoring.ScoreOptions) -> dict[str, Any]:
    """Scores the run's checkpoint on `config.queries.test`; returns the summary."""
    raw = raw.copy_and_resolve_references()
    out = options.out or workdir / "eval"
    others = scoring.are_others(workdir, raw, OF_QUERIES, options.out)
    raw.eval.samples = options.samples
    search = out / deepretrieval_inputs.SEARCH if others else None
    with open_rewriter(raw, workdir, search=search, scores=True) as rewriter:
        ways, config = _ways(rewriter, options.checkpoint), rewriter.system.config
        found, notes = rewriter.questions.played(
            out, ways, {}, rewriter.stop, restart=options.restart
        )
    tasks, main = rewriter.questions.asked, found[0][0].label
    rows = {way: REWRITES.read(log) for way, log in found}
    notes += _write_runs(out / RUNS, tasks, {way.name: own for way, own in rows.items()})
    summary, text = _compared(
        tasks, {way.label: own for way, own in rows.items()}, main, config.eval.measures
    )
    shapes = {way.label: shape_of_rows(tasks, own) for way, own in rows.items() if way.by_model}
    text += ["what the models write:", *shape_lines(shapes), ""]
    about = {"main": main, "best_by": config.eval.best_by, "shapes": shapes, "notes": notes}
    return scoring.end_scoring(out, raw, summary | about, text)


def _ways(rewriter: scoring.Predictor, checkpoint: str) -> Iterator[scoring.Way[RewriteRow]]:
    """All ways to write these queries, the run's own first."""
    yield from map(rewriter.way, rewriter.ways(checkpoint))
    system, config = rewriter.system, rewriter.system.config

    def written(name: str, label: str, write: Callable[[str], str]) -> scoring.Way[RewriteRow]:
        def play(_: Any, tasks: Sequence[RewriteTask], first: int) -> list[RewriteRow]:
            queries = [write(task.question) for task in tasks]
            found = system.searched(tasks, config.eval.depth, queries)
            failed = [each for each in found if isinstance(each, Failure)]
            most = config.rollout.max_failed_share
            if len(failed) > most * len(queries):
                raise FeedbackLost(
                    f"{len(failed)} of {len(queries)} searches failed, for example: "
                    f"{failed[0].message.rstrip('.')}; config.rollout.max_failed_share allows "
                    f"{most:g}"
                )
            return [searched_row(*each) for each in zip(tasks, queries, found, strict=True)]

        return scoring.Way(name, label, play, record=rewriter.record, by_model=False)

    yield written("original", "original query", str)
    # A query that has none but function words stays as it is.
    label, content_words = "without function words", world("sentences.py").content_words
    yield written("content_words", label, lambda query: " ".join(content_words(query)) or query)


def _compared(
    tasks: Sequence[RewriteTask],
    rows: Mapping[str, Sequence[RewriteRow]],
    main: str,
    measures: Sequence[str],
) -> tuple[dict[str, Any], list[str]]:
    """`pooled` over all queries, and `collections`, each by its name; and their tables."""
    ways = {label: measured(tasks, rankings_of(own), measures) for label, own in rows.items()}
    places: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        places.setdefault(task.collection or OWN, []).append(number)
    every, text = dict[str, dict[str, Any]](), list[str]()
    for name, numbers in (places | {POOLED: [*range(len(tasks))]}).items():
        own = {
            label: {measure: column[numbers] for measure, column in columns.items()}
            for label, columns in ways.items()
        }
        every[name] = scoring.beside(own, main, rewrite_summary, rewrite_gains)
        if name != POOLED or len(places) > 1:
            gains = ((f"gain over {way}", gain) for way, gain in every[name]["gains"].items())
            counts = {"failed": "{failed} of {queries}"}
            scores = every[name]["scores"].items()
            text += [f"{name}:", *score_table(scores, measures, counts, gains), ""]
    return {"pooled": every.pop(POOLED), "collections": every}, text


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


@contextlib.contextmanager
def open_rewriter(
    raw: ConfigDict,
    workdir: Path,
    *,
    queries: Path | None = None,
    search: Path | None = None,
    scores: bool = False,
) -> Iterator[scoring.Predictor]:
    """Opens the model of a run, and the queries to rewrite.

    Args:
        queries: a file of them, see `data.corpora`; None: `config.queries.test`.
        search: folder of the collections of other queries; None: the run's own.
        scores: all are asked at once, by the draws of the evaluations of the training.
    """
    config = RewriteConfig.of(raw)
    mesh, every = scoring.mesh_of_run(config, workdir), raw.to_dict()
    size = config.train.batch_size  # as in training, whose memory suffices
    with StopSignal() as stop:
        if queries is not None:
            inputs = deepretrieval_inputs.listed_inputs(
                config, workdir, mesh, read_query_list(queries)
            )
        else:
            inputs = deepretrieval_inputs.load_inputs(
                config, workdir, mesh, trains=False, search=search
            )
        system, library = DeepRetrieval(config, mesh, inputs, workdir), inputs.library.library
        tasks = inputs.test

        def play(params: Any, asked: Sequence[RewriteTask], first: int) -> list[RewriteRow]:
            stream = EVALUATED if scores else scoring.PREDICTED + first // size
            rows = system.rows(params, asked, stop, stream)
            known = [not isinstance(library, Collections) or library.has(task) for task in asked]
            return [
                row if there and not row.failed else dataclasses.replace(row, found=None)
                for row, there in zip(rows, known, strict=True)
            ]

        asked: scoring.Questions[RewriteTask, RewriteRow] = scoring.Questions(
            REWRITES,
            tasks,
            lambda row, task: (row.collection, row.id) == (task.collection, task.id),
            0 if scores else size,
            names=("query", "queries"),
        )
        record = {name: every[name] for name in ("search", *_OF_PLAY)} | {
            "queries": deepretrieval_inputs.digest_of(tasks),
            "greedy": config.eval.greedy,
            "depth": config.eval.depth,
            "data": {name: inputs.data[name] for name in ("model", "prompt")},
            "searched": sorted({library.digest(task) for task in tasks}),
        }
        yield scoring.Predictor(system, stop, asked, play, record)
