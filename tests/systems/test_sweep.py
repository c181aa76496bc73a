"""A sweep's plan, its table, and the scores that it reads from the logs of each system."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators.evaluation import newest_log
from qrag_jax.metrics.bootstrap import crossed_interval
from qrag_jax.metrics.row_log import AGENTS, HOPS, REWRITES, AgentRow, Hop, RewriteRow, Searched
from qrag_jax.sweep import Plan, compared, main_score, question_scores, seeds_of, sets_of
from tests.entry_points import ROOT

TINY = f"{ROOT}/configs/quickstart.py:tiny"
RATES = {"optimizer.learning_rate": ["1e-5", "3e-5"]}


def test_runs_are_every_combination_with_every_seed() -> None:
    sets = sets_of(["config.optimizer.learning_rate=1e-5,3e-5", "train.steps=6", "eval.beam=1,2"])
    runs = Plan("c.py", [1, 2], sets).runs()
    assert runs[0].name == "learning_rate-1e-5-beam-1-seed1"
    assert len(runs) == len({run.name for run in runs}) == 8
    fields = ("seed=1", "optimizer.learning_rate=1e-5", "train.steps=6", "eval.beam=2")
    assert runs[2].words == ["--config=c.py", *(f"--config.{field}" for field in fields)]
    paths = Plan("c.py", [1], {"data.path": ["a/b", "a_b", "../..", "x" * 300]}).runs()
    assert len({run.name for run in paths}) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9._+-]{1,100}", run.name) for run in paths)
    assert sets_of(["a=(1,2),'b,c',[3,{4,5}]"]) == {"a": ["(1,2)", "'b,c'", "[3,{4,5}]"]}
    for refused in (["a"], ["seed=1"], ["a=1,1"], ["a=1", "a=2"]):
        with pytest.raises(InputError, match="--set="):
            sets_of(refused)
    for refused in (["a"], ["1", "1"], [str(2**32)]):
        with pytest.raises(InputError, match="--seeds="):
            seeds_of(refused)


def test_every_combination_is_checked_before_anything_starts() -> None:
    Plan(TINY, [42], RATES | {"reward.name": ["gt"]}).check()
    for field, values in (
        ("optimizer.learning_rat", ["1e-5"]),
        ("train.steps", ["5", "0"]),
        ("optimizer.learning_rate", ["1e-5", "fast"]),
    ):
        with pytest.raises(InputError, match=re.escape(field)):
            Plan(TINY, [42], {field: values}).check()
    with pytest.raises(InputError, match=r"nowhere\.py"):
        Plan("nowhere.py", [42], {}).check()


def questions(values: list[float], first: int = 0) -> dict[str, float]:
    return {f"q{first + number}": value for number, value in enumerate(values)}


def test_means_intervals_and_paired_differences() -> None:
    hard = np.random.default_rng(0).random(40)  # how hard a question is for all
    one = {seed: questions([*hard + 0.01 * seed]) for seed in (1, 2)}
    other = {seed: questions([*hard + 0.01 * seed + 0.1]) for seed in (2, 1)}
    first, second = compared({"a": one, "b": other})
    values = np.array([[*one[1].values()], [*one[2].values()]])
    assert (first["mean"], first["low"], first["high"]) == crossed_interval(values)
    assert first["by_seed"] == {"1": pytest.approx(values[0].mean()), "2": values[1].mean()}
    # The questions' own difficulty is in both, so the difference is sharp.
    for name in ("mean", "low", "high"):
        assert second["difference"][name] == pytest.approx(0.1)
    assert second["high"] - second["low"] > 0.1


def test_only_common_questions_and_seeds_are_compared() -> None:
    runs: Mapping[str, Mapping[int, dict[str, float]]] = {
        "a": {1: questions([0.0, 0.0, 1.0]), 2: questions([0.0, 0.0, 1.0])},
        "b": {2: questions([1.0, 1.0], first=1), 3: questions([1.0, 1.0], first=1)},
        "c": {3: questions([1.0])},
        "d": {},
    }
    a, b, c, d = compared(runs)
    assert a["mean"] == pytest.approx(1 / 3)
    assert (b["questions"], b["mean"]) == (2, 1.0)
    difference = b["difference"]  # of q1 and q2 of seed 2 alone: 1 - 0 and 1 - 1
    assert (difference["seeds"], difference["questions"], difference["mean"]) == ([2], 2, 0.5)
    assert "difference" not in c  # no seed in common
    assert d == {"settings": "d", "seeds": []}  # and no mean of 0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    config = {"eval": {"measures": ["recall@2", "rr@10"], "best_by": "recall@2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "eval").mkdir()
    return tmp_path


def scores_of(run: Path) -> tuple[str, dict[str, dict[str, float]]]:
    log = newest_log(run)
    assert log is not None
    scores = question_scores(log, run)
    return main_score(log, run, scores), scores


def test_agents_that_failed_have_no_score(run: Path) -> None:
    rows = [
        AgentRow(name, "Where?", ("Oslo",), "", broken, em, f1, recall, ())
        for name, broken, em, f1, recall in (
            *(("q1", "", 0.0, 0.5, None), ("q2", "timeout", 0.0, 0.0, 0.0)),
            *(("q3", "", 1.0, 1.0, 0.25), ("q4", "no_retrieval", 0.0, 0.0, 0.0)),
        )
    ]
    AGENTS.append(run / "eval/last-4/agent_seed42.jsonl", rows)
    main, scores = scores_of(run)
    assert scores == {
        "q1": {"f1": 0.5, "em": 0.0, "hops": 0.0},
        "q3": {"f1": 1.0, "em": 1.0, "hops": 0.0, "recall": 0.25},
        "q4": {"f1": 0.0, "em": 0.0, "hops": 0.0, "recall": 0.0},
    }
    assert main == "f1"


def test_hops_are_those_after_the_last(run: Path) -> None:
    missed, found = (Hop("oslo", "searched", ("d1",), {"all_gold": x}) for x in (0.0, 1.0))
    both = {"q0": (found, missed), "q1": (missed, found)}
    rows = [Searched(name, "Where?", ("Oslo",), ("d1",), hops) for name, hops in both.items()]
    HOPS.write(run / "eval/last-4.jsonl", rows, {})
    main, scores = scores_of(run)
    assert main == "all_gold"
    assert {name: own["all_gold"] for name, own in scores.items()} == {"q0": 0.0, "q1": 1.0}
    assert scores["q0"]["hop1/all_gold"] == 1.0


def test_rewrites_are_scored_by_their_judgements(run: Path) -> None:
    ranking = (("d2", 2.0), ("d1", 1.0), ("d3", 0.5))
    one, two, three = {"d1": 1, "d9": 1}, {"d2": 1}, {"d1": 1}
    rows = [
        RewriteRow("1", "a", "x", "y", "rewritten", "", ranking, grades=one),
        RewriteRow("1", "b", "x", "y", "rewritten", "", ranking, grades=two),
        RewriteRow("2", "b", "x", "", "no_query", "", None, grades=three),
        RewriteRow("3", "b", "x", "", "timeout", "", None, grades=three),
    ]
    REWRITES.write(run / "eval/last-4.jsonl", rows, {})
    main, scores = scores_of(run)
    assert main == "recall@2"
    # No query was written for b/2, which is the model's own doing; the search of b/3 failed.
    expected = {"a/1": 0.5, "b/1": 1.0, "b/2": 0.0}
    assert scores == {name: dict.fromkeys(("recall@2", "rr@10"), x) for name, x in expected.items()}
