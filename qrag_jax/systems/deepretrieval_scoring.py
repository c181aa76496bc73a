"""Scores a DeepRetrieval run on its test queries, beside all that it should be better than.

Beside the checkpoint are: the weights at the end of the script (SFT alone), the untrained ones, the
original query, and its words without function words. Each way has a log, which is not played twice,
and a TREC run for each collection. Rankings are scored as trec_eval scores them, with intervals by
the bootstrap; differences are paired by the queries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.queries import read_query_list, write_qrels, write_run
from qrag_jax.data.scripted import content_words
from qrag_jax.environments.queries import REWRITTEN, RewriteTask
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.evaluators import rewrite_scores
from qrag_jax.evaluators.rewrite_scores import (
    compared,
    searched_row,
    shape_of_rows,
    way_scores,
)
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.rows import REWRITES, RewriteRow
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RL, SCRIPT, RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import (
    SEARCH,
    digest_of,
    drawn,
    listed_inputs,
    load_inputs,
)
from qrag_jax.systems.saved_token_run import Predictor, SavedWeights, mesh_of_run
from qrag_jax.systems.scoring import (
    NOT_KEPT,
    PREDICTED,
    Questions,
    ScoreOptions,
    Way,
    are_others,
    end_scoring,
)
from qrag_jax.systems.search import OWN, Collections

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
        system, stop, tasks = rewriter.system, rewriter.stop, rewriter.questions.asked
        ways, config = _ways(system, given, options.checkpoint, stop), system.config
        record = {
            "queries": digest_of(tasks),
            "corpus": system.inputs.data["search"],
            "search": json.loads(json.dumps(given.search.to_dict())),
            "depth": config.eval.depth,
        }
        asked = dataclasses.replace(rewriter.questions, size=0)
        logs, notes = asked.played(out, ways, record, stop, restart=options.restart)
    rows = {way: REWRITES.read(logs[way.name]) for way in ways if way.name in logs}
    notes += _write_runs(out / RUNS, tasks, {way.name: own for way, own in rows.items()})
    main = ways[0].told
    found = _compared(tasks, {way.told: own for way, own in rows.items()}, main, config)
    shapes = {way.told: shape_of_rows(tasks, own) for way, own in rows.items() if way.by_model}
    text = _table(found, shapes, main, config)
    about = {"main": main, "best_by": config.eval.best_by, "shapes": shapes, "notes": notes}
    whole = "".join(f"{line}\n" for line in [*text, *(f"note: {note}" for note in notes)])
    write_whole(out / TABLE, whole)
    return end_scoring(out, given, found | about, text)


def _ways(
    system: DeepRetrieval, given: ConfigDict, checkpoint: str, stop: StopSignal
) -> list[Way[RewriteRow]]:
    """All ways to write these queries, the run's own first."""
    config, saved = system.config, SavedWeights(system)
    own, end = saved.checkpoint(checkpoint), config.imitated
    every, data = json.loads(json.dumps(given.to_dict())), system.inputs.data
    of_model = {name: every[name] for name in _OF_PLAY} | {"greedy": every["eval"]["greedy"]}
    of_model |= {"of_model": data["model"], "of_prompt": data["prompt"]}

    def by(params: Any, tasks: Sequence[RewriteTask], first: int) -> list[RewriteRow]:
        return system.rows(params, tasks, stop)

    def imitated() -> Any:
        if not {SCRIPT, RL} <= {*config.stages}:
            return f"the run has the stage {config.stages[0]} alone"
        if own.step == end:
            return f"the {checkpoint} checkpoint is that of its end"
        return NOT_KEPT if (kept := saved.after(end)) is None else kept

    def searched(write: Callable[[str], str]) -> Callable[..., list[RewriteRow]]:
        def play(_: Any, tasks: Sequence[RewriteTask], first: int) -> list[RewriteRow]:
            queries = [write(task.question) for task in tasks]
            found = system.originals.searched(tasks, config.eval.depth, queries)
            failed = [each for each in found if isinstance(each, Failure)]
            most = config.rollout.max_failed_share
            if len(failed) > most * len(queries):
                raise FeedbackLost(
                    f"{len(failed)} of {len(queries)} searches failed, for example: "
                    f"{failed[0].message.rstrip('.')}; config.rollout.max_failed_share allows "
                    f"{most:g}"
                )
            return [searched_row(*each) for each in zip(tasks, queries, found, strict=True)]

        return play

    def without_function_words(query: str) -> str:
        # A query that has none but function words stays as it is.
        return " ".join(content_words(query)) or query

    ways = [
        Way(own.name, own.told, by, lambda: own.params, {"by": own.digest}),
        Way(f"script-{end}", f"SFT alone, step {end}", by, imitated),
        Way("untrained", "untrained", by, lambda: system.untrained),
        Way("original", "original query", searched(str), by_model=False),
        Way(
            "content_words",
            "without function words",
            searched(without_function_words),
            by_model=False,
        ),
    ]

    def record(way: Way[RewriteRow]) -> dict[str, Any]:
        return {"way": way.name, "by": "", **way.record, **(of_model if way.by_model else {})}

    return [dataclasses.replace(way, record=record(way)) for way in ways]


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
        return compared(ways, main, [*numbers], config.eval.best_by)

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
        text += [*rewrite_scores.lines(name, own, main, by), ""]
    return [*text, "what the models write:", *rewrite_scores.shape_lines(shapes), ""]


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
    """What people are told of finished rows that were not searched for, a line a reason."""
    lacking = "in a collection that the run does not have"
    reasons = Counter(
        f"failed ({row.outcome})" if row.failed else lacking if row.found is None else row.outcome
        for row in rows
        if row.failed or row.found is None or row.outcome != REWRITTEN
    )
    return [f"{count} without results: {reason}" for reason, count in reasons.most_common()]


@contextlib.contextmanager
def open_rewriter(
    given: ConfigDict,
    workdir: Path,
    *,
    queries: Path | None = None,
    samples: int = 0,
    search: Path | None = None,
) -> Iterator[Predictor[DeepRetrieval, RewriteTask, RewriteRow]]:
    """Opens the model of a run, and the queries to rewrite.

    Args:
        queries: a file of them, see `data.queries`; None: `config.queries.test`.
        search: folder of the collections of other queries; None: the run's own.
    """
    config = RewriteConfig.of(given)
    mesh, every = mesh_of_run(config, workdir), json.loads(json.dumps(given.to_dict()))
    size, depth = config.train.batch_size, config.eval.depth
    with StopSignal() as stop:
        if queries is not None:
            inputs = listed_inputs(config, workdir, mesh, read_query_list(queries))
        else:
            inputs = load_inputs(
                config, workdir, mesh, test=config.queries.test, trains=False, search=search
            )
        tasks = drawn(inputs.test, samples, config.eval.seed)
        system, library = DeepRetrieval(config, mesh, inputs, workdir), inputs.library.library

        def play(params: Any, asked: Sequence[RewriteTask], first: int) -> list[RewriteRow]:
            rows = system.rows(params, asked, stop, PREDICTED + first // size)
            known = [not isinstance(library, Collections) or library.has(task) for task in asked]
            return [
                row if there and not row.failed else dataclasses.replace(row, found=None)
                for row, there in zip(rows, known, strict=True)
            ]

        yield Predictor(
            system,
            stop,
            Questions(
                REWRITES,
                tasks,
                lambda row, task: (row.collection, row.id) == (task.collection, task.id),
                size,  # as in training, whose memory suffices
                names=("query", "queries"),
            ),
            play=play,
            settings={name: every[name] for name in ("search", *_OF_PLAY)}
            | {"queries": digest_of(tasks), "greedy": config.eval.greedy, "depth": depth},
            record={
                "kind": KIND,
                "data": {name: inputs.data[name] for name in ("model", "prompt")},
                "searched": sorted({library.digest(task) for task in tasks}),
            },
            imitated=(config.imitated if {SCRIPT, RL} <= {*config.stages} else 0, "SFT alone"),
        )


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
