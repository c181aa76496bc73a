"""Readers of logs: of retrieval, of queries hop by hop, of agents, of answers, of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tried_inputs import FileReader
from qrag_jax.evaluators import analysis, rewrite_log
from qrag_jax.evaluators.shown import places
from qrag_jax.evaluators.shown.page import page
from qrag_jax.evaluators.shown.sections import run_of, section_of
from qrag_jax.feedback.tries import Try
from qrag_jax.metrics import (
    agent_log,
    answer_log,
    answer_table,
    hop_log,
    predictions,
    retrieval_log,
    reward_log,
    stop_threshold,
)
from qrag_jax.rollouts.trajectories import TokenTrajectory, Turn
from qrag_jax.runtime.episode_file import EPISODES_NAME, EpisodeFile
from qrag_jax.runtime.writers import MetricWriter, read_metrics
from qrag_jax.systems.leret_tries import KeptTries

_LOG = "log.jsonl"
_RECORD = {"seed": 1, "data": {"questions": "abc"}}


def _retrieval(folder: Path) -> Sequence[Path]:
    row = retrieval_log.Row(
        *("q1", "Where?", "Oslo", [0], [1, 0], [0.5, 0.25], ["a"], ["b", "a"]),
        *(0.9, 100, 0.5, 1.0),
    )
    path = folder / _LOG
    retrieval_log.check_meta(path, {"encoder": "best-7", "max_steps": 2})
    retrieval_log.append(path, [row, row])
    return [path, retrieval_log.meta_path(path)]


def _read_retrieval(folder: Path) -> None:
    path = folder / _LOG
    retrieval_log.check_meta(path, {"encoder": "best-7", "max_steps": 2})
    stop_threshold.sweep(retrieval_log.read(path))
    retrieval_log.read_partial(path)


def _agents(folder: Path) -> Sequence[Path]:
    search = {"query": "oslo", "names": ["d1"], "status": "searched"}
    row = agent_log.AgentRow("q1", "Where?", ("Oslo",), "Oslo", "", 1.0, 1.0, 0.5, (search,), 1, 2)
    agent_log.begin(folder / _LOG, _RECORD, restart=False)
    agent_log.append(folder / _LOG, [row, row])
    return [folder / _LOG, folder / "log.json"]


def _read_agents(folder: Path) -> None:
    agent_log.has_record(folder / _LOG, _RECORD)
    agent_log.summarised(agent_log.read_partial(folder / _LOG))


def _hops(folder: Path) -> Sequence[Path]:
    scores = {"recall": 0.5, "ap": 0.25, "all_gold": 0.0}
    hop = hop_log.Hop("oslo", "searched", ("d1", "d2"), scores, 10, 3, (("d1", 1.5),))
    row = hop_log.Searched("q1", "Where?", ("Oslo",), ("oslo",), (hop, hop))
    hop_log.write(folder / _LOG, [row, row], _RECORD)
    return [folder / _LOG, folder / "log.json"]


def _read_hops(folder: Path) -> None:
    path = folder / _LOG
    hop_log.is_one(path)
    hop_log.read_record(path)
    rows = hop_log.read(path)
    summary = hop_log.summary(rows)
    hop_log.gains(rows, rows)
    hop_log.table({"": summary}, len(rows[0].hops))
    hop_log.read_parts(path, 1, 2)


def _rewrites(folder: Path) -> Sequence[Path]:
    row = rewrite_log.RewriteRow("q1", "", "oslo", "oslo AND x", "rewritten", "t", (("d", 1.5),), 3)
    rewrite_log.write(folder / _LOG, [row, row], _RECORD)
    return [folder / _LOG]


def _read_rewrites(folder: Path) -> Any:
    return [(each.ranking, each.failed) for each in rewrite_log.read(folder / _LOG)]


def _answers(folder: Path) -> Sequence[Path]:
    row = answer_log.AnswerRow(
        *("q1", "Where?", ["Oslo"], "Oslo", "It is Oslo.", 1.0, 1.0, "squad", [0, 1], 0, 0),
        *("v1", "stop", 2, "bridge"),
    )
    verdict = answer_log.VerdictRow("q1", "Oslo", True, "yes", "v1")
    answer_log.append(folder / _LOG, [row, row])
    answer_log.append(folder / "verdicts.jsonl", [verdict])
    return [folder / _LOG, folder / "verdicts.jsonl"]


def _read_answers(folder: Path) -> None:
    rows = answer_log.read_partial(folder / _LOG, answer_log.AnswerRow)
    verdicts = answer_log.read_partial(folder / "verdicts.jsonl", answer_log.VerdictRow)
    if rows:
        answer_table.answer_scores(rows, [], {each.id: each.right for each in verdicts})


def _rewards(folder: Path) -> Sequence[Path]:
    rows = [reward_log.row((f"q{n}", "Where?"), [0.5, 1.0, "timeout"]) for n in range(2)]
    answer_log.append(folder / _LOG, rows)
    return [folder / _LOG]


def _read_rewards(folder: Path) -> None:
    reward_log.summary(reward_log.read(folder / _LOG, "config.data.keep"), 0.1)


def _predictions(folder: Path) -> Sequence[Path]:
    turn = Turn(
        np.array([1, 2], np.int32),
        np.array([3], np.int32),
        np.array([-0.5], np.float32),
        "stop",
        "v1",
    )
    tally = dict.fromkeys(("turns", "searches", "malformed", "unknown_tool", "repeated"), 1)
    facts = {
        "answer": "Oslo",
        "tally": tally | {"completed": True, "truncated": False},
        "cited": ["d1"],
    }
    parts = dict.fromkeys(predictions.OF_PARTS, 0.5)
    trajectory = TokenTrajectory(0, 0, 1, ((turn,),), "done", parts, facts).to_json()
    texts = {
        "segment": 0,
        "observed": "ab",
        "sampled": "c",
        "observed_tokens": ["a", "b"],
        "sampled_tokens": ["c"],
    }
    rows = [
        predictions.Prediction(f"q{n}", "Where?", ["Oslo"], 2, 0, "Oslo", 0.5, [texts], trajectory)
        for n in range(2)
    ]
    record = {"kind": predictions.KIND, "checkpoint": "best-1", "retriever": "x", "config": {}}
    agent_log.begin(folder / _LOG, record, restart=False)
    answer_log.append(folder / _LOG, rows)
    interval = {"mean": 0.5, "low": 0.25, "high": 0.75}
    group = {"em": interval, "turns": interval, "failed": 0, "episodes": 2, "pass@1": interval}
    summary = {
        "main": {"retriever": "x", "weights": "best-1"},
        "scores": {"x": {"best-1": {"all": group}}},
        "files": {"x": {"best-1": "other.jsonl"}},
    }
    (folder / analysis.SUMMARY).write_text(json.dumps(summary) + "\n")
    return [folder / _LOG, folder / "log.json", folder / analysis.SUMMARY]


def _read_predictions(folder: Path) -> None:
    found = analysis.find([folder])
    analysis.table(found)
    analysis.write_page(found, folder / "pages", 0)


def _metrics(folder: Path) -> Sequence[Path]:
    with MetricWriter(folder) as writer:
        writer.write(1, {"train/loss": 0.5, "train/mean_q": float("nan")})
        writer.write(2, {"train/loss": 0.25})
    return [folder / "metrics.jsonl"]


def _read_metrics(folder: Path) -> Any:
    found = read_metrics(folder / "metrics.jsonl")
    with MetricWriter(folder, 1):
        return [sum(row.values()) for row in found]


def _kept(folder: Path) -> KeptTries:
    return KeptTries(folder / _LOG, {"weights": "abc", "seed": 1})


def _tries(folder: Path) -> Sequence[Path]:
    found = (("d1", 1.5), ("d2", 0.5))
    one = Try(
        *(0, 1, 0, 0, 0, "oslo", (1, 2), (-0.5, -0.25), "stop", "searched", found, ("d1",)),
        *({"recall": 0.5, "ap": 0.5, "all_gold": 0.0}, 0.5, "v1"),
    )
    kept = _kept(folder)
    kept.begin()
    kept.append([one, one])
    kept.append([one])
    return [folder / _LOG, folder / "log.json"]


def _read_tries(folder: Path) -> Any:
    parts = _kept(folder).begin()
    return [
        (sum(t.log_probs), t.key, t.reward, [*t.pool], dict(t.scores))
        for part in parts
        for t in part
    ]


def _sample(folder: Path) -> Sequence[Path]:
    (path, *_) = _retrieval(folder)
    row = json.loads(path.read_text().splitlines()[0])
    path.unlink()
    for step in (0, 5):
        EpisodeFile(folder, step).write(step, "chunks", [row])
    return [folder / EPISODES_NAME]


def _shown(folder: Path) -> None:
    """A page passes over what is damaged in a log, so each log is also read for one."""
    for place in places.find([folder]):
        section = section_of(place, 1)
        page("A page", "", [run_of(place)], [section] if section else [])


def readers() -> list[FileReader]:
    """The readers of this module."""
    made: list[tuple[str, Callable[[Path], Sequence[Path]], Callable[[Path], Any]]] = [
        ("a retrieval log", _retrieval, _read_retrieval),
        ("a log of agents", _agents, _read_agents),
        ("a log of queries hop by hop", _hops, _read_hops),
        ("a log of rewritten queries", _rewrites, _read_rewrites),
        ("answers and verdicts", _answers, _read_answers),
        ("rewards of a filter", _rewards, _read_rewards),
        ("predictions and their summary", _predictions, _read_predictions),
        ("metrics of a training", _metrics, _read_metrics),
        ("tries of a query writer", _tries, _read_tries),
    ]
    logs = (_retrieval, _agents, _hops, _rewrites, _predictions, _metrics, _sample)
    made += [(f"a page of {make.__name__.removeprefix('_')}", make, _shown) for make in logs]
    return [FileReader(*each) for each in made]
