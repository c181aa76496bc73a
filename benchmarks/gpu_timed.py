"""Programs of the suite `gpu` that are run: the same ones, with values, on this machine's device.

The suite compiles them for devices that are not here, and estimates their times. Here the weights
are drawn, and so is what the updates learn from; the time of a program depends on neither.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.gpu_estimate import estimate_row
from benchmarks.gpu_query import ALGORITHMS, GRPO, PPO, query_program
from benchmarks.gpu_rows import OF_QUERIES, ONE
from benchmarks.gpu_search import SEARCH, TINY_CORPUS, WIKIPEDIA, least_seconds, search_program
from benchmarks.gpu_tokens import (
    LANGUAGE_MODELS,
    PAIRS,
    REWRITES,
    SAMPLING,
    TINY_LANGUAGE_MODEL,
    TOKENS,
    UPDATES,
    tokens_program,
)
from benchmarks.memory import GIB
from benchmarks.memory_cases import TINY
from qrag_jax.rollouts.device_sampler import Given
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.mesh import make_mesh

ROUNDS = 5
PROMPT, DRAWN = 512, 256  # tokens of a prompt that is read, and of a turn that is drawn
# A training's weights are drawn of this size: so are a BERT's before it is trained.
_SCALE = 0.02
_SMALL, _LARGE = LANGUAGE_MODELS[0], LANGUAGE_MODELS[-1]

# (model, adapters, program) by the name of a part.
PROGRAMS: dict[str, Sequence[tuple[Any, bool, str]]] = {
    "search": ((WIKIPEDIA, False, SEARCH),),
    "harr": (
        (OF_QUERIES[0][0], False, GRPO),
        (OF_QUERIES[1][0], True, GRPO),
        (OF_QUERIES[1][0], True, PPO),
        (OF_QUERIES[3][0], True, GRPO),
    ),
    "language-model": (
        (_SMALL, True, TOKENS),
        (_SMALL, True, PAIRS),
        (_SMALL, True, REWRITES),
        (_SMALL, True, SAMPLING),
    ),
    "large-language-model": (
        (_LARGE, True, TOKENS),
        (_LARGE, True, REWRITES),
        (_LARGE, True, SAMPLING),
    ),
}
QUICK: dict[str, Sequence[tuple[Any, bool, str]]] = {
    "search": ((TINY_CORPUS, False, SEARCH),),
    "harr": ((TINY, True, GRPO),),
    "language-model": tuple((TINY_LANGUAGE_MODEL, True, name) for name in (*UPDATES, SAMPLING)),
    "large-language-model": (),
}


def timed(part: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """The figures of a part's programs, each measured when it is asked for.

    Yields:
        The fields of `gpu_parts.Row`.
    """
    mesh = make_mesh(ONE, jax.devices()[:1])
    for model, lora, name in (QUICK if quick else PROGRAMS)[part]:
        yield from _rows(model, mesh, lora, name)
        jax.clear_caches()


def _rows(model: Any, mesh: Mesh, lora: bool, name: str) -> Iterator[dict[str, Any]]:
    program = _program(model, mesh, lora, name)
    began = time.monotonic()
    lowered = program.function.lower(*program.arguments)
    compiled = lowered.compile()
    took = time.monotonic() - began
    arguments = with_values(program.arguments)
    seconds, finite = _seconds(compiled, list(arguments), name in (*UPDATES, *ALGORITHMS))
    median = statistics.median(seconds)
    kind = mesh.devices.flat[0].device_kind
    title = f"{model.name}, {'LoRA, ' if lora else ''}{name}"
    row: dict[str, Any] = {"name": title, "value": 1e3 * median, "unit": "ms"}
    notes = [f"compiled in {took:.0f} s", _memory(compiled, mesh)]
    if not finite:
        notes.append("NOT FINITE")
    if name == SAMPLING:  # how many rounds its loops take is not in the program
        given = arguments[1]
        drawn = int(given.most.sum())
        row |= {"value": drawn / median, "unit": "tokens/s"}
        notes.insert(0, f"{len(given.most)} rows of {PROMPT} + {DRAWN} tokens")
        yield row | {"note": "; ".join(filter(None, notes))}
        return
    found = estimate_row(compiled.as_text(), kind, program.loops())
    if found is not None:
        row["estimate"] = 1e3 * found["seconds"]
        # All products of the program, with padding and with what is computed twice.
        row["share_of_peak"] = found["share_of_peak"] * found["seconds"] / median
        row["details"] = tuple(found["lines"])
    if name == SEARCH:
        least = least_seconds(model, 1, kind)
        if least is not None:
            notes.append(f"{least / median:.0%} of the roofline")
    yield row | {"note": "; ".join(filter(None, notes))}


def _program(model: Any, mesh: Mesh, lora: bool, name: str) -> Program:
    if name == SEARCH:
        return search_program(model, mesh)
    if name in ALGORITHMS:
        return query_program(model, mesh, lora, name, values=True)
    found = tokens_program(model, mesh, lora, name, values=True)
    if name != SAMPLING:
        return found
    params, given = found.arguments
    return found._replace(arguments=(params, _prompts(given, model.config.vocab_size)))


def _prompts(given: Given, vocabulary: int) -> Given:
    """Different prompts, and as many turns of each."""
    rng = np.random.default_rng(0)
    empty: Given = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), given)
    prompts, rows = len(empty.lengths), len(empty.source)
    empty.tokens[:, :PROMPT] = rng.integers(5, vocabulary, (prompts, PROMPT))
    empty.lengths[:], empty.most[:] = PROMPT, DRAWN
    empty.source[:] = np.arange(rows) * prompts // rows
    empty.keys[:] = rng.integers(0, 2**32, empty.keys.shape, np.uint32)
    return empty


def with_values(arguments: Any) -> Any:
    """The same arguments, with values where there are only shapes: drawn weights, zeros elsewhere.

    Flags are true, and second moments are 0 as before the first step.
    """
    places, tree = jax.tree_util.tree_flatten_with_path(arguments)
    missing = [
        (n, path, leaf)
        for n, (path, leaf) in enumerate(places)
        if isinstance(leaf, jax.ShapeDtypeStruct)
    ]

    def make() -> list[jax.Array]:
        return [_made(n, jax.tree_util.keystr(path), leaf) for n, path, leaf in missing]

    leaves = [leaf for _, leaf in places]
    for (n, *_), value in zip(missing, jax.jit(make)(), strict=True):
        leaves[n] = value
    return jax.tree.unflatten(tree, leaves)


def _made(number: int, path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), leaf.shape)
    if leaf.dtype == jnp.bool_:
        return jnp.ones(leaf.shape, leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or ".mu" in path or ".nu" in path:
        return jnp.zeros(leaf.shape, leaf.dtype)
    # A hash of the place: JAX's own generator takes minutes for some thousand million numbers.
    at = jnp.zeros(leaf.shape, jnp.uint32) + jnp.uint32(number * 0x9E3779B9 % 2**32)
    for axis, size in enumerate(leaf.shape):
        own = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        at = at * jnp.uint32(size) + own
    for factor in (0x7FEB352D, 0x846CA68B):
        at = (at ^ (at >> 16)) * jnp.uint32(factor)
    uniform = (at >> 8).astype(jnp.float32) / 2**24 - 0.5
    drawn = _SCALE * math.sqrt(12.0) * uniform
    return (drawn + ("'scale'" in path)).astype(leaf.dtype)


def _seconds(compiled: Any, arguments: list[Any], learns: bool) -> tuple[list[float], bool]:
    """Seconds of `ROUNDS` calls after one that warms up; whether all that comes out is finite."""
    seconds, result = [], None
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
        if learns:
            arguments[0] = result[0]  # its buffers were taken over
    return seconds[1:], all(
        bool(jnp.isfinite(leaf).all())
        for leaf in jax.tree.leaves(result)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _memory(compiled: Any, mesh: Mesh) -> str:
    """The bytes that the program was said to need, and those of the device since the start."""
    told, seen = compiled.memory_analysis(), mesh.devices.flat[0].memory_stats() or {}
    needed = told.argument_size_in_bytes + told.temp_size_in_bytes
    needed += told.output_size_in_bytes - told.alias_size_in_bytes
    peak = seen.get("peak_bytes_in_use")
    said = f"needs {needed / GIB:.2f} GiB"
    return said if peak is None else f"{said}, peak of the process {peak / GIB:.2f} GiB"
