"""The commands that read retrieval logs: tuning when to stop, and cutting a log down."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.metrics import stopping
from qrag_jax.metrics.facts import chunk_filter, fact_columns, summarise
from qrag_jax.metrics.row_log import read_record
from qrag_jax.metrics.rows import Row, read_retrievals
from qrag_jax.runtime.whole_files import log_locks
from tests.entry_points import Commands, refusal
from tests.retrieval_logs import STEPS, played_rows, write_log

RULES = ["no_stopping", *(f"budget_{n}" for n in range(1, STEPS + 1)), "threshold", "early_stop"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "eval" / "held_out.jsonl", played_rows(60, seed=1))


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
    held_out, other = read_retrievals(log), played_rows(40, seed=2, prefix="t")
    test = write_log(tmp_path / "test.jsonl", other)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    out = commands.succeed("evaluate", f"--log={log}", f"--test={test}")
    assert all(path.read_bytes() == content for path, content in before.items())

    found = json.loads((log.parent / "stopping.json").read_text())
    sweep = stopping.sweep_thresholds(held_out)
    chosen = stopping.choose(sweep.scores["fact_f1"], sweep.scores["steps"])
    threshold = found["threshold"]
    assert threshold == sweep.thresholds[chosen]
    check(found["tuned_on"], held_out, threshold)
    check(found["reported_on"], other, threshold)
    assert (found["tuned_on"]["log"], found["reported_on"]["log"]) == (str(log), str(test))
    assert found["provenance"] == {"encoder": "best-7", "max_steps": STEPS}
    assert found["objective"] == "fact_f1"
    f1 = {n: means(held_out, f"budget_{n}", 0.0)["fact_f1"] for n in range(1, STEPS + 1)}
    assert found["budget"] == max(f1, key=lambda n: f1[n])
    full, stopped = (
        found["reported_on"]["scores"][rule]["fact_f1"] for rule in ("no_stopping", "threshold")
    )
    assert stopped["mean"] > full["mean"]
    assert f"{full['mean']:.3f}" in out
    assert (log.parent / "stopping.png").exists()


def test_writes_the_filtered_rows_with_their_origin(
    log: Path, tmp_path: Path, commands: Commands
) -> None:
    before = log.read_bytes()
    new, facts = tmp_path / "new" / "cut.jsonl", tmp_path / "facts.jsonl"
    arguments = ("--filter=qvalue", "--threshold=0.45")
    out = commands.succeed("evaluate", f"--log={log}", *arguments, f"--out={new}")
    rows = read_retrievals(log)
    kept = [chunk_filter("qvalue", {"threshold": 0.45})(row) for row in rows]
    assert read_retrievals(new) == kept
    assert log.read_bytes() == before
    meta = read_record(log)
    applied = {"name": "qvalue", "threshold": 0.45}
    changed = {"filtered_from": str(log), "filters": [applied]}
    assert read_record(new) == meta | changed
    for shown in (rows, kept):
        assert f"{summarise(shown)['fact_f1']['mean']:.3f}" in out

    # What was filtered may be filtered again, but no threshold is tuned on it.
    commands.succeed("evaluate", f"--log={new}", "--filter=gt", f"--out={facts}")
    assert read_record(facts)["filters"] == [applied, {"name": "gt"}]
    taken = [row.pred_idx for row in read_retrievals(facts)]
    assert taken == [sorted(row.sf_idx) for row in rows]
    assert str(new) in refusal(commands.run("evaluate", f"--log={new}"))
    assert "Q" in refusal(commands.run("evaluate", f"--log={facts}", *arguments, "--out=x"))


def test_refusals_write_nothing(log: Path, tmp_path: Path, commands: Commands) -> None:
    new, copy, before = tmp_path / "new.jsonl", tmp_path / "copy.jsonl", log.read_bytes()
    copy.write_bytes(before)
    few = write_log(tmp_path / "few.jsonl", played_rows(1, seed=4))  # too few for two halves
    of_log, into_new = f"--log={log}", f"--out={new}"
    for words, named in (
        ([f"--log={tmp_path / 'no.jsonl'}"], "no.jsonl"),
        ([of_log, f"--test={copy}"], "copy.jsonl"),  # the same rows
        ([of_log, "--budgets=2,x"], "--budgets"),
        ([of_log, "--objective=f1"], "--objective"),
        ([f"--log={few}"], "--test"),
        ([of_log, into_new, "--filter=best"], "best"),
        ([of_log, into_new, "--filter=qvalue"], "threshold"),
        ([of_log, f"--out={log}", "--filter=none"], str(log)),
    ):
        assert named in refusal(commands.run("evaluate", *words)), words
    with log_locks(new):
        assert str(new) in refusal(commands.run("evaluate", of_log, into_new, "--filter=gt"))
    assert log.read_bytes() == before
    assert not new.exists()
    assert not (log.parent / "stopping.json").exists()
