"""The command that cuts a retrieval log down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.chunk_filters import chunk_filter
from qrag_jax.metrics.facts import summarise
from qrag_jax.runtime.locks import log_locks
from tests.entry_points import Commands, refusal
from tests.retrieval_logs import played_rows, write_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", played_rows(20, seed=1))


def test_writes_the_filtered_rows_with_their_origin(
    log: Path, tmp_path: Path, commands: Commands
) -> None:
    before = log.read_bytes()
    new, facts = tmp_path / "new" / "cut.jsonl", tmp_path / "facts.jsonl"
    arguments = ("--filter=qvalue", "--threshold=0.45")
    out = commands.succeed("filter_log", f"--log={log}", *arguments, f"--out={new}")
    rows = retrieval_log.read(log)
    kept = [chunk_filter("qvalue", {"threshold": 0.45})(row) for row in rows]
    assert retrieval_log.read(new) == kept
    assert log.read_bytes() == before
    meta = retrieval_log.read_meta(log)
    applied = {"name": "qvalue", "threshold": 0.45}
    assert retrieval_log.read_meta(new) == meta | {
        "filtered_from": str(log),
        "filters": [applied],
    }
    for label, shown in (("before", rows), ("after", kept)):
        (line,) = (line for line in out.splitlines() if line.startswith(label))
        scores = summarise(shown)
        for name in ("fact_f1", "fact_precision", "fact_recall", "fact_em", "steps"):
            assert f"{scores[name]['mean']:.3f} [{scores[name]['low']:.3f}" in line

    # What was filtered may be filtered again, but no threshold is tuned on it.
    commands.succeed("filter_log", f"--log={new}", "--filter=gt", f"--out={facts}")
    assert retrieval_log.read_meta(facts)["filters"] == [applied, {"name": "gt"}]
    assert [row.pred_idx for row in retrieval_log.read(facts)] == [
        sorted(row.sf_idx) for row in rows
    ]
    text = refusal(commands.run("tune_stopping", f"--log={new}"))
    assert f"{new} is a filtered log; give the log that it was made from" in text
    text = refusal(
        commands.run("filter_log", f"--log={facts}", *arguments, f"--out={tmp_path / 'x'}")
    )
    assert "has 0 Q values for" in text
    assert not (tmp_path / "x").exists()


def test_two_at_once_are_refused(log: Path, tmp_path: Path, commands: Commands) -> None:
    out = tmp_path / "new.jsonl"
    with log_locks(out):
        text = refusal(commands.run("filter_log", f"--log={log}", "--filter=gt", f"--out={out}"))
    assert f"{out} is being written by process {os.getpid()} on " in text
    assert not out.exists()


def test_refusals(log: Path, tmp_path: Path, commands: Commands) -> None:
    def says(*arguments: str) -> str:
        return refusal(commands.run("filter_log", *arguments))

    new = tmp_path / "new.jsonl"
    both = (f"--log={log}", f"--out={new}")
    assert "give --log=LOG, --filter=NAME and --out=NEW.jsonl" in says(*both)
    assert "'best' is unknown; use one of none, qvalue" in says(*both, "--filter=best")
    assert "qvalue needs threshold" in says(*both, "--filter=qvalue")
    assert "gt takes no steps" in says(*both, "--filter=gt", "--steps=1")
    assert "steps of the chunk filter" in says(*both, "--filter=retrieval_step", "--steps=-2")
    assert "--threshold is 'x'; give a number." in says(*both, "--filter=qvalue", "--threshold=x")
    missing = f"--log={tmp_path / 'no.jsonl'}"
    assert "cannot be read" in says(missing, both[1], "--filter=none")
    before = log.read_bytes()
    assert "exists already; delete it" in says(both[0], f"--out={log}", "--filter=none")
    assert log.read_bytes() == before
    under = f"--out={log}/below.jsonl"
    assert "cannot be written" in says(both[0], under, "--filter=none")
    assert not new.exists()
