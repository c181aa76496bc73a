"""Programs lowered for NVIDIA GPUs where nothing can compile for them: what a lowering can show.

`python -m benchmarks.lowered NAME…` prints one JSON object for each row of these names (see
`gpu_rows`). JAX lowers for "cuda" on a CPU; it is told that cuDNN is there. In what it hands to XLA
stand the calls of fused attention, the products and their types, calls of the host, and which
inputs are given up. What XLA does with it is not seen.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks import float32
from benchmarks.gpu_cases import described, failed, reason
from benchmarks.gpu_programs import program_of
from benchmarks.gpu_rows import Row, rows
from benchmarks.memory_cases import mesh_of
from qrag_jax.runtime.platform import GPU, Platform
from tests.support.hlo import Product

CUDNN = 91000  # version 9.10
HOPPER = Platform(GPU, (9, 0))
_DONATED = re.compile(r"tf\.aliasing_output|jax\.buffer_donor")
_SOURCE = re.compile(r'loc\("([^"]*)"')


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Programs are built as for H100s with cuDNN, whatever devices their mesh is made of."""
    lowering = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    with (
        mock.patch.object(lowering, "check_cudnn_version", return_value=CUDNN),
        mock.patch.object(lowering, "check_compute_capability", return_value=True),
        mock.patch.object(Platform, "_of", return_value=HOPPER),
    ):
        yield


def lowered(row: Row) -> dict[str, Any]:
    """Lowers the program of one row; returns what was found in it, as JSON holds it."""
    began = time.monotonic()
    with as_on_gpus():
        program = program_of(row.model, mesh_of(row.mesh), row.lora, row.program)
        traced = program.function.trace(*program.arguments)
        module = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    found = contents(module)
    of_type = [(kind, item) for kind, item in found if kind in ("f32", "bf16")]
    in_full = [item for kind, item in of_type if kind == "f32"]
    return described(row, program.arguments) | {
        "lowered_s": time.monotonic() - began,
        "attention_forward": found["forward", None],
        "attention_backward": found["backward", None],
        "attention_unfused": float32.of_attention(item for _, item in of_type),
        "float32_products": sorted({product.shapes for product in in_full}),
        "float32_unnamed": float32.unnamed(in_full, row.platform),
        "asks_host": sorted(item for kind, item in found if kind == "host"),
        "donated": found["donated", None],
    }


def contents(module: Any) -> Counter[tuple[str, Any]]:
    """How often a program of StableHLO computes what is looked for; a loop of `scan` counts whole.

    Args:
        module: as `lowered.compiler_ir("stablehlo")` gives it.

    Returns:
        counts of ("forward", None) and ("backward", None), calls of fused attention; of
        (type, Product), products by the type of a factor; of ("host", name), calls of the host; and
        of ("donated", None), inputs whose buffers are given up.
    """
    functions = {_text(op.attributes["sym_name"]): op for op in module.body.operations}
    known: dict[str, Counter[tuple[str, Any]]] = {}

    def of_function(name: str) -> Counter[tuple[str, Any]]:
        if name not in known:
            known[name] = of_regions(functions[name])
        return known[name]

    def of_regions(op: Any) -> Counter[tuple[str, Any]]:
        total: Counter[tuple[str, Any]] = Counter()
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    total.update(of_operation(inner.operation))
        return total

    def of_operation(op: Any) -> Counter[tuple[str, Any]]:
        match op.name:
            case "func.call":
                return of_function(str(op.attributes["callee"]).removeprefix("@"))
            case "stablehlo.while":
                inside, rounds = of_regions(op), _rounds(op)
                return Counter({key: count * rounds for key, count in inside.items()})
            case "stablehlo.custom_call":
                return _of_call(_text(op.attributes["call_target_name"]))
            case "stablehlo.dot_general":
                return _of_product(op)
            case "stablehlo.send" | "stablehlo.recv" | "stablehlo.infeed" | "stablehlo.outfeed":
                return Counter({("host", op.name): 1})
        return of_regions(op)

    total = of_function("main")
    arguments = str(functions["main"].attributes["arg_attrs"])
    return total + Counter({("donated", None): len(_DONATED.findall(arguments))})


def _of_call(target: str) -> Counter[tuple[str, Any]]:
    if "fmha" in target:
        return Counter({("backward" if "Backward" in target else "forward", None): 1})
    return Counter({("host", target): 1} if "callback" in target else {})


def _of_product(op: Any) -> Counter[tuple[str, Any]]:
    factors = [str(operand.type) for operand in op.operands]
    source = _SOURCE.search(str(op.location))
    shapes = f"{op.results[0].type} = {' × '.join(factors)}"
    product = Product(shapes, source[1] if source else "")
    types = {re.split(r"[x<]", factor.rstrip(">"))[-1] for factor in factors}
    return Counter({(kind, product): 1 for kind in types})


def _rounds(loop: Any) -> int:
    """How often a loop runs that counts from 0, as that of `scan` does; 1 if it is another one."""
    last = list(loop.regions[0].blocks[0].operations)[-1]
    compared = last.operands[0].owner
    if getattr(compared, "name", "") != "stablehlo.compare" or "LT" not in str(compared):
        return 1
    limit = compared.operands[1].owner
    found = re.search(r"dense<(\d+)>", str(limit)) if hasattr(limit, "name") else None
    return int(found[1]) if found else 1


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')


def main() -> None:
    """Prints the rows; a row that fails is printed with why, and the next one follows."""
    asked = set(sys.argv[1:])
    for row in rows(quick=True):
        if row.name in asked:
            try:
                found = lowered(row)
            except Exception as error:
                found = failed(row, reason(error))
            print(json.dumps(found), flush=True)
            jax.clear_caches()


if __name__ == "__main__":
    main()
