"""Puts the prediction of a step beside real trainings of 1, 2 and 4 processes of this machine.

The speeds of the machine's processor and of Gloo's sums between processes are measured in the same
run. Processes share the processor, so each has its part of it (`scaling_model.shared`). Nothing is
fitted: what the model leaves out (the host's Python, other programs of the machine) is its error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import ROOT
from benchmarks.scaling_links import links_from
from benchmarks.scaling_model import shared
from benchmarks.scaling_programs import REFUSED, Asked, speeds_json
from qrag_jax.errors import InputError
from qrag_jax.runtime.device_speeds import Speeds
from qrag_jax.runtime.step_time import collective_seconds

CONFIG = "quickstart.py:tiny"
PROCESSES, QUICK_PROCESSES = (1, 2, 4), (2,)
EVERY = 5  # steps of a line of the log
# A width at which products take more than the starts of kernels, and a batch for four processes.
FIELDS = {"encoder.scratch.layers": 2, "encoder.scratch.hidden": 128, "encoder.scratch.heads": 4}
BATCH, STEPS = 64, 25
QUICK_FIELDS = {"encoder.scratch.layers": 1, "encoder.length_buckets": 1, "encoder.block_sizes": 1}
QUICK_BATCH, QUICK_STEPS = 16, 20
DATA, FSDP = "data", "fsdp"
NO_CACHE: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Setting:
    """The training that is measured.

    Attributes:
        fields: of the config, by dotted names.
        batch: questions of all processes together.
        steps: of the training.
        processes: in how many processes it is run.
        split: whether it is run with parameters split over the processes, too.
    """

    fields: Mapping[str, Any]
    batch: int
    steps: int
    processes: tuple[int, ...]
    split: bool


FULL = Setting(FIELDS, BATCH, STEPS, PROCESSES, split=True)
QUICK = Setting(QUICK_FIELDS, QUICK_BATCH, QUICK_STEPS, QUICK_PROCESSES, split=False)


def mesh_of(processes: int, axis: str) -> tuple[int, int, int]:
    """Sizes along data, fsdp and tensor."""
    return (processes, 1, 1) if axis == DATA else (1, processes, 1)


def measured_step(
    setting: Setting, processes: int, axis: str, folder: Path, cache: Mapping[str, str]
) -> dict[str, float]:
    """Seconds of a step in steady state: of the log's lines behind the first one.

    Raises:
        InputError: the training failed, or was too short.
    """
    with tempfile.TemporaryDirectory(dir=folder) as within:
        workdir = Path(within) / "run"
        given = {
            **setting.fields,
            "train.batch_size": setting.batch,
            "train.steps": setting.steps,
            "train.log_every": EVERY,
            "train.eval_every": setting.steps,
            "train.checkpoint_every": setting.steps,
            "runtime.mesh": ",".join(map(str, mesh_of(processes, axis))),
        }
        words = [
            *("-m", "qrag_jax.train", f"--config=configs/{CONFIG}", f"--workdir={workdir}"),
            *(f"--config.{name}={value}" for name, value in given.items()),
        ]
        launched(processes, words, cache)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rates = [row[key] for row in map(json.loads, lines) if (key := "speed/steps_per_second") in row]
    return steady(rates)


def steady(rates: Sequence[float]) -> dict[str, float]:
    """Seconds of a step from the rates of a log, whose first line has what was compiled.

    Raises:
        InputError: there are fewer than three lines.
    """
    if len(rates) < 3:
        raise InputError(
            f"a log of {len(rates)} line(s) tells no steady state; train for at least {3 * EVERY} "
            "steps."
        )
    seconds = [1 / rate for rate in rates[1:]]
    return {
        "median": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "lines": float(len(seconds)),
    }


def measured_links(processes: int) -> dict[str, float]:
    """Seconds of Gloo's sums between so many processes."""
    return json.loads(_last_line(launched(processes, ["-m", "benchmarks.scaling_links"])))


def launched(processes: int, words: Sequence[str], cache: Mapping[str, str] = NO_CACHE) -> str:
    """What Python says that is started in so many processes, as a user does.

    Args:
        cache: variables of JAX's cache of compiled programs.

    Raises:
        InputError: it failed.
    """
    command = [str(ROOT / "launch" / "local.sh"), str(processes), sys.executable, *words]
    process = subprocess.Popen(  # noqa: S603
        command,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told, errors = process.communicate()
    except BaseException:
        process.terminate()  # it ends the processes that it has started
        process.wait()
        raise
    if process.returncode:
        raise InputError(
            f"{' '.join(words[:2])} in {processes} process(es) ended with status "
            f"{process.returncode}: {_last_line(errors)}"
        )
    return told


def compiled(
    asked: Asked, python: str = sys.executable, cache: Mapping[str, str] = NO_CACHE
) -> dict[str, Any]:
    """What `scaling_programs` tells of a program, in a process of its own.

    Args:
        python: of an environment that can compile it.
        cache: variables of JAX's cache of compiled programs.

    Raises:
        InputError: something that is needed is missing.
        RuntimeError: it failed.
    """
    count = 1
    for size in asked.mesh:
        count *= size
    own = "" if asked.devices else f" --xla_force_host_platform_device_count={count}"
    environment = {
        **os.environ,
        **cache,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + own,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(  # noqa: S603
        [python, "-m", "benchmarks.scaling_programs", json.dumps(dataclasses.asdict(asked))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == REFUSED:
        raise InputError(_last_line(done.stderr).removeprefix("error: "))
    if done.returncode:
        raise RuntimeError(f"{asked.config} was not compiled: {done.stderr[-2000:]}")
    return json.loads(_last_line(done.stdout))


def validated(setting: Setting, processes: int, speeds: Speeds, cores: int) -> dict[str, Any]:
    """The runs of a setting in so many processes, measured and predicted.

    Args:
        speeds: of this machine's processor, as one process finds them.
        cores: of this machine.

    Returns:
        `alone`, what `compiled` tells of one process with its part of the batch, and `rows`, one
        for each run: `processes`, `axis`, `links`, `measured` (see `steady`) and what is predicted:
        along `data` see `derived`; where the setting compiles for several processes,
        `from_program`, seconds by that program.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A program that was compiled to be estimated is not compiled again to be run.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "programs")}
        questions = setting.batch // processes
        asked = _asked(setting, mesh_of(1, DATA), questions, speeds)
        alone = compiled(asked, cache=cache if processes == 1 else NO_CACHE)
        own, links, rows = shared(speeds, processes, cores), {}, []
        if processes > 1:
            links = measured_links(processes)
            own = dataclasses.replace(own, links=links_from(processes, **links))
        for axis in (DATA, FSDP) if setting.split and processes > 1 else (DATA,):
            row: dict[str, Any] = {"processes": processes, "axis": axis, "links": links}
            if axis == DATA:
                row |= derived(alone, questions, processes, own, cores)
            if setting.split and processes > 1:
                found = compiled(_asked(setting, mesh_of(processes, axis), questions, own))
                step = found["programs"]["update"]["steps"][str(questions)]
                row |= {"from_program": step["seconds"], "exposed": step["exposed"]}
            row["measured"] = measured_step(setting, processes, axis, Path(folder), cache)
            rows.append(row)
            print(told(row), flush=True)
    return {"alone": alone, "rows": rows}


def _asked(setting: Setting, mesh: tuple[int, int, int], questions: int, speeds: Speeds) -> Asked:
    """A program of the setting for so many questions on each process."""
    given = setting.fields, mesh, "", questions, (questions,)
    return Asked(CONFIG, *given, speeds_json(speeds))


def derived(
    alone: Mapping[str, Any], questions: int, processes: int, own: Speeds, cores: int
) -> dict[str, float]:
    """The step of several processes from the program of one: its part of the processor, a ring.

    The next batch is made ready meanwhile, by one core for each process.

    Args:
        alone: what `compiled` tells of one process.
        questions: of each process.
        own: what a process has, with its links.
        cores: of the machine.
    """
    step, turns = alone["programs"]["update"]["steps"][str(questions)], max(processes / cores, 1.0)
    starts = step["parts"].get("starts of kernels", 0.0)
    compute = (step["seconds"] - starts) * processes + starts * turns
    group = tuple(range(processes))
    reduce = collective_seconds("all-reduce", alone["gradients"], group, own)
    made_ready = questions / alone["loaded"] * turns
    return {
        "predicted": max(compute + reduce, made_ready),
        "compute": compute,
        "collectives": reduce,
        "input": made_ready,
    }


def told(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    seconds = row["measured"]["median"]
    found = row["predicted"] if "predicted" in row else row["from_program"]
    return (
        f"{row['processes']} process(es) along {row['axis']}: measured {seconds * 1e3:.3g} ms a "
        f"step, predicted {found * 1e3:.3g} ms: {found / seconds:.2f} of it"
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it told nothing"])[-1]
