"""Tuning a rule for stopping: its scores, its files, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qrag_jax import stopping
from qrag_jax.errors import InputError
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.chunk_filters import filter_chunks
from tests.entry_points import Commands, refusal
from tests.metrics.test_thresholds import random_rows

ROWS = [row for row in random_rows(3, 80, 3) if row.pred_idx]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "eval_seed42.jsonl"
    retrieval_log.append(path, ROWS)
    return path


def test_the_threshold_is_chosen_on_one_half_and_judged_on_the_other() -> None:
    held_out, test = stopping.halves(ROWS)
    assert {row.id for row in held_out}.isdisjoint({row.id for row in test})
    assert len(held_out) + len(test) == len(ROWS)
    result = stopping.tune(held_out, test, "fact_f1")
    steps = max(len(row.pred_idx) for row in ROWS)
    budgets = [f"{n} steps" for n in range(1, steps)]
    assert list(result["rules"]) == ["all steps", *budgets, "threshold", "oracle"]
    kept = [filter_chunks("qvalue", row, result["threshold"]) for row in test]
    mean = sum(row.f1 for row in kept) / len(kept)
    assert result["rules"]["threshold"]["fact_f1"]["mean"] == pytest.approx(mean)
    assert result["tuned"]["fact_f1"] >= result["tuned"]["without"]
    assert result["rules"]["1 steps"]["steps"]["mean"] == 1.0


def test_command(log: Path, commands: Commands, tmp_path: Path) -> None:
    other = tmp_path / "test.jsonl"
    retrieval_log.append(other, [dataclasses.replace(row, id=f"x{row.id}") for row in ROWS])
    shown = commands.succeed("stopping", f"--log={log}", f"--test={other}", f"--out={tmp_path}")
    result = json.loads((tmp_path / "stopping.json").read_text())
    assert f"--config.eval.stop_threshold={result['threshold']:.6g}" in shown
    assert "oracle" in shown
    assert (tmp_path / "stopping.png").read_bytes().startswith(b"\x89PNG")
    # Judged on the questions it was tuned on, it is what was found there.
    assert result["rules"]["threshold"]["fact_f1"]["mean"] == pytest.approx(
        result["tuned"]["fact_f1"]
    )


def test_filtered_log(log: Path, commands: Commands, tmp_path: Path) -> None:
    new = tmp_path / "filtered.jsonl"
    shown = commands.succeed("stopping", f"--log={log}", "--filter=qvalue:0.5", f"--filtered={new}")
    assert "steps: " in shown
    assert retrieval_log.read(new) == [filter_chunks("qvalue", row, 0.5) for row in ROWS]
    again = commands.run("stopping", f"--log={log}", "--filter=none", f"--filtered={new}")
    assert "exists already" in refusal(again)


def test_a_log_is_read_without_being_changed(log: Path) -> None:
    torn = log.read_bytes() + b'{"id": "half'
    log.write_bytes(torn)
    assert retrieval_log.read(log) == ROWS
    assert log.read_bytes() == torn


def test_refusals(log: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(InputError, match="has no rows"):
        stopping._read("log", str(empty))
    with pytest.raises(InputError, match="is no file"):
        stopping._read("log", str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="give the retrieval log"):
        stopping._read("log", None)
    uneven = tmp_path / "uneven.jsonl"
    retrieval_log.append(uneven, [dataclasses.replace(ROWS[0], q_values=[])])
    with pytest.raises(InputError, match="lists of different lengths"):
        stopping._read("log", str(uneven))
    with pytest.raises(InputError, match="too few"):
        stopping.halves(ROWS[:1])


def test_command_refusals(log: Path, commands: Commands) -> None:
    assert "same file" in refusal(commands.run("stopping", f"--log={log}", f"--test={log}"))
    unknown = commands.run("stopping", f"--log={log}", "--filter=best", "--filtered=new.jsonl")
    assert "'best' is unknown" in refusal(unknown)
