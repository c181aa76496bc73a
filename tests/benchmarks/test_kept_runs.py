"""Runs and results of long suites belong to one version of the code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import kept_runs
from benchmarks.kept_runs import ROOT, SUITES, Kept, begin_anew, code_version
from qrag_jax.errors import InputError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the code."""
    for name in ("qrag_jax", "configs", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    return tmp_path / "tree"


def kept(tree: Path) -> Kept:
    return Kept.of("learn", tree, tree / "runs")


def test_version_is_that_of_the_trainer(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = code_version(tree)
    assert version == code_version(ROOT)
    (tree / "README.md").write_text("changed")
    (tree / "benchmarks" / "learn.py").write_text("changed")
    assert code_version(tree) == version
    changed = {version}
    for name in ("qrag_jax/algorithms/returns.py", "configs/common.py", "qrag_jax/llm/llm.py"):
        path = tree / name
        path.write_text((path.read_text() if path.exists() else "") + "\n# changed\n")
        changed.add(code_version(tree))
    (tree / "configs" / "common.py").rename(tree / "configs" / "renamed.py")
    changed.add(code_version(tree))
    monkeypatch.setattr(kept_runs.importlib.metadata, "version", lambda name: "0.0")
    changed.add(code_version(tree))
    assert len(changed) == 6


def test_a_finished_run_of_older_code_is_not_taken_up(tree: Path) -> None:
    started = []

    def part() -> dict[str, Any]:
        started.append(kept(tree).runs)
        return {"fact_em": len(started)}

    assert kept(tree).finish({"a": part})["a"]["fact_em"] == 1
    assert kept(tree).finish({"a": part})["a"]["fact_em"] == 1  # the same code: it goes on
    with (tree / "qrag_jax" / "training.py").open("a") as file:
        file.write("# another version\n")
    assert kept(tree).finish({"a": part})["a"]["fact_em"] == 2
    assert len(set(started)) == 2  # the training begins in a folder of its own


def test_results_of_a_changed_suite_are_made_anew_from_the_same_runs(tree: Path) -> None:
    before = kept(tree)
    before.finish({"a": lambda: {"x": 1}})
    (tree / "benchmarks" / "long.py").write_text("changed")
    after = kept(tree)
    assert after.runs == before.runs
    assert after.finish({"a": lambda: {"x": 2}})["a"]["x"] == 2
    assert code_version(tree, SUITES) != code_version(ROOT, SUITES)


def test_results_stay_when_what_shows_them_is_changed(tree: Path) -> None:
    shows = tree / "benchmarks" / "which_cases" / "plot.py"
    showing = [shows.relative_to(tree).as_posix()]

    def kept_for() -> Kept:
        return Kept.of("which", tree, tree / "runs", showing=showing)

    def part() -> dict[str, Any]:
        shows.write_text("changed while it runs")
        return {"x": 1}

    before = kept_for()
    made = before.finish({"a": part})["a"]
    assert made["trainer"] == code_version(tree)
    assert kept_for().finish({"a": lambda: {"x": 2}})["a"]["x"] == 1
    (tree / "benchmarks" / "long.py").write_text("changed")
    assert kept_for().results != before.results


def test_parts_are_run_by_name_and_kept(tree: Path) -> None:
    calls = []

    def part(name: str) -> Any:
        def run() -> dict[str, Any]:
            calls.append(name)
            if name == "broken" and calls.count(name) == 1:
                raise RuntimeError("killed")
            return {"name": name}

        return run

    parts = {name: part(name) for name in ("a", "broken", "c")}
    here = kept(tree)
    assert {*here.finish(parts, ["c"])} == {"c"}
    with pytest.raises(RuntimeError):
        here.finish(parts)
    found = here.finish(parts)
    assert {name: result["name"] for name, result in found.items()} == {n: n for n in parts}
    assert calls == ["c", "a", "broken", "broken"]
    assert {"part_seconds", "machine", "date"} <= found["a"].keys()
    assert json.loads((here.results / "a.json").read_text()) == found["a"]
    with pytest.raises(InputError, match=r"--only=d: the parts are a, broken, c"):
        here.finish(parts, ["d"])


def test_a_quick_run_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "quick"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text("")
    assert begin_anew(run) == run
    assert not run.exists()
    begin_anew(run)
