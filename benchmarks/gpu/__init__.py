"""Programs compiled for H100s and TPUs that are not here: do they compile, fit, and use the device?

Rows are recipes of configs/ at their full size (`recipes`), on one device and on eight; of each row
all programs of the training are compiled from shapes alone, and the exact search over Wikipedia's
passages. `make gpu` makes the environment with JAX's CUDA packages, `make tpu` adds libtpu; where
it is there, the suite uses it. All rows take hours: `--only` takes those in whose names, such as
h100/q_rag/e5/1x8x1, a regular expression is found. `--quick`: a tiny HARR and a tiny search, for
H100s or, without the CUDA packages, for this machine's CPU.

A program passes if it compiles and fits; cuDNN's fused attention computes every layer, forward and
backward; no product has float32 factors but those that are meant to; nothing waits for the host;
sums have a fixed order; and the buffers of the whole state are reused. `--run` measures on a GPU
(`measured`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.recipes import CPU, REFUSED, chosen, row_names
from benchmarks.report import ROOT, Case
from qrag_jax.errors import InputError
from qrag_jax.runtime.aot import CUDA, MEMORY_SHARE, SHARE_OF_PEAK, TARGETS, TPU, least_seconds

GIB = 2**30
OWN = ROOT / ".venv-gpu" / "bin" / "python"  # the environment of `make gpu`
MODELS_FOLDER = ROOT / "runs" / "benchmarks" / "gpu" / "models"
DEVICES = 8  # of the CPU, if programs are compiled for it
DOLLARS_AN_HOUR = 3.0  # of an H100, an assumption
MOST_SCORES = 0.25  # of a batch's, that may exist at once where there are so many:
MANY_SCORES = 2**30


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """The cases of the suite.

    Args:
        only: regular expressions; rows in whose names one is found are compiled, all without any.

    Raises:
        InputError: no package compiles for any of the rows, or `only` fits no row.
    """
    target = "h100" if not quick or _compiles_for_gpus() else CPU
    if target == CPU:
        print("JAX's CUDA packages are missing: programs are compiled for this machine's CPU.")
    cases: list[Case] = []
    refused: list[str] = []
    for row in chosen(row_names(quick, target), only):
        try:
            programs = compiled(row)
        except InputError as error:
            refused.append(f"{row}: {error}")
            print(f"left out: {refused[-1]}", flush=True)
            continue
        for program in programs:
            outcome = program.get("failed") or f"compiled in {program['compiled_s']:.0f} s"
            print(f"{row}/{program['program']}: {outcome}", flush=True)
            cases += cases_of(program)
    if not cases:
        raise InputError(refused[0].partition(": ")[2])
    return cases


def compiled(row: str) -> list[dict[str, Any]]:
    """What `compiling` finds in the programs of a row, in a process of its own.

    Raises:
        InputError: the packages that compile for it are missing, or the recipe cannot be opened.
    """
    python = str(OWN) if OWN.exists() else sys.executable
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA warns of every long compilation
    }
    command = [python, "-m", "benchmarks.gpu.compiling", row, str(MODELS_FOLDER)]
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would fill up
        done = subprocess.run(  # noqa: S603
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it wrote nothing"])[-1]
    if done.returncode == REFUSED:
        raise InputError(last.removeprefix("error: "))
    if done.returncode:  # the compiler itself ended; it may have needed too much memory
        return [{"row": row, "program": "all", "failed": f"status {done.returncode}: {last}"}]
    programs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return programs


def _compiles_for_gpus() -> bool:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return OWN.exists() or any(map(importlib.util.find_spec, plugins))


def cases_of(row: dict[str, Any]) -> list[Case]:
    """The figures of one program: what is wrong with it, its bytes, seconds, FLOPs and price."""
    name, wrong = f"{row['row']}/{row['program']}", faults(row)
    of_faults = Case(
        f"{name}: faults",
        len(wrong),
        "faults",
        target="0",
        holds=not wrong,
        details={str(number): text for number, text in enumerate(wrong, 1)},
    )
    if "failed" in row:
        return [of_faults]
    needed, target = total(row) / GIB, TARGETS.get(row["target"])
    most = MEMORY_SHARE * target.memory / GIB if target else None
    return [
        of_faults,
        Case(
            f"{name}: memory",
            needed,
            "GiB per device",
            target=None if most is None else f"at most {most:.1f}",
            holds=None if most is None else needed <= most,
            details={
                "arguments, GiB": row["arguments"] / GIB,
                "new results, GiB": row["outputs"] / GIB,
                "temporaries, GiB": row["temporaries"] / GIB,
            },
        ),
        Case(
            f"{name}: compiling",
            row["compiled_s"],
            "s",
            details={"lines of HLO": row["lines"], "sends": ", ".join(row["sends"])},
        ),
        Case(f"{name}: products", row["flops"] / 1e12, "TFLOP per device", details=price(row)),
    ]


def total(row: dict[str, Any]) -> int:
    """Bytes on a device while the program runs."""
    return row["arguments"] + row["outputs"] + row["temporaries"]


def price(row: dict[str, Any]) -> dict[str, float | str]:
    """What an update's FLOPs take at `SHARE_OF_PEAK`; nothing for devices of unknown peaks."""
    least = least_seconds(row["target"], row["flops"], row["dtype"])
    if least is None:
        return {}
    seconds = least / SHARE_OF_PEAK
    costs: dict[str, float | str] = {f"at {SHARE_OF_PEAK:.0%} of the peak, ms": seconds * 1e3}
    if row["learns"]:
        devices = row["mesh"][0] * row["mesh"][1] * row["mesh"][2]
        hours = seconds * row["steps"] * devices / 3600
        costs |= {"updates": row["steps"], "GPU-hours": hours, "dollars": DOLLARS_AN_HOUR * hours}
    return costs


def faults(row: dict[str, Any]) -> list[str]:
    """One sentence for each thing that a program does and should not; nothing if all is well."""
    if "failed" in row:
        return [f"does not compile: {row['failed']}"]
    wrong, layers, platform = [], row["layers"], row["platform"]
    if platform == CUDA:
        if row["learns"] and row["attention_backward"] < layers:
            wrong.append(f"{row['attention_backward']} fused gradients for {layers} layers")
        if row["attention_forward"] < layers:
            wrong.append(f"{row['attention_forward']} fused attentions for {layers} layers")
        if row["attention_unfused"]:
            wrong.append(f"{row['attention_unfused']} products of attention that is not fused")
    if platform in (CUDA, TPU) and row["float32_unnamed"]:
        wrong.append(f"a product of float32: {row['float32_unnamed'][0]}")
    if row["asks_host"]:
        wrong.append(f"waits for the host in {row['asks_host'][0]}")
    if row["nondeterministic"]:
        wrong.append(f"adds in no fixed order in {row['nondeterministic'][0]}")
    if row["donated"] < row["state_arrays"] - 1:  # the constant key may be passed through
        wrong.append(f"{row['donated']} of {row['state_arrays']} arrays of the state are reused")
    if row["logits"]:
        wrong.append(f"{row['logits']} arrays of all tokens × vocabulary")
    share = row.get("largest_scores", 0.0)
    if row.get("scores", 0) >= MANY_SCORES and share > MOST_SCORES:
        wrong.append(f"holds {share:.0%} of a batch's scores at once")
    return wrong
