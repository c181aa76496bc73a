"""Measures how long a user waits for the real training command, started cold and once more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ours import DATA
from benchmarks.report import Case
from benchmarks.speed_cases.setting import Setting

MOST_WAITING = 0.03
STEPS = 8
WAIT = "speed/input_wait_share"


def entry_point_cases(setting: Setting, minilm: bool) -> list[Case]:
    """Input wait, compilation and time to the first step of `python -m qrag_jax.train`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold, cold_seconds = _train(setting, folder, "cold", minilm)
        warm, warm_seconds = _train(setting, folder, "warm", minilm)
    waits = [row[WAIT] for row in cold if WAIT in row][1:]  # the first line includes compilation
    waiting = sum(waits) / len(waits)
    encoder = "MiniLM" if minilm else "random weights of MiniLM's width"
    cases = [
        Case(
            f"training command, {encoder}: share of time waiting for input",
            waiting,
            "share",
            target=f"< {MOST_WAITING}",
            holds=waiting < MOST_WAITING,
            details={"most on a line": max(waits), "steps": STEPS - 1},
        )
    ]
    runs = {"cold start": (cold, cold_seconds), "second start": (warm, warm_seconds)}
    for start, (rows, seconds) in runs.items():
        logged = next(row for row in rows if WAIT in row)
        first = next(row for row in rows if "speed/time_to_first_step" in row)
        details = {
            "whole command, s": seconds,
            "programs": logged["speed/compilations"],
            "of them from the cache": first["speed/compilation_cache_hits"],
        }
        seconds_by_name = {
            "compilation": logged["speed/compilation_seconds"],
            "time to first step": first["speed/time_to_first_step"],
        }
        for what, value in seconds_by_name.items():
            cases.append(Case(f"training command, {start}: {what}", value, "s", details=details))
    return cases


def _train(
    setting: Setting, folder: Path, name: str, minilm: bool
) -> tuple[list[dict[str, Any]], float]:
    """Runs the command; returns its lines of metrics.jsonl about speed, and its seconds."""
    path = DATA / "hotpotqa"
    fields: dict[str, Any] = {"data.path": path}
    if not path.exists():
        made = {"data.synthetic.train": 512, "data.synthetic.dev": 32}
        fields = {"data.path": "synthetic", **made}
    fields |= {
        "data.cache": folder / "cache",
        "data.limit": 512,
        "eval.samples": 16,
        "train.steps": STEPS,
        "train.batch_size": 256 if setting.gpu else 4,
        "train.log_every": 1,
        "train.eval_every": STEPS,
        "train.checkpoint_every": STEPS,
    }
    if not minilm:
        fields |= {"encoder.path": "", "encoder.scratch.hidden": 384, "encoder.scratch.heads": 12}
    workdir = folder / name
    command = [sys.executable, "-m", "qrag_jax.train", "--config=configs/hotpotqa.py:minilm"]
    command += [f"--workdir={workdir}", *(f"--config.{key}={v}" for key, v in fields.items())]
    # Both starts share compiled programs but not the run: the second one does not resume.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    start = time.monotonic()
    done = subprocess.run(  # noqa: S603
        command, env=environment, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - start
    if done.returncode:
        raise RuntimeError(f"the training command failed:\n{done.stderr}")
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if any(key.startswith("speed/") for key in row)], seconds
