"""Puts derived steps beside those of programs that were compiled for the whole cluster.

The compiler takes topologies of many hosts, too. One recipe is compiled for one and two hosts and
for 256 GPUs; each step is predicted from the recipe's two programs of one host as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.memory import OWN
from benchmarks.scaling_hosts import compiled
from benchmarks.scaling_model import DATA, FSDP, INFINIBAND, Recipe, predict
from benchmarks.scaling_recipes import asked_for
from qrag_jax.runtime.device_speeds import SPEEDS

RECIPE = "contriever-babilong+bfloat16"
MESHES = ((8, 1, 1), (2, 8, 1), (32, 8, 1))  # along data, fsdp and tensor
GPU = "h100"


def compile_checks(folder: Path) -> dict[str, Any]:
    """Compiles the recipe for every mesh; returns JSON.

    Raises:
        InputError: the packages to compile are missing.
    """
    rows = {}
    for mesh in MESHES:
        asked = asked_for(RECIPE, folder, mesh, GPU)
        found = compiled(asked, str(OWN))["programs"]["update"]
        rows["x".join(map(str, mesh))] = {"each": asked.compiled_for} | found
    return {"rows": rows}


def check_rows(results: Mapping[str, Any], recipe: Recipe) -> list[tuple[str, ...]]:
    """A line for each mesh: the step that is derived, and that of the program for all."""
    speeds = INFINIBAND.of(SPEEDS[GPU])
    lines: list[tuple[str, ...]] = [
        ("mesh", "questions each", "derived, ms", "compiled, ms", "derived / compiled", "GiB")
    ]
    for name, row in results["rows"].items():
        data, fsdp, _ = map(int, name.split("x"))
        how, each = FSDP if fsdp > 1 else DATA, row["each"]
        step = predict(recipe, data * fsdp, each, how, speeds)
        derived, seconds = step.seconds, row["steps"][str(each)]["seconds"]
        held = (row["arguments"] + row["outputs"] + row["temporaries"]) / 2**30
        cells = f"{derived * 1e3:.4g}", f"{seconds * 1e3:.4g}", f"{derived / seconds:.2f}"
        lines.append((name, str(each), *cells, f"{held:.1f}"))
    return lines
