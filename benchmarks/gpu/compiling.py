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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.recipes import (
    CORPORA,
    CPU,
    QUICK,
    RECIPES,
    REFUSED,
    Recipe,
    config_of,
    search_program,
)
from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime.aot import CUDA, TARGETS, Program, described_devices
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import ask_determinism
from qrag_jax.runtime.run import Run
from tests.support import hlo
from tests.support.hlo import Product

LONGEST = 400  # characters of an error that are kept
# Products that are computed from float32 factors on purpose, by the einsum by which JAX names them;
# on a GPU they run at a fraction of the speed of bfloat16 ones, so no other may be.
NAMED = {
    "rt,td->rd": "mean pooling (models.embedding): sums whose results are embeddings",
    "...hd,...chd->...ch": "Q-values (policies.soft_q), exact because actions hang on them",
    "...d,...kd->...k": "scores of a pool (policies.plackett_luce), likewise",
    "rd,d->r": "values of a critic (learners.query_encoder)",
    "bnd,bwd->bwn": "Q-values of long documents (policies.soft_q), likewise",
    "bnd,bwnd->bwn": "the same with positions relative to the chunks taken",
}
# JAX's own attention, with which TPUs compute: its scores are float32, and so is their gradient.
NAMED_ON_TPU = {"BTNH,BSNH->BNTS": "the gradient of attention's scores (jax.nn)"}
# Products of attention that no fused kernel computes: JAX's own, and those of models.compute.
_ATTENTION = ("BTNH,BSNH->BNTS", "BNTS,BSNH->BTNH", "nqd,nkd->nqk", "nqk,nkd->nqd", "nqk,nqd->nkd")
LOGITS_TOKENS = 2048  # fewer are a part of a block, computed at a time


def devices_of(target: str, count: int) -> list[jax.Device]:
    """Described devices of a target, or this process's

    Raises:
        InputError: the packages that compile for the target are missing.
    """
    if target == CPU:
        return jax.devices()[:count]
    return described_devices(f"{target}x{count}")[1]


def measure(row: str, models: Path) -> list[dict[str, Any]]:
    """What is found in the programs of a row, as JSON holds it.

    Raises:
        InputError: the row cannot be opened, or the packages that compile for it are missing.
    """
    target, system, recipe, sizes = row.split("/")
    data, fsdp, tensor = map(int, sizes.split("x"))
    mesh = data, fsdp, tensor
    name, count = f"{system}/{recipe}", math.prod(mesh)
    platform = TARGETS[target].platform if target != CPU else CPU
    about: dict[str, Any] = {"row": row, "target": target, "platform": platform, "mesh": mesh}
    if name in CORPORA:
        corpus = CORPORA[name]
        ask_determinism(described=target != CPU)
        devices = make_mesh(mesh, devices_of(target, count))
        program = search_program(corpus, devices, on_cpu=target == CPU)
        about |= {"layers": 0, "vocab": 0, "width": corpus.width}
        about["scores"] = corpus.queries * corpus.passages // count
        return [read(program, about)]
    chosen = RECIPES[name] if name in RECIPES else QUICK[name]

    def read_all(system: Any, layers: int, vocab: int, width: int) -> list[dict[str, Any]]:
        details = {"layers": layers, "vocab": vocab, "width": width, "steps": system.train.steps}
        return [read(program, about | details) for program in system.programs()]

    return with_system(chosen, mesh, models, read_all, target=target)


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
    kind = systems.check(config)
    kind.before_devices(config, dry=True, described=target != CPU)
    devices = devices_of(target, math.prod(mesh))
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(Path(folder) / "run", time.monotonic()) as run,
        kind.open_system(config, run, dry=True, devices=devices) as system,
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
    figures = about | {
        "program": program.name,
        "learns": learns,
        "compiled_s": seconds,
        "lines": text.count("\n"),
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "flops": program.flops / math.prod(about["mesh"]),
        "dtype": program.dtype,
        "attention_forward": forward,
        "attention_backward": backward,
        "attention_unfused": unfused_attention([*in_full, *hlo.products(text, "bf16")]),
        "float32_unnamed": unnamed(in_full, about["platform"]),
        "asks_host": hlo.asks_host(text),
        "sends": sorted({kind for kind, _ in hlo.collectives(text)}),
        "nondeterministic": hlo.nondeterministic(text) if about["platform"] == CUDA else [],
        "donated": hlo.donated(text),
        "state_arrays": len(jax.tree.leaves(program.arguments[0])) if learns else 0,
        "logits": arrays_of_logits(text, about["vocab"], about["width"]),
    }
    if "scores" in about:
        figures["largest_scores"] = largest_floats(text, about["width"]) / about["scores"]
    return figures


# ---------------------------------------------------------------- what a program's text says


def unnamed(products: Iterable[Product], platform: str) -> list[str]:
    """The products that are not computed in float32 on purpose, as `result = factors, source`.

    Args:
        products: those of float32 factors.
        platform: "cuda" or "tpu".
    """
    names = [*NAMED, *(NAMED_ON_TPU if platform == "tpu" else ())]
    return sorted(
        {
            f"{product.shapes}, {product.source[-80:] or 'of unknown source'}"
            for product in products
            if not any(name in product.source for name in names)
        }
    )


def unfused_attention(products: Iterable[Product]) -> int:
    """The number of products of attention that no fused kernel computes."""
    return sum(any(name in product.source for name in _ATTENTION) for product in products)


def arrays_of_logits(text: str, vocab: int, width: int) -> int:
    """How many arrays of floats have a row of the vocabulary for each token of a block.

    Word tables and heads, `width` wide, and their gradients are none.
    """
    count = 0
    for dtype, shape in hlo.arrays(text) if vocab else ():
        rest = math.prod(shape) // vocab if vocab in shape else 0
        count += dtype in ("f32", "bf16", "f16") and rest > LOGITS_TOKENS and width not in shape
    return count


def largest_floats(text: str, without: int) -> int:
    """Elements of the largest array of floats whose last size is another than `without`."""
    shapes = [
        shape for dtype, shape in hlo.arrays(text) if dtype in ("f32", "bf16", "f16") and shape
    ]
    return max((math.prod(shape) for shape in shapes if shape[-1] != without), default=0)


def main(arguments: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit status."""
    row, models = arguments
    try:
        programs = measure(row, Path(models))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(json.dumps(programs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
