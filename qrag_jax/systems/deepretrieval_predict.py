"""Rewrites a file of queries by a DeepRetrieval run, and writes what each query found."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.data.files.queries import read_query_list
from qrag_jax.environments.query_rewriting.output import REWRITTEN
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.evaluators.rewrite_rows import played_row
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RL, SCRIPT, RewriteConfig
from qrag_jax.systems.deepretrieval_inputs import (
    SEARCH,
    IfThere,
    agent_of,
    fingerprint,
    listed_inputs,
    load_inputs,
)
from qrag_jax.systems.deepretrieval_scoring import OF_QUERIES, drawn
from qrag_jax.systems.played_parts import PlayedParts
from qrag_jax.systems.saved_token_run import (
    FIRST,
    IMITATED,
    SavedWeights,
    Weights,
    digest_of_weights,
    mesh_of_run,
)
from qrag_jax.systems.scored_ways import of_others

KIND = "queries of a rewriter"  # in the record beside a file
# Sections of the config that the play of given weights depends on.
_OF_PLAY = ("model", "search", "writing", "sampling", "seed")


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
        saved, config = SavedWeights(self.system), self.system.config
        if which == FIRST:
            return saved.untrained()
        if which == IMITATED:
            both = {SCRIPT, RL} <= {*config.stages}
            return saved.imitated(config.first_steps, "SFT alone") if both else None
        return saved.checkpoint(which)

    def predict(self, weights: Weights, log: Path, *, restart: bool = False) -> list[RewriteRow]:
        """Rewrites all queries that the file lacks; returns all rows.

        Args:
            log: the file, `….jsonl`; what it was made with is kept beside it, as `….json`.
            restart: throw the file away instead of going on with it.

        Raises:
            Stopped: a signal came; the same call goes on with the file.
            FeedbackLost: too many searches fail.
        """
        parts = PlayedParts(
            rows=rewrite_log.LOG,
            asked=self.tasks,
            size=self.system.config.train.batch_size,  # as in training, whose memory suffices
            play=lambda tasks, stream: self._played(weights.params, tasks, stream),
            is_of=lambda row, task: (row.collection, row.id) == (task.collection, task.id),
            names=("query", "queries"),
        )
        return parts.into(log, self._record(weights), self.stop, restart=restart)

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
            **{name: every[name] for name in _OF_PLAY},
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
    out: Path | None = None,
) -> Iterator[Rewriter]:
    """Opens the model of a run, and the queries to rewrite.

    Args:
        given: the config.
        workdir: the run's folder.
        queries: a file of them, see `data.files.queries`; None: `config.queries.test`.
        samples: so many of them; 0: all.
        out: the file that is named for them; None: none is.
    """
    config = RewriteConfig.of(given)
    if queries is not None and out is None:
        raise InputError(
            "the queries of --questions are not the run's own; give the file to write, for example "
            "--out=rewritten.jsonl."
        )
    search = _search_of(given, workdir, out) if queries is None else None
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


def _search_of(given: ConfigDict, workdir: Path, out: Path | None) -> Path | None:
    """The folder of the collections of other queries than the run's; None: the run's own."""
    differing = of_others(workdir, given, OF_QUERIES)
    if differing and out is None:
        raise InputError(
            f"what is rewritten is not the run's own (not as in its config: "
            f"{', '.join(differing)}); give the file to write, for example --out=rewritten.jsonl."
        )
    return out.with_suffix(f".{SEARCH}") if differing and out else None
