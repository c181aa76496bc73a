"""PQN steps compiled for NVIDIA H100s that are not here: do they compile, fit, and use the GPU?

Shapes alone: no device, no weights, nothing is run. `make gpu` makes the environment with JAX's
CUDA packages; where it is there, the suite uses it. `--quick`: a tiny encoder.

A program passes if cuDNN's fused attention computes every layer, forward and backward; nothing
waits for the host; sums have a fixed order; the buffers of the whole state are reused; and no
collective stands in a branch or in a loop whose course may differ between devices. Products of
float32 factors are listed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory import GIB, case_name, total
from benchmarks.report import Case, print_table
from qrag_jax.errors import InputError

ROOT = Path(__file__).parents[1]
OWN = ROOT / ".venv-gpu" / "bin" / "python"
# (model, adapters, devices): GiB of a device at most, and seconds of compiling at most.
MEMORY = {
    ("Qwen3-Embedding-0.6B", False, 8): 8.0,
    ("Qwen3-Embedding-4B", False, 8): 73.0,
    ("Qwen3-Embedding-4B", True, 8): 12.0,
    ("Qwen3-Embedding-8B", True, 8): 16.0,
    ("Qwen3-Embedding-8B", True, 1): 73.0,
}
SECONDS = {"Qwen3-Embedding-0.6B": 60.0, "multilingual-e5-large": 60.0}


def run(quick: bool) -> list[Case]:
    """All cases of the suite.

    Raises:
        InputError: there is no environment with JAX's CUDA packages.
    """
    python = str(OWN) if OWN.exists() else sys.executable
    command = [python, "-m", "benchmarks.gpu_cases", *(["--quick"] if quick else [])]
    rows = []
    with subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            print(f"compiled {case_name(rows[-1])} in {rows[-1]['compiled_s']:.0f} s", flush=True)
        errors = process.stderr.read()
    if process.returncode:
        raise InputError(_last_sentence(errors))
    _show(rows)
    return [found for row in rows for found in cases_of(row)]


def faults(row: dict[str, Any]) -> list[str]:
    """What a program does that it should not; nothing if all is well."""
    found = []
    if row["attention_backward"] < row["layers"]:
        found.append(f"{row['attention_backward']} fused gradients for {row['layers']} layers")
    if row["attention_forward"] < row["layers"]:
        found.append(f"{row['attention_forward']} fused attentions for {row['layers']} layers")
    if row["asks_host"]:
        found.append(f"waits for the host in {row['asks_host'][0]}")
    if row["sends_inside_branches"]:
        found.append(f"sends inside a branch: {row['sends_inside_branches'][0]}")
    if row["nondeterministic"]:
        found.append(f"adds in no fixed order in {row['nondeterministic'][0]}")
    if row["donated"] < row["state_arrays"] - 1:  # the constant key may be passed through
        found.append(f"{row['donated']} of {row['state_arrays']} arrays of the state are reused")
    return found


def cases_of(row: dict[str, Any]) -> list[Case]:
    """The figures of one program: bytes, seconds of compiling, and what is wrong with it."""
    name, devices = case_name(row), _devices(row)
    needed, wrong = total(row) / GIB, faults(row)
    most = MEMORY.get((row["model"], row["lora"], devices))
    slowest = SECONDS.get(row["model"])
    took = row["lowered_s"] + row["compiled_s"]
    return [
        Case(
            f"{name}: memory",
            needed,
            "GiB per device",
            target=None if most is None else f"at most {most:g}",
            holds=None if most is None else needed <= most,
            details={
                "arguments, GiB": row["arguments"] / GIB,
                "temporaries, GiB": row["temporaries"] / GIB,
                "sends": ", ".join(row["sends"]),
                "products of float32": "; ".join(row["float32_products"]),
            },
        ),
        Case(
            f"{name}: compiling",
            took,
            "s",
            target=None if slowest is None else f"at most {slowest:g}",
            holds=None if slowest is None else took <= slowest,
            details={"lines of HLO": row["lines"]},
        ),
        Case(
            f"{name}: faults",
            len(wrong),
            "faults",
            target="0",
            holds=not wrong,
            details={str(number): text for number, text in enumerate(wrong, 1)},
        ),
    ]


def _devices(row: dict[str, Any]) -> int:
    data, fsdp, tensor = row["mesh"]
    return data * fsdp * tensor


def _show(rows: list[dict[str, Any]]) -> None:
    lines = [
        ("program", "GiB", "attention", "backward", "float32", "lines", "compiled, s", "faults")
    ]
    for row in rows:
        lines.append(
            (
                case_name(row),
                f"{total(row) / GIB:.2f}",
                str(row["attention_forward"]),
                str(row["attention_backward"]),
                str(len(row["float32_products"])),
                str(row["lines"]),
                f"{row['lowered_s'] + row['compiled_s']:.0f}",
                "; ".join(faults(row)) or "none",
            )
        )
    print_table(lines)


def _last_sentence(errors: str) -> str:
    last = errors.strip().splitlines()[-1:] or ["the programs could not be compiled"]
    return last[0].removeprefix("error: ").removeprefix("qrag_jax.errors.InputError: ")
