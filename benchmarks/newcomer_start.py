"""Times the first minutes: a fresh clone and `make train`, or a fresh wheel and `qrag train`.

Nothing is installed before. What pip and the hub take depends on the network, so it is told apart
from what the commands take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import ROOT
from benchmarks.report import Case

_LOOK_EVERY = 0.5  # seconds between looks at a run's metrics
FIRST_POINT, WHOLE = 180.0, 360.0  # seconds: what is asked of the start
RUN = Path("runs/quickstart")


def started() -> dict[str, Any]:
    """`make install`, then `make train`, in a clone of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "qrag_jax"
        done(["git", "clone", "--quiet", str(ROOT), str(clone)], Path(folder))
        installed = done(["make", "install"], clone)
        return {"installed": installed, **_timed(["make", "train"], clone)}


def from_wheel() -> dict[str, Any]:
    """A wheel of the checkout in a new environment, and the quick start in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        python, qrag = place / "env" / "bin" / "python", place / "env" / "bin" / "qrag"
        began = time.monotonic()
        done([str(python), "-m", "pip", "--quiet", "install", str(wheel_in(place))], place)
        installed = time.monotonic() - began
        empty = place / "empty"
        empty.mkdir()
        words = [str(qrag), "train", "--config=configs/quickstart.py", f"--workdir={RUN}"]
        found = _timed(words, empty)
        found["scored"] = done([str(qrag), "evaluate", f"--workdir={RUN}"], empty)
        return {"installed": installed, **found}


def wheel_in(place: Path) -> Path:
    """A wheel of the checkout, built in a new environment, `env` in this folder."""
    done([sys.executable, "-m", "venv", str(place / "env")], place)
    pip = [str(place / "env" / "bin" / "python"), "-m", "pip", "--quiet"]
    done([*pip, "wheel", "--no-deps", "--wheel-dir", "made", str(ROOT)], place)
    (wheel,) = (place / "made").glob("*.whl")
    return wheel


def start_cases(results: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """Time to the first point of a learning curve, and of the whole quick start."""
    cases = []
    for name, row in results.items():
        about = "a fresh clone" if name == "start" else "a fresh wheel"
        point, whole = row["first_point"], row["whole"] + row.get("scored", 0.0)
        for what, seconds, most in (
            ("to the second evaluation, the first after training", point, FIRST_POINT),
            ("the whole quick start, scored", whole, WHOLE),
        ):
            holds = seconds <= most
            case = Case(f"{about}: {what}", seconds, "s", target=f"{most:.0f}", holds=holds)
            cases.append(case)
        told = {"first evaluation, s": row["untrained_point"], "fact EM": row["scores"][-1]}
        cases.append(Case(f"{about}: pip", row["installed"], "s", details=told))
    return cases


def done(words: Sequence[str], folder: Path) -> float:
    """Seconds of a command, which must succeed.

    Raises:
        RuntimeError: it failed.
    """
    began = time.monotonic()
    done = subprocess.run(  # noqa: S603
        words, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {done.stderr[-2000:]}")
    return time.monotonic() - began


def clean_environment() -> dict[str, str]:
    """That of a user who has nothing set: no caches of ours, no path to the checkout."""
    ours = ("PYTHONPATH", "QRAG_CACHE", "JAX_COMPILATION_CACHE_DIR", "VIRTUAL_ENV", "MAKEFLAGS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def _timed(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Seconds until the evaluations of a training are in its metrics, and until it has ended."""
    began, points, over = time.monotonic(), list[tuple[float, float]](), threading.Event()
    file = folder / RUN / "metrics.jsonl"

    def watch() -> None:
        while not over.wait(_LOOK_EVERY):
            scores = _scores(file)
            points.extend((time.monotonic() - began, each) for each in scores[len(points) :])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        whole = done(words, folder)
    finally:
        over.set()
        thread.join()
    scores = _scores(file)
    points += [(whole, each) for each in scores[len(points) :]]
    if len(points) < 2:
        raise RuntimeError(f"{' '.join(words)} left {len(points)} evaluations in {file}")
    return {
        "untrained_point": points[0][0],
        "first_point": points[1][0],
        "whole": whole,
        "scores": scores,
    }


def _scores(file: Path) -> list[float]:
    """Fact EM of the evaluations so far."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row["eval/fact_em"] for row in rows if "eval/fact_em" in row]
