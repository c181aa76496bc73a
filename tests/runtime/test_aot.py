"""Memory, devices that are not here, and FLOPs of programs, as compiled here or for an H100."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.runtime.aot import TARGETS, Calls, described_devices, fit, product_flops
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import CompilationCounter


def test_memory_of_a_program_is_logged_once_and_compiles_nothing_twice() -> None:
    lines: list[str] = []
    calls = Calls(lines.append)
    program = jax.jit(lambda a, b: (a @ b, a.sum()), donate_argnums=0)
    a, b = (jax.device_put(np.ones((64, 64), np.float32), jax.devices()[0]) for _ in range(2))
    counter = CompilationCounter()
    a, _ = calls("update", program, (a, b))
    jax.block_until_ready(calls("update", program, (a, b)))
    assert counter.count == 1
    (line,) = lines
    assert line.startswith("memory of the update: ")


def test_devices_that_are_not_here() -> None:
    for name in ("b9", "h100x0", ""):
        with pytest.raises(InputError, match="--for"):
            described_devices(name)
    target = TARGETS["h100"]
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits")
    assert "3.0 GiB" in fit(room + 3 * 2**30, target)


# ---------------------------------------------------------------------- products

HALF = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)


def flops_of(function: Any, *shapes: Any, **how: Any) -> dict[str, float]:
    return product_flops(jax.jit(function).trace(*shapes).jaxpr, **how)


def test_a_product_counts_by_the_type_of_its_factors_and_by_its_devices() -> None:
    def einsum(a: Any, b: Any, **how: Any) -> Any:
        return jnp.einsum("nij,njk->nik", a, b, **how)

    def shapes(dtype: Any) -> tuple[Any, Any]:
        return jax.ShapeDtypeStruct((3, 5, 7), dtype), jax.ShapeDtypeStruct((3, 7, 2), dtype)

    count = 2 * 3 * 5 * 7 * 2
    assert flops_of(einsum, *shapes(jnp.bfloat16)) == {"bf16": count}
    exact = partial(einsum, precision="highest")
    assert flops_of(exact, *shapes(jnp.float32), devices=2) == {"f32": count / 2}
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    split = jax.shard_map(einsum, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    assert flops_of(split, *shapes(jnp.bfloat16), devices=4) == {"bf16": pytest.approx(count)}


@pytest.mark.parametrize(
    ("branches", "products"), [((1.5, 0.5), 2.5), ((0.0, 4.0), 8.0), (None, 1.5)]
)
def test_loops_are_multiplied_and_branches_weighted(branches: Any, products: float) -> None:
    def block(carried: Any) -> Any:
        left, tokens, lengths, x = carried
        x = jax.lax.switch(left % 2, [lambda x: x @ x, lambda x: x @ (x @ x)], x)
        return left - 1, tokens, lengths, x

    def scanned(tokens: Any, lengths: Any, x: Any) -> Any:
        def one(x: Any, _: Any) -> Any:
            start = jnp.int32(4), tokens, lengths, x
            return jax.lax.while_loop(lambda carried: carried[0] > 0, block, start)[-1], None

        return jax.lax.scan(one, x, None, length=3)[0]

    rows = jax.ShapeDtypeStruct((8, 285), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    found = flops_of(scanned, *rows, HALF, loops={(8, 285): branches} if branches else {})
    assert found == {"bf16": pytest.approx(3 * products * 2 * 8**3)}
