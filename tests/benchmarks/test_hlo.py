"""What is read from compiled programs: small ones of this machine, and lines of one for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks import hlo
from benchmarks.gpu import cases_of, faults
from qrag_jax.runtime.mesh import AXES
from tests.devices import mesh_of

# As XLA wrote them for an H100.
OF_GPU = """\
HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }

%gemm.1 (a: bf16[8,16], b: bf16[16,4]) -> bf16[8,4] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[16,4]{1,0} parameter(1)
  ROOT %dot.7 = bf16[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%pool.2 (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  ROOT %dot.8 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: f32[8,16]) -> f32[8,4] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,4]{1,0} constant({...})
  %att = (bf16[8,4]{1,0}, u8[0]{0}) custom-call(%p, %p), custom_call_target="__cudnn$fmhaSoftmax"
  %back = (bf16[8]{0}, u8[0]{0}) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %gemm = (f32[8,4]{1,0}, s8[99]{0}) custom-call(%p, %q), custom_call_target="__cublas$gemm"
}
"""


def test_products_and_attention_of_a_gpus_program() -> None:
    assert hlo.attention_calls(OF_GPU) == (1, 1)
    found = hlo.products(OF_GPU)
    assert found[0] == "f32[8,4] = f32[8,16] × f32[16,4]"
    assert found[1:] == ["f32[8,4] = f32[8,16] × f32[16,4]"]  # cuBLAS's, with its workspace
    assert hlo.products(OF_GPU, "bf16") == ["bf16[8,4] = bf16[8,16] × bf16[16,4]"]
    assert hlo.donated(OF_GPU) == 2
    assert hlo.asks_host(OF_GPU) == hlo.sends_inside_branches(OF_GPU) == []


def compiled(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_what_asks_the_host_is_found() -> None:
    def asks(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), jnp.float32), x)

    numbers = np.ones(4, np.float32)
    assert hlo.asks_host(compiled(asks, numbers))
    assert hlo.asks_host(compiled(jnp.sin, numbers)) == []


@pytest.mark.parametrize("kind", ["branch", "loop", "counted", "outside"])
def test_collectives_of_which_devices_may_not_agree_are_found(kind: str) -> None:
    def on_device(x):
        def summed(x):
            return jax.lax.psum(x, AXES)

        match kind:
            case "branch":
                return jax.lax.cond(x.sum() > 0, summed, jnp.sin, x)
            case "loop":
                return jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: summed(y) + 1, x)
            case "counted":
                return jax.lax.fori_loop(0, 50, lambda _, y: jnp.cos(summed(y)), x)
            case _:
                return summed(x)

    mesh, spec = mesh_of(2), PartitionSpec(AXES)
    over_mesh = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = compiled(over_mesh, np.ones(64, np.float32))
    assert hlo.collectives(text)
    assert bool(hlo.sends_inside_branches(text)) == (kind in ("branch", "loop"))


ROW = {
    "model": "Qwen3-Embedding-4B",
    "lora": True,
    "mesh": (1, 8, 1),
    "layers": 2,
    "lowered_s": 1.0,
    "compiled_s": 2.0,
    "lines": 100,
    "arguments": 10 * 2**30,
    "outputs": 0,
    "temporaries": 3 * 2**30,
    "attention_forward": 6,
    "attention_backward": 2,
    "float32_products": [],
    "asks_host": [],
    "sends_inside_branches": [],
    "nondeterministic": [],
    "donated": 9,
    "state_arrays": 10,
    "sends": ["all-reduce"],
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attention_backward": 1}, "1 fused gradients for 2 layers"),
        ({"attention_forward": 0}, "0 fused attentions for 2 layers"),
        ({"asks_host": ["send.3"]}, "waits for the host in send.3"),
        ({"sends_inside_branches": ["all-gather.1"]}, "sends inside a branch: all-gather.1"),
        ({"nondeterministic": ["scatter.4"]}, "adds in no fixed order in scatter.4"),
        ({"donated": 3}, "3 of 10 arrays of the state are reused"),
    ],
)
def test_faults_are_named(change, named) -> None:
    assert faults(ROW) == []
    assert faults(ROW | change) == [named]


def test_targets_are_held_or_missed() -> None:
    memory, compiling, wrong = cases_of(ROW)
    assert (memory.value, memory.target, memory.holds) == (13.0, "at most 12", False)
    assert (compiling.value, compiling.holds) == (3.0, None)
    assert (wrong.value, wrong.holds) == (0, True)
    smaller, *_ = cases_of(ROW | {"temporaries": 2**30})
    assert smaller.holds
