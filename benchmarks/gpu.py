"""Programs compiled for NVIDIA H100s that are not here: do they compile, fit, and use the GPU?

Every program of training (in one step, or played and learned apart), evaluation and search of the
common encoders, for one, 8 and 64 GPUs; HARR's updates (`gpu_query`); one for each kind of TPU; and
the exact search over Wikipedia's passages (`gpu_search`). Shapes alone: no device, no weights,
nothing is run. `make gpu` makes the environment with JAX's CUDA packages, `make tpu` adds libtpu;
where it is there, the suite uses it. All rows take hours: `--only` takes those in whose names a
regular expression is found (see `gpu_rows`). `--quick`: a tiny encoder and MiniLM; without the CUDA
packages their programs are lowered, not compiled (see `lowered`).

A program passes if it compiles; cuDNN's fused attention computes every layer, forward and backward;
no product has float32 factors but those that are meant to (`float32`); nothing waits for the host;
sums have a fixed order; the buffers of the whole state are reused; and every collective is sure to
be reached by all devices that take part in it (`same_course`). The time that it may take is
estimated from it (`gpu_estimate`). `--run` measures on a GPU (`gpu_run`).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu_estimate import estimate_cases, estimate_cell
from benchmarks.gpu_faults import faults
from benchmarks.gpu_programs import UPDATE
from benchmarks.gpu_query import query_cases
from benchmarks.gpu_rows import Row, chosen, rows
from benchmarks.gpu_search import SEARCH, WIKIPEDIA, search_cases
from benchmarks.gpu_tokens import MOST_MEMORY, TOKENS, tokens_cases
from benchmarks.memory import DEVICES, GIB, OWN, ROOT, total
from benchmarks.report import Case, print_table
from qrag_jax.errors import InputError
from qrag_jax.runtime.targets import CUDA

REFUSED = 2  # a child's status if it has not the packages
# Of the program that plays, scores and learns, and of a search, by (model, adapters, devices): GiB
# of a device at most. By model: seconds of lowering and compiling at most.
MEMORY = {
    ("Qwen3-Embedding-0.6B", False, 8): 8.0,
    ("Qwen3-Embedding-4B", False, 8): 73.0,
    ("Qwen3-Embedding-4B", True, 8): 12.0,
    ("Qwen3-Embedding-8B", True, 8): 16.0,
    ("Qwen3-Embedding-8B", True, 1): 73.0,
    (WIKIPEDIA.name, False, 1): 73.0,
    (WIKIPEDIA.name, False, 8): 8.0,
}
SECONDS = {"Qwen3-Embedding-0.6B": 60.0, "multilingual-e5-large": 60.0}


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """The cases of the suite.

    Args:
        only: regular expressions; rows in whose names one is found are compiled, all without any.

    Raises:
        InputError: there is no environment with JAX's CUDA packages, or `only` fits no row.
    """
    wanted, found = chosen(rows(quick), only), []
    for target, group in itertools.groupby(wanted, key=lambda row: row.target):
        of_target = list(group)
        on_gpu = of_target[0].platform == CUDA
        try:
            found += _followed("benchmarks.gpu_cases", of_target)
        except InputError as error:
            if on_gpu and quick:
                print(f"{error} Programs are lowered instead, not compiled.")
                found += _followed("benchmarks.lowered", of_target)
            elif on_gpu or (not found and of_target[-1] == wanted[-1]):  # nothing is left
                raise
            else:
                print(f"{target}: {len(of_target)} row(s) left out: {error}")
    _show(found)
    return [case for row in found for case in cases_of(row)]


def cases_of(row: dict[str, Any]) -> list[Case]:
    """The figures of one program: bytes, seconds of compiling, and what is wrong with it."""
    name, wrong = row["name"], faults(row)
    of_faults = Case(
        f"{name}: faults",
        len(wrong),
        "faults",
        target="0",
        holds=not wrong,
        details={str(number): text for number, text in enumerate(wrong, 1)},
    )
    if "arguments" not in row:  # not compiled
        return [of_faults]
    needed, took = total(row) / GIB, row["lowered_s"] + row["compiled_s"]
    most = slowest = None
    if row["program"] in (UPDATE, SEARCH) and row["platform"] == CUDA:
        most = MEMORY.get((row["model"], row["lora"], math.prod(row["mesh"])))
        slowest = SECONDS.get(row["model"])
    if row["program"] == TOKENS:
        most = MOST_MEMORY.get((row["model"], row["lora"]))
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
        Case(f"{name}: kernels", row["kernels"], "kernels", details=_details(row)),
        *estimate_cases(name, row),
        *search_cases(name, row),
        *query_cases(name, row),
        *tokens_cases(name, row),
        of_faults,
    ]


def _details(row: dict[str, Any]) -> dict[str, float | str]:
    """What the device starts and sends."""
    size = row["sends_bytes"]
    hidden = {"share of their bytes": row["sends_hidden_bytes"] / size} if size else {}
    return {
        "launches, loops as often as is known": row["launches"],
        "loops that ask the host": row["host_loops"],
        "branches that ask the host": row["host_branches"],
        "sends": ", ".join(row["sends"]),
        "collectives": row["sends_total"],
        "collectives behind a computation": row["sends_hidden"],
        "collectives behind a matrix product": row["sends_behind_products"],
        **hidden,
        **{f"libtpu's {name}, loops as one round": value for name, value in row["cost"].items()},
    }


def compiled_rows(wanted: Sequence[Row]) -> list[dict[str, Any]]:
    """What `gpu_cases` tells of these rows, all of one kind of device.

    Raises:
        InputError: there is no environment with the packages that compile for it.
    """
    return _followed("benchmarks.gpu_cases", wanted)


def _followed(module: str, wanted: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as `_measured` finds them, each told when it is there."""
    python = str(OWN) if OWN.exists() else sys.executable
    found = []
    for row in _measured([python, "-m", module], wanted):
        found.append(row)
        print(f"{row['name']}: {_told(row)}", flush=True)
    return found


def _measured(command: list[str], wanted: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The rows as a child finds them; if it dies, the row at which it did, and those behind.

    Raises:
        InputError: the packages are missing, or those of another version.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA warns of every long compilation
    }
    left = list(wanted)
    while left:
        done = 0
        with (
            tempfile.TemporaryFile("w+") as errors,  # a pipe that nobody reads would fill up
            subprocess.Popen(  # noqa: S603
                [*command, *(row.name for row in left)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                done += 1
                yield json.loads(line)
            status = process.wait()
            errors.seek(0)
            last = _last_sentence(errors.read())
        if status == REFUSED and not done:
            raise InputError(last)
        if status == 0:
            return
        # Nothing of this child is known but its end: it may have needed too much memory.
        if done < len(left):
            why = f"the compiler ended with status {status}"
            yield {"name": left[done].name, "failed": f"{why}: {last}"}
        left = left[done + 1 :]


def _told(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    if "compiled_s" not in row:
        return f"lowered in {row['lowered_s']:.0f} s"
    return f"compiled in {row['lowered_s'] + row['compiled_s']:.0f} s"


def _show(found: list[dict[str, Any]]) -> None:
    titles = ("program", "GiB", "attention", "backward", "kernels", "asks host", "hidden")
    estimated = "estimated: ms, share of peak, bound by"
    lines = [(*titles, estimated, "seconds", "faults")]
    for row in found:
        wrong = "; ".join(faults(row)) or "none"
        if "failed" in row:
            lines.append((row["name"], *[""] * (1 + len(titles)), wrong))
            continue
        compiled = "arguments" in row
        lines.append(
            (
                row["name"],
                f"{total(row) / GIB:.2f}" if compiled else "",
                str(row["attention_forward"]),
                str(row["attention_backward"]),
                str(row["kernels"]) if compiled else "",
                f"{row['host_loops']} + {row['host_branches']}" if compiled else "",
                f"{row['sends_hidden']} of {row['sends_total']}" if compiled else "",
                estimate_cell(row),
                f"{row['lowered_s'] + row.get('compiled_s', 0):.0f}",
                wrong,
            )
        )
    print_table(lines)


def _last_sentence(errors: str) -> str:
    last = errors.strip().splitlines()[-1:] or ["it told nothing"]
    return last[0].removeprefix("error: ").removeprefix("qrag_jax.errors.InputError: ")
