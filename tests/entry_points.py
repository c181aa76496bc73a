"""Runs the entry points as a user does, each in its own process, for their tests."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.fork_server import Forks

ROOT = Path(__file__).resolve().parents[1]

# The run that many tests share; a run with the same fields needs no compilation of its own.
STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 24, 4, 6
SHARED = (
    "--config=configs/hotpotqa.py:tiny",
    f"--config.train.steps={STEPS}",
    "--config.train.log_every=1",
    f"--config.train.checkpoint_every={CHECKPOINT_EVERY}",
    f"--config.train.eval_every={EVAL_EVERY}",
    "--config.encoder.length_buckets=1",
    "--config.encoder.block_sizes=1",
)
SAMPLES = 4  # questions scored of the run that is exported
FLOAT32 = "--config.encoder.dtype=float32"  # as torch computes; "auto" may be bfloat16


@dataclasses.dataclass(frozen=True)
class Commands:
    """Starts `qrag_jax` modules offline, with caches in `folder` that all tests share."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a machine without torch, like the users' machines."""
        path = [str(ROOT / "tests" / "without_torch"), os.environ.get("PYTHONPATH", "")]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "QRAG_CACHE": str(self.folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs"),
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **own}

    @functools.cached_property
    def forks(self) -> Forks:
        """The fork server of the commands."""
        return Forks(self.folder, self.environment)

    def start(self, module: str, *arguments: str, **options: Any) -> Any:
        """Starts `python -m qrag_jax.MODULE` in the repository root; returns its process.

        The process is forked from one that has imported jax and the rest. It is a new process if
        it has options besides `env`, or if its environment changes what imports read.
        """
        environment = options.get("env", self.environment)
        if not options.keys() - {"env"} and self.forks.can(environment):
            return self.forks.start(f"qrag_jax.{module}", [*arguments], ROOT, environment)
        return subprocess.Popen(
            [sys.executable, "-m", f"qrag_jax.{module}", *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **{"env": self.environment, **options},
        )

    def run(self, module: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Like `start`, but waits for the end; returns status and output."""
        process = self.start(module, *arguments, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def succeed(self, module: str, *arguments: str, **options: Any) -> str:
        """Like `run`, but the command must exit with 0; returns its standard output."""
        result = self.run(module, *arguments, **options)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout


def refusal(result: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The one sentence with which a command refused its input."""
    assert result.returncode == status, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr[-3000:]
    assert result.stderr.splitlines()[-1] == errors[0]
    return errors[0]


def metric_lines(workdir: Path) -> list[dict[str, Any]]:
    """The complete lines of `metrics.jsonl`; a line that is still being written is left out."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def log_rows(workdir: Path) -> list[dict[str, Any]]:
    """The rows of the log that `evaluate --checkpoint=last` wrote into a run's folder."""
    (log,) = workdir.glob("eval/last-*/eval_seed42.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(workdir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training line, in the order written."""
    lines = metric_lines(workdir)
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def saved_state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of the training state saved at `step`, by its name, as NumPy."""
    folder = workdir.absolute() / "checkpoints" / "last" / str(step) / "state"
    with warnings.catch_warnings(), ocp.PyTreeCheckpointer() as checkpointer:
        warnings.simplefilter("ignore")  # the state was saved on this machine
        saved = checkpointer.metadata(folder).item_metadata.tree
        # A run of other devices, or of several hosts, is read, too.
        arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        tree = checkpointer.restore(folder, restore_args=arrays)
    leaves = ocp.tree.to_flat_dict(tree, sep="/")
    leaves["key"] = jax.random.key_data(leaves["key"])
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}
