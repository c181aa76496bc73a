"""The memory of a training step per device: which encoder fits on which device?

Every case is compiled for one or eight H100s that are not here, from shapes alone: no weights are
read, no parameter is allocated. The bytes come from XLA's buffer assignment: arguments (parameters,
target parameters, moments, batch), outputs that are not donated arguments, and temporaries. Without
JAX's CUDA packages (`make gpu`) the cases are compiled for virtual CPU devices, whose temporaries
only estimate a GPU's: a GPU's compiler fuses more and computes bfloat16 products without copies in
float32. `--quick` compiles MiniLM alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.memory_cases import (
    BLOCK_TOKENS,
    CHUNKS,
    H100,
    QUESTIONS,
    RANK,
    REMAT,
    ROW_TOKENS,
)
from benchmarks.report import Case, print_table

GIB = 2**30
ROOT = Path(__file__).parents[1]
OWN = ROOT / ".venv-gpu" / "bin" / "python"  # the environment of `make gpu`
DEVICES = 8
SIZES = (24, 40, 80, 141)  # GiB of common accelerators
# Share of a device's memory kept free for the program, the runtime and gaps between buffers.
RESERVE = 0.08


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    rows = []
    on_gpu = OWN.exists()
    python, device = (str(OWN), [f"--{H100}"]) if on_gpu else (sys.executable, [])
    command = [python, "-m", "benchmarks.memory_cases", *device, *(["--quick"] if quick else [])]
    flags = "" if on_gpu else f"--xla_force_host_platform_device_count={DEVICES}"
    with subprocess.Popen(  # noqa: S603
        command,
        cwd=ROOT,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA warns of every long compilation
        },
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.append(json.loads(line))
            print(f"compiled {case_name(rows[-1])} in {rows[-1]['seconds']:.0f} s", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)
    _show(rows, on_gpu)
    return [_case(row) for row in rows]


def total(row: dict[str, Any]) -> int:
    """Bytes on a device while the step runs."""
    return row["arguments"] + row["outputs"] + row["temporaries"]


def fits(row: dict[str, Any]) -> str:
    """The smallest of `SIZES` that is enough with a share of `RESERVE` free, or "none"."""
    enough = [size for size in SIZES if total(row) <= (1 - RESERVE) * size * GIB]
    return f"{enough[0]} GiB" if enough else "none"


def _training(row: dict[str, Any]) -> str:
    return f"LoRA r{RANK}" if row["lora"] else "full"


def _mesh(row: dict[str, Any]) -> str:
    return "×".join(map(str, row["mesh"]))


def case_name(row: dict[str, Any]) -> str:
    """Model, what is trained, and the mesh."""
    return f"{row['model']}, {_training(row)}, mesh {_mesh(row)}"


def _show(rows: list[dict[str, Any]], on_gpu: bool) -> None:
    lines = [
        (
            *("model", "training", "data×fsdp×tensor", "arguments", "outputs", "temporaries"),
            *("total", "fits in"),
        )
    ]
    for row in rows:
        parts = (row["arguments"], row["outputs"], row["temporaries"], total(row))
        sizes = [f"{part / GIB:.2f}" for part in parts]
        lines.append((row["model"], _training(row), _mesh(row), *sizes, fits(row)))
    print(
        f"\nGiB per device of a PQN step: {QUESTIONS} questions a device of {CHUNKS} chunks, rows "
        f"of up to {ROW_TOKENS} tokens in blocks of {BLOCK_TOKENS}, bfloat16 computation, float32 "
        f"state, remat {REMAT!r}."
    )
    print_table(lines)
    compiler = (
        "Temporaries are those of the program for H100s."
        if on_gpu
        else "Temporaries are the CPU compiler's: an estimate of a GPU's, mostly too high."
    )
    print(f"{compiler} A device counts as large enough with {RESERVE:.0%} of it left.\n")


def _case(row: dict[str, Any]) -> Case:
    return Case(
        case_name(row),
        total(row) / GIB,
        "GiB per device",
        details={
            "arguments, GiB": row["arguments"] / GIB,
            "outputs beyond donated, GiB": row["outputs"] / GIB,
            "temporaries, GiB": row["temporaries"] / GIB,
            "fits in": fits(row),
            "compiled in, s": row["seconds"],
        },
    )
