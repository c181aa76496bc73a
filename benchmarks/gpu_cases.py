"""Programs compiled for devices that are not here, and what is read from them.

`python -m benchmarks.gpu_cases NAME…` prints one JSON object for each row of these names (see
`gpu_rows`), all of one kind of device. It needs the packages that compile for these (`make gpu`,
`make tpu`), and neither a device nor weights.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import cache
from typing import Any

import jax

from benchmarks import float32, schedule
from benchmarks.gpu_estimate import estimate_row, round_seconds
from benchmarks.gpu_programs import LEARNS, SCORES, program_of
from benchmarks.gpu_rows import Row, rows
from benchmarks.gpu_search import CorpusSize, search_figures
from benchmarks.gpu_tokens import SAMPLING, SHAPES, TOKENS, LanguageModelSize, arrays_of_logits
from benchmarks.same_course import different_courses
from qrag_jax.errors import InputError
from qrag_jax.runtime import determinism
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.targets import CUDA, TPU, check_packages, described_devices
from tests.support import hlo
from tests.support.hlo import nondeterministic

UNFUSED = (SCORES, SAMPLING)
LONGEST = 400  # characters of an error that are kept


def compiled(row: Row) -> tuple[Any, Any, dict[str, Any]]:
    """Compiles a row; returns its program, that compiled, and what is known of it, with seconds."""
    began = time.monotonic()
    program = program_of(
        row.model, make_mesh(row.mesh, _devices(row.devices)), row.lora, row.program
    )
    lowered = program.function.lower(*program.arguments)
    then = time.monotonic()
    result = lowered.compile()
    seconds = {"lowered_s": then - began, "compiled_s": time.monotonic() - then}
    return program, result, described(row, program.arguments) | seconds


def described(row: Row, arguments: Any) -> dict[str, Any]:
    """What is known of a row before it is compiled, as JSON holds it."""
    learns = row.program in LEARNS
    encoder = None if isinstance(row.model, CorpusSize) else row.model.config
    return {
        "name": row.name,
        "target": row.target,
        "platform": row.platform,
        "model": row.model.name,
        "lora": row.lora,
        "mesh": row.mesh,
        "program": row.program,
        # Those whose attention is fused: sampling reads a cache, and scores have none.
        "layers": 0 if encoder is None or row.program in UNFUSED else encoder.num_hidden_layers,
        "learns": learns,
        "state_arrays": len(jax.tree.leaves(arguments[0])) if learns else 0,
    }


def measure(row: Row) -> dict[str, Any]:
    """Compiles the program of one row; returns what was found in it, as JSON holds it."""
    source, program, found = compiled(row)
    stats, text = program.memory_analysis(), program.as_text()
    forward, backward = hlo.attention_calls(text)
    in_full = hlo.products(text)
    sent, started = schedule.overlap(text), schedule.launches(text)
    cost = program.cost_analysis() if row.platform == TPU else {}
    kind = _devices(row.devices)[0].device_kind
    of_search = {}
    if isinstance(row.model, CorpusSize):
        of_search = search_figures(row.model, math.prod(row.mesh), kind, text)
    if isinstance(row.model, LanguageModelSize):
        vocab = row.model.config.vocab_size
        shape = SHAPES.get(row.program, SHAPES[TOKENS])
        of_search = {
            "arrays_of_logits": arrays_of_logits(text, vocab, shape),
            "logits": shape.sampled * vocab,
            "rounds": [each._asdict() for each in schedule.launches_of_rounds(text)],
            "round_seconds": round_seconds(text, kind),
        }
    return (
        found
        | of_search
        | {
            "lines": text.count("\n"),
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "attention_forward": forward,
            "attention_backward": backward,
            "attention_unfused": 0
            if row.program == SAMPLING
            else float32.of_attention([*in_full, *hlo.products(text, "bf16")]),
            "float32_products": sorted({product.shapes for product in in_full}),
            "float32_unnamed": float32.unnamed(in_full, row.platform),
            "asks_host": hlo.asks_host(text),
            "sends_inside_branches": different_courses(text),
            "nondeterministic": nondeterministic(text),
            "donated": hlo.donated(text),
            "sends": sorted({kind for kind, _ in hlo.collectives(text)}),
            "sends_total": sent.total,
            "sends_hidden": sent.hidden,
            "sends_behind_products": sent.behind_products,
            "sends_bytes": sent.total_bytes,
            "sends_hidden_bytes": sent.hidden_bytes,
            "estimate": estimate_row(text, kind, source.loops()),
            "kernels": started.kernels,
            "launches": started.launches,
            # A TPU reads the conditions of its loops and branches itself.
            "host_loops": started.host_loops if row.platform != TPU else 0,
            "host_branches": started.host_branches if row.platform != TPU else 0,
            # libtpu counts every loop as one round; its seconds are negative where there are loops.
            "cost": {
                name: float(cost[name])
                for name in ("flops", "bytes accessed", "optimal_seconds")
                if cost.get(name, 0) > 0
            },
        }
    )


def failed(row: Row, why: str) -> dict[str, Any]:
    """A row whose program could not be compiled."""
    return described(row, ((),)) | {"failed": why[:LONGEST]}


def reason(error: Exception) -> str:
    """An error in one line: its kind, and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@cache
def _devices(name: str) -> list[jax.Device]:
    return described_devices(name).devices


def main() -> int:
    """Prints the rows; a row that fails is printed with why, and the next one follows."""
    asked = set(sys.argv[1:])
    every = [row for row in (*rows(quick=True), *rows(quick=False)) if row.name in asked]
    try:
        for platform in {row.platform for row in every}:
            check_packages(platform)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if any(row.platform == CUDA for row in every):
        determinism.ask(True, described=True)  # as in a training
    for row in every:
        try:
            found = measure(row)
        except Exception as error:
            found = failed(row, reason(error))
        print(json.dumps(found), flush=True)
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
