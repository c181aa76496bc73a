"""Compiles the programs of one row and reads them: python -m benchmarks.gpu.compiling ROW MODELS

The last line printed is a JSON list, an object for each program. ROW is h100/q_rag/e5/1x8x1; MODELS
is the folder of the models' folders. The target "cpu" compiles for this process's CPU devices.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu import hlo
from benchmarks.gpu.recipes import (
    CORPORA,
    QUICK,
    RECIPES,
    Recipe,
    config_of,
    search_program,
)
from benchmarks.gpu.same_course import different_courses
from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime import determinism
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.targets import CUDA, TARGETS, TPU, check_packages, described_devices

CPU, REFUSED = "cpu", 2  # a target; the exit status if the packages are missing
LONGEST = 400  # characters of an error that are kept


def devices_of(target: str, count: int) -> list[jax.Device]:
    """Described devices of a target, or this process's own.

    Raises:
        InputError: the packages that compile for the target are missing.
    """
    if target == CPU:
        return jax.devices()[:count]
    check_packages(TARGETS[target].platform)
    return described_devices(f"{target}x{count}").devices


def measure(row: str, models: Path) -> list[dict[str, Any]]:
    """What is found in the programs of a row, as JSON holds it.

    Raises:
        InputError: the row cannot be opened, or the packages that compile for it are missing.
    """
    target, system, recipe, sizes = row.split("/")
    mesh = tuple(map(int, sizes.split("x")))
    name, count = f"{system}/{recipe}", math.prod(mesh)
    platform = TARGETS[target].platform if target != CPU else CPU
    about: dict[str, Any] = {"row": row, "target": target, "platform": platform, "mesh": mesh}
    if name in CORPORA:
        corpus = CORPORA[name]
        determinism.ask(True, described=target != CPU)
        devices = make_mesh(mesh, devices_of(target, count))
        program = search_program(corpus, devices, on_cpu=target == CPU)
        about |= {"layers": 0, "vocab": 0, "width": corpus.width}
        about["scores"] = corpus.queries * corpus.passages // count
        return [read(program, about)]
    chosen = RECIPES[name] if name in RECIPES else QUICK[name]

    def each(system: Any, layers: int, vocab: int, width: int) -> list[dict[str, Any]]:
        own = {"layers": layers, "vocab": vocab, "width": width, "steps": system.train.steps}
        return [read(program, about | own) for program in system.programs()]

    return with_system(chosen, mesh, models, each, target=target)


def with_system(
    recipe: Recipe,
    mesh: Sequence[int],
    models: Path,
    use: Callable[[Any, int, int, int], list[dict[str, Any]]],
    *,
    target: str = CPU,
    drawn: bool = False,
) -> list[dict[str, Any]]:
    """Opens a recipe as `train --dry_run --for` does, and uses it.

    Args:
        use: takes the system, the number of its model's layers, for a language model the size of
            its vocabulary (else 0), and its width.

    Raises:
        InputError: the recipe cannot be opened.
    """
    config = config_of(recipe, mesh, models, drawn=drawn)
    section = config.encoder if "encoder" in config else config.model
    file = Path(section.path) / "config.json"
    sizes = json.loads(file.read_text()) if section.path and file.exists() else {}
    layers = sizes.get("num_hidden_layers", 0)
    vocab = 0 if "encoder" in config else sizes.get("vocab_size", 0)
    systems.check(config)
    systems.before_devices(config, dry=True, described=target != CPU)
    devices = devices_of(target, math.prod(mesh))
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(Path(folder) / "run", time.monotonic()) as run,
        systems.open_system(config, run, dry=True, devices=devices) as system,
    ):
        return use(system, layers, vocab, sizes.get("hidden_size", 0))


def read(program: Program, about: dict[str, Any]) -> dict[str, Any]:
    """Compiles a program and reads it."""
    learns = program.name.startswith(("update", "learn"))
    began = time.monotonic()
    try:
        compiled = program.function.lower(*program.arguments).compile()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return about | {"program": program.name, "failed": why[:LONGEST]}
    seconds, stats, text = time.monotonic() - began, compiled.memory_analysis(), compiled.as_text()
    forward, backward = hlo.attention_calls(text)
    in_full = hlo.products(text)
    cost = compiled.cost_analysis() if about["platform"] == TPU else {}
    found = about | {
        "program": program.name,
        "learns": learns,
        "compiled_s": seconds,
        "lines": text.count("\n"),
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "flops": hlo.flops(text, program.loops()),
        "attention_forward": forward,
        "attention_backward": backward,
        "attention_unfused": hlo.unfused_attention([*in_full, *hlo.products(text, "bf16")]),
        "float32_unnamed": hlo.unnamed(in_full, about["platform"]),
        "asks_host": hlo.asks_host(text),
        "sends": sorted({kind for kind, _ in hlo.collectives(text)}),
        "sends_inside_branches": different_courses(text),
        "nondeterministic": hlo.nondeterministic(text) if about["platform"] == CUDA else [],
        "donated": hlo.donated(text),
        "state_arrays": len(jax.tree.leaves(program.arguments[0])) if learns else 0,
        "logits": hlo.arrays_of_logits(text, about["vocab"], about["width"]),
        # libtpu's own count takes every loop as one round.
        "cost": {name: float(cost[name]) for name in ("flops", "bytes accessed") if name in cost},
    }
    if "scores" in about:
        found["largest_scores"] = hlo.largest_floats(text, about["width"]) / about["scores"]
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit status."""
    row, models = arguments
    try:
        found = measure(row, Path(models))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
