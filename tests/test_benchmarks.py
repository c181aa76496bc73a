"""The contract of the benchmarks: a table, a JSON object as the last line, the exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import SUITES
from benchmarks.report import Case, show

ROOT = Path(__file__).resolve().parents[1]
KEYS = {"case", "value", "unit", "peer", "ratio", "target", "holds", "details"}


def test_last_line_is_one_json_object(capsys):
    details = {"model FLOPs": 1.5e9, "encoder": "MiniLM"}
    cases = [
        Case("a", 2.0, "s", peer=4.0, ratio=2.0, target="< 3", holds=True, details=details),
        Case("b", 1.0, ""),
    ]
    assert show("quality", cases) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert {"suite", "machine", "date", "cases"} == set(result)
    assert [set(case) for case in result["cases"]] == [KEYS, KEYS]
    assert result["cases"][0]["ratio"] == 2.0
    assert result["cases"][0]["details"] == details
    assert "  model FLOPs  1.5e+09" in shown
    assert "  encoder      MiniLM" in shown


def test_missed_target_is_not_an_error_but_a_case_that_could_not_run_is(capsys):
    assert show("quality", [Case("a", 2.0, "s", target="< 1", holds=False)]) == 0
    assert show("quality", [Case("a", None, "s")]) == 1
    assert "NO" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_quick_suite_runs(suite):
    command = [sys.executable, "-m", "benchmarks", "--suite", suite, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert all(case["value"] is not None for case in result["cases"])
