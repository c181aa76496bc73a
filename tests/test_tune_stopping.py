"""Tuning when to stop: what is written and printed, on which rows, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from qrag_jax.metrics import retrieval_log, stop_threshold
from qrag_jax.metrics.chunk_filters import chunk_filter
from qrag_jax.metrics.facts import fact_columns
from qrag_jax.metrics.retrieval_log import Row
from tests.entry_points import Commands, refusal
from tests.retrieval_logs import STEPS, played_rows, write_log

pytestmark = pytest.mark.long

RULES = ["no_stopping", *(f"budget_{n}" for n in range(1, STEPS + 1)), "threshold", "early_stop"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "eval" / "held_out.jsonl", played_rows(60, seed=1))


def summary(folder: Path) -> dict:
    return json.loads((folder / "stopping.json").read_text())


def means(rows: list[Row], rule: str, threshold: float) -> dict[str, float]:
    """The scores of a rule, by its definition."""
    name, parameters = {
        "no_stopping": ("none", {}),
        "threshold": ("qvalue", {"threshold": threshold}),
        "early_stop": ("early_stop", {}),
    }.get(rule) or ("retrieval_step", {"steps": int(rule.removeprefix("budget_"))})
    keep = chunk_filter(name, parameters)
    return {k: float(np.mean(v)) for k, v in fact_columns([keep(row) for row in rows]).items()}


def check(part: dict, rows: list[Row], threshold: float) -> None:
    assert part["samples"] == len(rows)
    assert list(part["scores"]) == RULES
    for rule, scores in part["scores"].items():
        assert {k: v["mean"] for k, v in scores.items()} == pytest.approx(
            means(rows, rule, threshold)
        )
        for interval in scores.values():
            assert interval["low"] <= interval["mean"] <= interval["high"]


def test_tuned_on_one_log_and_reported_on_both(
    log: Path, tmp_path: Path, commands: Commands
) -> None:
    held_out, other = retrieval_log.read(log), played_rows(40, seed=2, prefix="t")
    test = write_log(tmp_path / "test.jsonl", other)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    out = commands.succeed("tune_stopping", f"--log={log}", f"--test={test}")
    assert all(path.read_bytes() == content for path, content in before.items())

    found = summary(log.parent)
    sweep = stop_threshold.sweep(held_out)
    chosen = stop_threshold.choose(sweep.scores["fact_f1"], sweep.scores["steps"])
    threshold = found["threshold"]
    assert threshold == sweep.thresholds[chosen]
    check(found["tuned_on"], held_out, threshold)
    check(found["reported_on"], other, threshold)
    assert (found["tuned_on"]["log"], found["reported_on"]["log"]) == (str(log), str(test))
    assert found["provenance"] == {"encoder": "best-7", "max_steps": STEPS}
    assert found["objective"] == "fact_f1"
    f1 = {n: means(held_out, f"budget_{n}", 0.0)["fact_f1"] for n in range(1, STEPS + 1)}
    assert found["budget"] == max(f1, key=lambda n: f1[n])

    lines = out.splitlines()
    first, second = lines.index("held-out log"), lines.index("test log")
    assert second - first == len(RULES) + 1
    for start in (first, second):
        marked = [line.split("  ")[1] for line in lines[start : start + 9] if " *" in line]
        assert marked == [f"budget {found['budget']} *", f"Q > {threshold:.4g} *"]
    full = found["reported_on"]["scores"]["no_stopping"]["fact_f1"]
    assert f"{full['mean']:.3f} [{full['low']:.3f}, {full['high']:.3f}]" in lines[second + 1]
    gain = found["reported_on"]["scores"]["threshold"]["fact_f1"]["mean"] - full["mean"]
    assert gain > 0
    assert f"no stopping: fact_f1 {gain:+.3f} [" in out
    assert "ids are in both" not in out
    assert imread(log.parent / "stopping.png").shape[:2] == (780, 960)


def test_without_a_test_log_the_ids_are_split(log: Path, tmp_path: Path, commands: Commands):
    rows = retrieval_log.read(log)
    out = tmp_path / "out"
    printed = commands.succeed(
        "tune_stopping", f"--log={log}", f"--out={out}", "--objective=fact_em"
    )
    found = summary(out)
    tuned, reported = found["tuned_on"]["samples"], found["reported_on"]["samples"]
    assert tuned + reported == len(rows)
    assert min(tuned, reported) > 15
    assert f"{tuned} questions to tune on and {reported} others to report on" in printed
    assert not (log.parent / "stopping.json").exists()
    # The halves follow the ids, not the order of the rows.
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    again = write_log(tmp_path / "shuffled.jsonl", shuffled)
    commands.succeed("tune_stopping", f"--log={again}", f"--out={tmp_path}", "--objective=fact_em")
    assert summary(tmp_path)["threshold"] == found["threshold"]
    for rule, scores in summary(tmp_path)["reported_on"]["scores"].items():
        for name, interval in scores.items():
            same = found["reported_on"]["scores"][rule][name]["mean"]
            assert interval["mean"] == pytest.approx(same)
    # EM falls only where a last fact is cut: the threshold keeps it, with fewer steps.
    scores = found["tuned_on"]["scores"]
    assert scores["threshold"]["fact_em"] == scores["no_stopping"]["fact_em"]
    assert scores["threshold"]["steps"]["mean"] < STEPS


def test_budgets_shared_ids_and_a_torn_line(log: Path, tmp_path: Path, commands: Commands) -> None:
    stopped = [
        dataclasses.replace(row, pred_idx=[], q_values=[], pred_texts=[], f1=0.0, em=0.0)
        for row in played_rows(3, seed=3)
    ]
    test = write_log(tmp_path / "test.jsonl", stopped)
    with test.open("ab") as file:
        file.write(b'{"id": "being writ')
    before = test.read_bytes()
    out = commands.succeed("tune_stopping", f"--log={log}", f"--test={test}", "--budgets=3,2,9")
    assert test.read_bytes() == before
    assert "note: 3 ids are in both logs" in out
    found = summary(log.parent)
    budgets = ["budget_2", "budget_3", "budget_9"]
    assert list(found["tuned_on"]["scores"])[1:-2] == budgets
    assert found["budget"] in (2, 3)
    for scores in found["reported_on"]["scores"].values():
        assert scores["fact_f1"]["mean"] == scores["steps"]["mean"] == 0.0


def test_refusals(log: Path, tmp_path: Path, commands: Commands) -> None:
    def says(*arguments: str) -> str:
        return refusal(commands.run("tune_stopping", *arguments))

    assert "give the held-out log, for example --log=" in says()
    missing = tmp_path / "no.jsonl"
    assert f"{missing} cannot be read (No such file" in says(f"--log={missing}")
    assert f"{missing} cannot be read" in says(f"--log={log}", f"--test={missing}")
    assert "hold the same rows; give a log of other" in says(f"--log={log}", f"--test={log}")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(log.read_bytes())
    assert "hold the same rows" in says(f"--log={log}", f"--test={copy}")
    assert "--budgets=2,x must be whole numbers" in says(f"--log={log}", "--budgets=2,x")
    assert "--budgets=0 must be whole numbers" in says(f"--log={log}", "--budgets=0")
    assert "--objective=f1: value should be one of" in says(f"--log={log}", "--objective=f1")
    assert "cannot be written" in says(f"--log={log}", f"--out={copy}/here")
    assert not (log.parent / "stopping.json").exists()


def test_logs_that_cannot_be_tuned_on(tmp_path: Path, commands: Commands) -> None:
    def says(content: list[Row] | bytes) -> str:
        log = tmp_path / "log.jsonl"
        retrieval_log.discard(log)
        if isinstance(content, bytes):
            log.write_bytes(content)
        else:
            write_log(log, content)
        return refusal(commands.run("tune_stopping", f"--log={log}"))

    rows = played_rows(6, seed=4)
    nothing = {"pred_idx": [], "q_values": [], "pred_texts": []}
    assert "log.jsonl holds no row" in says(b"")
    assert "too few questions to be split in two halves; give --test" in says(rows[:1])
    torn = [dataclasses.replace(rows[0], pred_texts=["one"])]
    assert "line 2: 'pred_texts' has 1 values and 'pred_idx' 5" in says(rows[1:2] + torn)
    log = write_log(tmp_path / "nan.jsonl", rows)
    content = log.read_bytes().replace(str(rows[2].q_values[0]).encode(), b"NaN")
    assert "line 3: " in says(content)
    empty = [dataclasses.replace(row, **nothing) for row in rows]
    assert "holds no chunk taken" in says(empty)
    unplayed = [dataclasses.replace(row, q_values=[]) for row in rows]
    assert "sample q0 has no 'q_values'" in says(unplayed)
