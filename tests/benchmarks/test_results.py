"""The suites: their last line is JSON; figures are stored by day, and the newest are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import SUITES
from benchmarks.report import Case, show, slug
from benchmarks.results import BEGIN, BUSY, END, Row, listed, newest, page, with_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_a_quick_run_of_each_suite(suite: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", suite, "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for case in json.loads(done.stdout.splitlines()[-1])["cases"]:
        assert case["value"] is not None
        # Quick sizes have no targets of time: ours and the peer's results are equal.
        assert suite != "speed" or case["holds"] is not False, case


def test_the_last_line_is_json_and_a_missed_target_no_error(capsys: Any) -> None:
    cases = [
        Case("a", 2.0, "s", peer=4.0, ratio=2.0, target="< 3", holds=False, details={"n": 1.5}),
        Case("b", 1.0, ""),
    ]
    assert show("quality", cases) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"suite", "machine", "date", "cases"} == set(result)
    (first, second) = result["cases"]
    assert (first["ratio"], first["holds"], first["details"]) == (2.0, False, {"n": 1.5})
    assert first.keys() == second.keys()
    assert show("quality", [Case("a", None, "s")]) == 1  # it could not run


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").rglob("*.json")))
def test_stored_figures_have_the_form_of_cases(path: Path) -> None:
    kept = json.loads(path.read_text())
    assert {"suite", "machine", "date", "cases"} <= kept.keys()
    assert path.parent.name == kept["suite"] in SUITES
    assert path.name == f"{kept['date']}-{slug(kept['machine'])}.json"
    names = [case["case"] for case in kept["cases"]]
    assert len(names) == len({*names})
    for case in kept["cases"]:
        low, high = (case.get("details", {}).get(name) for name in ("low", "high"))
        assert low is None or low <= case["value"] <= high
    # What is shown is one of them.
    assert {row.case for row in listed() if row.suite == kept["suite"]} <= {*newest(kept["suite"])}


def write(folder: Path, date: str, idle: bool, *cases: tuple[str, float]) -> None:
    rows = [{"case": name, "value": value, "unit": "s", "peer": None} for name, value in cases]
    file: dict[str, Any] = {"machine": "AMD EPYC, 2 cores", "date": date, "idle": idle}
    (folder / "speed").mkdir(parents=True, exist_ok=True)
    (folder / "speed" / f"{date}-amd-epyc.json").write_text(json.dumps(file | {"cases": rows}))


def test_the_newest_figure_of_an_idle_machine_is_shown(tmp_path: Path) -> None:
    write(tmp_path, "2026-11-01", True, ("a", 1.25), ("b", 1.0))
    write(tmp_path, "2026-11-02", True, ("a", 2.25))
    write(tmp_path, "2026-11-03", False, ("a", 3.25), ("c", 3.75))
    values = {name: figure["value"] for name, figure in newest("speed", tmp_path).items()}
    assert values == {"a": 2.25, "b": 1.0, "c": 3.75}
    rows = [Row("A", "speed", "a", compared="b", in_readme=True), Row("C", "speed", "c")]
    of_a, of_c = (line for line in page(rows, tmp_path).splitlines() if line[:3] in ("| A", "| C"))
    assert "2.25" in of_a
    assert (BUSY in of_a, BUSY in of_c) == (False, True)
    readme = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", rows, tmp_path)
    assert "2.25" in readme
    assert "old" not in readme
    assert "3.75" not in readme
    assert (readme.startswith("before"), readme.endswith("after\n")) == (True, True)
    assert with_table(readme, rows, tmp_path) == readme
