"""Programs compiled for GPUs that are not here, and what is read from them.

`python -m benchmarks.gpu_cases [--quick]` prints one JSON object per program. It needs JAX's CUDA
packages (`make gpu`), and neither a GPU nor weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import hlo
from benchmarks.memory_cases import BERT_BASE, E5_LARGE, MINILM, QWEN3, TINY, Model, Step
from benchmarks.nondeterminism import nondeterministic
from benchmarks.same_course import different_courses
from qrag_jax.runtime import determinism
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.targets import described_devices

DEVICES = 8
ONE, EIGHT = (1, 1, 1), (1, 8, 1)  # data, fsdp, tensor


def cases(quick: bool) -> Iterator[tuple[Model, tuple[int, int, int], bool]]:
    """Model, mesh and whether adapters alone are trained."""
    if quick:
        yield TINY, ONE, False
        yield TINY, EIGHT, True
        return
    for shape in (ONE, EIGHT):
        for model in (MINILM, BERT_BASE, E5_LARGE, QWEN3[0]):
            yield model, shape, False
        for model in QWEN3:
            yield model, shape, True
    yield QWEN3[1], EIGHT, False


def measure(
    model: Model, shape: tuple[int, int, int], lora: bool, devices: list[jax.Device]
) -> dict[str, Any]:
    """Compiles the step of one case; returns what was found in it, as JSON holds it."""
    count = int(np.prod(shape))
    mesh = Mesh(np.array(devices[:count]).reshape(shape), AXES)
    began = time.monotonic()
    step = Step(model, mesh, lora)
    lowered = step.program.lower(*step.arguments)  # type: ignore[attr-defined]
    then = time.monotonic()
    compiled = lowered.compile()
    seconds, stats, text = time.monotonic() - then, compiled.memory_analysis(), compiled.as_text()
    forward, backward = hlo.attention_calls(text)
    return {
        "model": model.name,
        "lora": lora,
        "mesh": shape,
        "layers": model.config.num_hidden_layers,
        "lowered_s": then - began,
        "compiled_s": seconds,
        "lines": text.count("\n"),
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "attention_forward": forward,
        "attention_backward": backward,
        "float32_products": sorted({product.shapes for product in hlo.products(text)}),
        "asks_host": hlo.asks_host(text),
        "sends_inside_branches": different_courses(text),
        "nondeterministic": nondeterministic(text),
        "donated": hlo.donated(text),
        "state_arrays": len(jax.tree.leaves(step.arguments[0])),
        "sends": sorted({kind for kind, _ in hlo.collectives(text)}),
    }


def main() -> None:
    """Prints the cases."""
    determinism.ask(True, described=True)  # as in a training
    devices = described_devices(f"h100x{DEVICES}").devices
    for case in cases("--quick" in sys.argv[1:]):
        print(json.dumps(measure(*case, devices)), flush=True)


if __name__ == "__main__":
    main()
