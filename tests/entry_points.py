"""Runs the entry points as a user does, each in its own process, for their tests."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.devices import environment_of
from tests.support.forks import AT_IMPORT, Forked

ROOT = Path(__file__).resolve().parents[1]


def flags_of(config: str, fields: str) -> tuple[str, ...]:
    """The words of a command line for a config with these fields, which blanks separate."""
    return (f"--config=configs/{config}", *(f"--config.{field}" for field in fields.split()))


# The run that many tests share; a run with the same fields needs no compilation of its own.
STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 24, 4, 6
SHARED = flags_of(
    "hotpotqa.py:tiny",
    f"train.steps={STEPS} train.log_every=1 train.checkpoint_every={CHECKPOINT_EVERY} "
    f"train.eval_every={EVAL_EVERY} encoder.length_buckets=1 encoder.block_sizes=1 "
    "encoder.scratch.layers=1",
)
SAMPLES = 4  # questions scored of the run that is exported
FLOAT32 = "--config.encoder.dtype=float32"  # as torch computes; "auto" may be bfloat16


class Course(NamedTuple):
    """A training that several tests share: its command line, its steps, and how it is scored."""

    fields: tuple[str, ...]
    steps: int
    scoring: tuple[str, ...] = ()


_SMALL_LM = (
    "train.log_every=1 train.checkpoint_every=1 model.tiny.layers=1 model.tiny.weights= "
    "model.tiny.hidden=32 model.tiny.intermediate=32 "
)
_RLVR = (
    "tools.turn_tokens=12 tools.staleness=1 questions.bridge_train=24 questions.bridge_dev=4 "
    "eval.part=all sft.steps=2 train.steps=3 train.eval_every=5 grpo.members=2"
)
_LERET = (  # of five questions one chooses, four are reported
    "questions.bridge_train=8 questions.bridge_corpus=8 questions.bridge_dev=5 "
    "train.eval_every=100 model.tiny.vocab=420 model.block_tokens=1024 tries.questions=1 "
    "tries.prompts=2 writing.k=4 writing.passage_words=8 styles.most_words=4 script.steps=12 "
    "script.batch_size=4 script.learning_rate=0.02 script.observed=False sft.steps=2 "
    "preference.steps=2 optimizer.matrices=adam"
)
_REWRITER = (
    "model.tiny.vocab=420 model.block_tokens=1024 optimizer.matrices=adam writing.query_tokens=32 "
    "script.steps=4 train.steps=3 rollout.staleness=1"
)
COURSES = {
    "q_rag": Course(SHARED, STEPS, (f"--samples={SAMPLES}",)),
    "rlvr": Course(
        flags_of("rlvr.py:tiny", _SMALL_LM + _RLVR), 5, ("--sampled=2", "--retrievers=bm25,golden")
    ),
    "leret": Course(flags_of("leret.py:tiny", _SMALL_LM + _LERET), 20),
    "deepretrieval": Course(flags_of("deepretrieval.py:tiny", _SMALL_LM + _REWRITER), 7),
}


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
            "JAX_PLATFORMS": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        return {**os.environ, **own}

    def with_devices(self, count: int) -> dict[str, str]:
        """That of a machine with so many devices."""
        return self.environment | {"XLA_FLAGS": environment_of(count)["XLA_FLAGS"]}

    def start(self, module: str, *arguments: str, **options: Any) -> Any:
        """Starts `python -m qrag_jax.MODULE` in the repository root; returns its process.

        It is forked from one that has imported jax and the rest, unless it has options besides
        `env`, or its environment changes what imports read.
        """
        own, env = self.environment, options.get("env", self.environment)
        read = [name for name in {*own, *env} if name.startswith(AT_IMPORT)]
        same = all(own.get(name) == env.get(name) for name in read)
        if not options.keys() - {"env"} and same:
            return Forked(f"qrag_jax.{module}", arguments, ROOT, env)
        return subprocess.Popen(
            [sys.executable, "-m", f"qrag_jax.{module}", *arguments],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **{"env": own, **options},
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


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_rows(workdir: Path) -> list[dict[str, Any]]:
    """The rows of the log that `evaluate --checkpoint=last` wrote into a run's folder."""
    (log,) = workdir.glob("eval/last-*/eval_seed42.jsonl")
    return json_lines(log)


def losses(workdir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training line, in the order written."""
    lines = metric_lines(workdir)
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def assert_same_state(workdir: Path, other: Path, step: int) -> None:
    """Parameters, targets, optimizer state, key and counts are equal, bit for bit."""
    one, wanted = saved_state(workdir, step), saved_state(other, step)
    assert one.keys() == wanted.keys()
    for name, value in wanted.items():
        assert one[name].dtype == value.dtype
        np.testing.assert_array_equal(one[name], value, err_msg=name)


def measures(workdir: Path) -> list[tuple[int, str, Any]]:
    """All losses, rewards and scores that a run logged; no times and rates."""
    return [
        (line["step"], name, value)
        for line in metric_lines(workdir)
        for name, value in line.items()
        if name.startswith(("train/", "eval/")) and "second" not in name
    ]


def assert_same_run(workdir: Path, reference: Path, step: int = STEPS) -> None:
    """The saved state and what was logged are equal, bit for bit."""
    assert_same_state(workdir, reference, step)
    assert measures(workdir) == measures(reference)


def wait_for_step(process: Any, workdir: Path, step: int) -> None:
    """Returns when the training line of `step` is written; the process must not end before."""
    wait_until(lambda: any(n >= step for n, _ in losses(workdir)), process)


def wait_until(true: Callable[[], Any], *processes: Any) -> None:
    """Waits until it is true; none of the processes may end before."""
    until = time.monotonic() + 200
    while not true():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def end(process: Any, number: int | None = None) -> subprocess.CompletedProcess[str]:
    """Sends the signal, and waits for the end."""
    if number is not None:
        process.send_signal(number)
    out, err = process.communicate(timeout=200)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def on_hosts(commands: Commands, module: str, *given: str, count: int = 2) -> list[Any]:
    """Starts the command on so many hosts of one device, which meet on localhost."""
    address, env = free_address(), commands.with_devices(1)
    hosts = [f"--hosts={address},{count},{number}" for number in range(count)]
    return [commands.start(module, *given, host, env=env) for host in hosts]


def free_address() -> str:
    """An address of this machine with a port that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def same_numbers(workdir: Path, other: Path) -> None:
    """The same steps once each, with the same numbers but for rounding, and the same state.

    How full blocks are depends on the number of devices; and at first policy and reference are one
    but for rounding.
    """
    of_layout = ("train/padding_share", "train/accuracy", "train/margin")
    one, two = ([m for m in measures(each) if m[1] not in of_layout] for each in (workdir, other))
    assert [place for *place, _ in one] == [place for *place, _ in two]
    for (*place, value), (*_, wanted) in zip(one, two, strict=True):
        # Over nothing there is no mean, as where no group teaches anything.
        assert value is wanted is None or value == pytest.approx(wanted, 1e-5, 1e-5), place
    step = max(step for step, _ in losses(other))
    state, wanted = saved_state(workdir, step), saved_state(other, step)
    for name, array in wanted.items():
        # Adam makes a step of whatever is left of a gradient that is 0 but for rounding.
        np.testing.assert_allclose(state[name], array, atol=1e-4, err_msg=name)


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
    if "key" in leaves:
        leaves["key"] = jax.random.key_data(leaves["key"])
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}
