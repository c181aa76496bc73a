"""Memory, devices that are not here, and FLOPs of programs, as compiled here or for an H100."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.families import FAMILIES
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.runtime.aot import TARGETS, Calls, Program, described_devices, fit, program_lines
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


def test_flops_of_a_forward_pass_are_those_of_its_compiled_program() -> None:
    """A decoder with shared heads and a gated feed-forward, and BERT."""
    fields = {"vocab_size": 100, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 384}
    for kind in ("qwen3", "bert"):
        sizes = FAMILIES[kind].config.from_dict(fields, "config.json")
        trunk = Transformer(sizes, scanned=False)
        params = jax.eval_shape(trunk.init_params, jax.random.key(0))
        rows = jax.ShapeDtypeStruct((4, 32), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
        compiled = jax.jit(trunk.hidden_states).lower(params, *rows).compile()
        counted = (compiled.cost_analysis() or {})["flops"]  # with those of norms and activations
        assert 0.9 < sizes.flops(4, 32) / counted < 1, kind


def test_a_dry_run_says_flops_and_of_known_devices_their_time() -> None:
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = Program("update", jax.jit(jnp.matmul), (shape, shape), 4 * 0.067e12, "float32")
    known, unknown = (SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H100 SXM", "cpu"))
    _, line, _ = program_lines([program], [known] * 4, None)
    assert "0.067 TFLOP per device: 3.85 ms" in line  # a millisecond at the peak
    _, line, _ = program_lines([program], [unknown], None)
    assert "0.268 TFLOP" in line
    assert " ms " not in line
