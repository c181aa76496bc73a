"""Stored figures: merged by day and machine; the page shows the newest of an idle machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from benchmarks.report import Case, slug, store
from benchmarks.results import BEGIN, BUSY, END, Row, newest, page, with_table


def write(folder: Path, date: str, idle: bool, *cases: tuple[str, float]) -> None:
    rows = [{"case": name, "value": value, "unit": "s", "peer": None} for name, value in cases]
    file: dict[str, Any] = {"machine": "AMD EPYC, 2 cores", "date": date, "idle": idle}
    (folder / "speed").mkdir(parents=True, exist_ok=True)
    (folder / "speed" / f"{date}-amd-epyc.json").write_text(json.dumps(file | {"cases": rows}))


def test_runs_of_one_day_are_one_file(tmp_path: Path) -> None:
    first = store("speed", [Case("a", 1.0, "s"), Case("b", 2.0, "s")], 0.0, folder=tmp_path)
    again = store("speed", [Case("b", 3.0, "s"), Case("c", None, "s")], 9.0, folder=tmp_path)
    assert first == again
    stored = json.loads(first.read_text())
    assert {case["case"]: (case["value"], case["idle"]) for case in stored["cases"]} == {
        "a": (1.0, True),
        "b": (3.0, False),
    }
    assert stored["packages"]["jax"]


def test_the_newest_figure_of_an_idle_machine_is_shown(tmp_path: Path) -> None:
    write(tmp_path, "2026-11-01", True, ("a", 1.0), ("b", 1.0))
    write(tmp_path, "2026-11-02", True, ("a", 2.0))
    write(tmp_path, "2026-11-03", False, ("a", 3.0), ("c", 3.0))
    values = {name: figure["value"] for name, figure in newest("speed", tmp_path).items()}
    assert values == {"a": 2.0, "b": 1.0, "c": 3.0}
    shown = page([Row("A", "speed", "a"), Row("C", "speed", "c")], tmp_path)
    assert "| A | 2 s |" in shown
    assert BUSY in next(line for line in shown.splitlines() if line.startswith("| C"))


def test_a_row_may_stand_beside_another_case(tmp_path: Path) -> None:
    write(tmp_path, "2026-11-01", True, ("trained", 0.5), ("untrained", 0.25))
    listed = [Row("Q-RAG", "speed", "trained", beside="untrained", in_readme=True)]
    assert "| Q-RAG | 0.5 s | 0.25 s |" in page(listed, tmp_path)
    readme = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", listed, tmp_path)
    assert "| Q-RAG | 0.5 s |" in readme
    assert "old" not in readme
    assert readme.startswith("before")
    assert readme.endswith("after\n")
    assert with_table(readme, listed, tmp_path) == readme


def test_a_page_is_a_page(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most"):
        page([Row(str(n), "speed", str(n)) for n in range(results.MOST + 1)], tmp_path)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("AMD EPYC", "amd-epyc"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon"),
        ("NVIDIA H200", "nvidia-h200"),
    ],
)
def test_machines_have_short_names(name: str, short: str) -> None:
    assert slug(name) == short
