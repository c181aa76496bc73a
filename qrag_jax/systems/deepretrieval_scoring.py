"""Scores a DeepRetrieval run on its test queries, beside all that it should be better than.

See `deepretrieval_ways` for the ways that are compared. Each has a log, which is not made twice,
and a TREC run for each collection. Rankings are scored by trec_eval's own code, with intervals by
the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_comparison, rewrite_log
from qrag_jax.evaluators.rewrite_comparison import compared, way_scores
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import best_rows, shape_of_rows
from qrag_jax.metrics import trec
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import SEARCH, fingerprint, load_inputs
from qrag_jax.systems.deepretrieval_ways import BEST, Ways
from qrag_jax.systems.own_questions import are_others
from qrag_jax.systems.rewrite_search import OWN
from qrag_jax.systems.saved_token_run import mesh_of_run
from qrag_jax.systems.scored_ways import Way, WayLogs, WayOptions

SUMMARY, TABLE, RUNS, QRELS = "summary.json", "table.txt", "trec", "qrels.txt"
OF_QUERIES = ("queries.", "search.")
POOLED = "all collections"
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "writing", "sampling", "seed")


def score_rewriter(workdir: Path, given: ConfigDict, options: WayOptions) -> dict[str, Any]:
    """Scores the run's checkpoint on `config.queries.test`; returns the summary.

    Raises:
        InputError: the run, its checkpoint or the queries cannot be used, or a log is of other
            settings.
        Stopped: a signal came; the same command goes on with the ways that are left.
        FeedbackLost: too many searches fail.
    """
    given = given.copy_and_resolve_references()
    out = options.out or workdir / "eval"
    others = are_others(workdir, given, OF_QUERIES, out=options.out)
    search = out / SEARCH if others else None
    with _opened(given, workdir, search) as (system, stop):
        tasks = drawn(system.inputs.test, options.samples, system.config.eval.seed)
        ways = Ways(system, tasks, stop).all(options.checkpoint)
        logs = WayLogs(
            out,
            rewrite_log.LOG,
            read=lambda path, way: _whole(path, tasks, way.draws),
            record=lambda way: _record(way, system, tasks, given),
        )
        rows, notes = logs.played(ways, stop, restart=options.restart)
        config = system.config
    if BEST in rows:
        rows[BEST] = best_rows(tasks, rows[BEST], config.eval.best_by)
    named = {way.told: way.name for way in ways}
    notes += _write_runs(out / RUNS, tasks, {named[told]: own for told, own in rows.items()})
    main = ways[0].told
    found = _compared(tasks, rows, main, config)
    models = {way.told for way in ways if way.by_model}
    shapes = {told: shape_of_rows(tasks, own) for told, own in rows.items() if told in models}
    text = _table(found, shapes, main, config)
    text += [f"note: {note}" for note in notes]
    found |= {
        "main": main,
        "best_by": config.eval.best_by,
        "oracles": [BEST],
        "shapes": shapes,
        "notes": notes,
        "config": given.to_dict(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    write_whole(out / SUMMARY, json.dumps(found, indent=1) + "\n")
    write_whole(out / TABLE, "\n".join(text) + "\n")
    print("\n".join(text))
    print(f"logs, runs and summary: {out}")
    return found


def drawn(tasks: Sequence[RewriteTask], samples: int, seed: int) -> list[RewriteTask]:
    """So many of the queries, in their order; 0: all."""
    order = np.random.default_rng(seed).permutation(len(tasks))[: samples or len(tasks)]
    return [tasks[number] for number in sorted(order.tolist())]


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


def _whole(path: Path, tasks: Sequence[RewriteTask], draws: int) -> list[RewriteRow]:
    rows = rewrite_log.read(path)
    keys = [(task.collection, task.id) for task in tasks for _ in range(draws)]
    if not rewrite_log.of_queries(rows, keys):
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
        return compared(ways, main, np.array(numbers), config.eval.best_by, [BEST])

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


@contextlib.contextmanager
def _opened(
    given: ConfigDict, workdir: Path, search: Path | None
) -> Iterator[tuple[DeepRetrieval, StopSignal]]:
    config = RewriteConfig.of(given)
    mesh = mesh_of_run(config, workdir)
    with StopSignal() as stop:
        inputs = load_inputs(
            config, workdir, mesh, test=config.queries.test, trains=False, search=search
        )
        yield DeepRetrieval(config, mesh, inputs, workdir), stop
