"""Scores of each question, read from the logs that evaluations of each system write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow
from qrag_jax.metrics import agent_log, answer_log, hop_log, predictions, retrieval_log, trec
from qrag_jax.metrics.agent_log import AgentRow
from qrag_jax.metrics.facts import summarise
from qrag_jax.systems.sweep_table import scores_of
from tests.evaluators.shown_pages import prediction
from tests.retrieval_logs import played_rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    config = {"eval": {"measures": ["recall@2", "rr@10"], "best_by": "recall@2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_chunks(run: Path) -> None:
    rows = played_rows(12, 0)
    retrieval_log.append(run / "eval/best-10/eval_seed42.jsonl", rows)
    retrieval_log.append(run / "eval/untrained/eval_seed42.jsonl", played_rows(12, 1))
    found = scores_of(run)
    assert found.main == "fact_f1"
    own = found.scores["fact_f1"]
    assert [*own] == [row.id for row in rows]
    assert sum(own.values()) / 12 == pytest.approx(summarise(rows)["fact_f1"]["mean"])
    assert {"fact_em", "fact_recall", "fact_precision", "steps"} <= found.scores.keys()


def test_agents_that_failed_have_no_score(run: Path) -> None:
    rows = [
        AgentRow("q1", "Where?", ("Oslo",), "Oslo fjord", "", 0.0, 0.5, None, ()),
        AgentRow("q2", "Where?", ("Oslo",), "", "timeout", 0.0, 0.0, 0.0, ()),
        AgentRow("q3", "Where?", ("Oslo",), "Oslo", "", 1.0, 1.0, 0.25, ()),
        AgentRow("q4", "Where?", ("Oslo",), "", "no_retrieval", 0.0, 0.0, 0.0, ()),
    ]
    agent_log.append(run / "eval/last-4/agent_seed42.jsonl", rows)
    found = scores_of(run)
    assert found.scores == {
        "f1": {"q1": 0.5, "q3": 1.0, "q4": 0.0},
        "em": {"q1": 0.0, "q3": 1.0, "q4": 0.0},
        "recall": {"q3": 0.25, "q4": 0.0},
    }


def test_tokens(run: Path) -> None:
    log = run / "eval/last-9/bm25.jsonl"
    rows = [prediction(0, 0.75), prediction(1, 0.5), prediction(2, None, "timeout")]
    answer_log.append(log, rows)
    log.with_suffix(".json").write_text(json.dumps({"kind": predictions.KIND}))
    found = scores_of(run)
    assert found.main == "f1"
    assert [*found.scores["reward"].values()] == [0.75, 0.5]  # the third failed


def test_hops_are_those_after_the_last(run: Path) -> None:
    def hop(all_gold: float) -> hop_log.Hop:
        scores = {"recall": all_gold, "ap": 0.25, "all_gold": all_gold}
        return hop_log.Hop("oslo", "searched", ("d1",), scores, 10, 3, (("d1", 1.5),))

    rows = [
        hop_log.Searched(f"q{n}", "Where?", ("Oslo",), ("d1",), (hop(0.0), hop(float(n))))
        for n in (0, 1)
    ]
    (run / "eval").mkdir()
    hop_log.LOG.write(run / "eval/last-4.jsonl", rows, {})
    found = scores_of(run)
    assert (found.main, found.scores["all_gold"]) == ("all_gold", {"q0": 0.0, "q1": 1.0})


def test_rewrites_are_scored_by_the_judgements_of_their_collection(run: Path) -> None:
    pytest.importorskip("ir_measures", reason="scores of rankings need ir-measures")
    ranking = (("d2", 2.0), ("d1", 1.0), ("d3", 0.5))
    rows = [
        RewriteRow("1", "a", "x", "y", "rewritten", "", ranking),
        RewriteRow("1", "b", "x", "y", "rewritten", "", ranking),
        RewriteRow("2", "b", "x", "", "no_query", "", None),
        RewriteRow("3", "b", "x", "", "timeout", "", None),
    ]
    (run / "eval").mkdir()
    rewrite_log.write(run / "eval/last-4.jsonl", rows, {})
    for collection, qrels in (
        ("a", {"1": {"d1": 1, "d9": 1}}),
        ("b", {"1": {"d2": 1}, "2": {"d1": 1}, "3": {"d1": 1}}),
    ):
        trec.write_qrels(run / "eval/trec" / collection / "qrels.txt", qrels)
    found = scores_of(run)
    assert found.main == "recall@2"
    recall, rank = found.scores["recall@2"], found.scores["rr@10"]
    assert recall["a/1"] == 0.5
    assert recall["b/1"] == 1.0
    assert recall["b/2"] == 0.0  # no query was written, which is the model's own doing
    assert "b/3" not in recall  # its search failed: nobody knows
    assert (rank["a/1"], rank["b/1"]) == (0.5, 1.0)
    (run / "config.json").write_text("{}")
    with pytest.raises(InputError, match="lacks a field"):
        scores_of(run)


def test_a_run_that_is_not_scored(run: Path) -> None:
    with pytest.raises(InputError, match="has no log of an evaluation; score it with qrag eval"):
        scores_of(run)
