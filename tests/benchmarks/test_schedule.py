"""What a scheduled program starts on the device, and which collectives run behind a computation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.schedule import Launches, launches, launches_of_rounds, overlap
from qrag_jax.runtime.mesh import AXES
from tests.devices import mesh_of

# As XLA writes it for GPUs, shortened: a loop of known length, one that the host asks, a branch.
OF_GPU = """\
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused (a: f32[8]) -> f32[8] {
  ROOT %sin.1 = f32[8]{0} sine(%a)
}

%scatter (a: f32[8]) -> f32[1] {
  ROOT %reduce-scatter.1 = f32[1]{0} reduce-scatter(%a), to_apply=%add
}

%body (state: f32[8]) -> f32[8] {
  %state = f32[8]{0} parameter(0)
  %all-gather-start.1 = (f32[1]{0}, f32[8]{0}) all-gather-start(%part)
  %fusion.1 = f32[8]{0} fusion(%state), kind=kLoop, calls=%fused
  %all-gather-done.1 = f32[8]{0} all-gather-done(%all-gather-start.1)
  ROOT %gemm.1 = f32[8]{0} custom-call(%fusion.1, %all-gather-done.1), \
custom_call_target="__cublas$gemm"
}

%less (state: f32[8]) -> pred[] {
  ROOT %fusion.2 = pred[] fusion(%state), kind=kLoop, calls=%fused
}

%way (state: f32[8]) -> f32[8] {
  ROOT %copy.1 = f32[8]{0} copy(%state)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %while.1 = f32[8]{0} while(%p), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %while.2 = f32[8]{0} while(%while.1), condition=%asked, body=%round
  %async-start = ((f32[8]{0}), f32[1]{0}) async-start(%while.2), calls=%scatter
  %bitcast.1 = f32[8]{0} bitcast(%p)
  %async-done = f32[1]{0} async-done(%async-start)
  %all-reduce-start.1 = bf16[3]{0} all-reduce-start(%async-done), to_apply=%add
  %async-update = bf16[3]{0} async-update(%all-reduce-start.1)
  %conditional.1 = f32[8]{0} conditional(%q, %p, %p), branch_computations={%way, %way.2}
  %all-reduce-done.1 = bf16[3]{0} all-reduce-done(%async-update)
  %all-reduce.2 = f32[5]{0} all-reduce(%p), to_apply=%add
  ROOT %tuple.1 = (f32[8]{0}) tuple(%conditional.1)
}

%round (state: f32[8]) -> f32[8] {
  ROOT %fusion.3 = f32[8]{0} fusion(%state), kind=kLoop, calls=%fused
}
"""


def test_kernels_and_what_the_host_is_asked() -> None:
    """Body 3, condition 1, branch 1, uncounted loop 1, entry 3; the counted loop has 3 rounds."""
    assert launches(OF_GPU) == Launches(9, 3 * 4 + 1 + 1 + 3, 1, 1)


def test_kernels_of_a_round() -> None:
    """The second loop alone, with the loop and the branch that stand in it."""
    assert launches_of_rounds(OF_GPU) == [Launches(1, 1, 0, 0)]
    more = """\
%round (state: f32[8]) -> f32[8] {
  %while.3 = f32[8]{0} while(%state), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %while.4 = f32[8]{0} while(%while.3), condition=%asked, body=%inner
  %conditional.2 = f32[8]{0} conditional(%q, %p, %p), branch_computations={%way, %way.2}
"""
    inner = """\
%inner (state: f32[8]) -> f32[8] {
  ROOT %fusion.4 = f32[8]{0} fusion(%state), kind=kLoop, calls=%fused
}
"""
    text = inner + OF_GPU.replace("%round (state: f32[8]) -> f32[8] {\n", more)
    text = text.replace("condition=%less", "condition=%never", 1)
    (found,) = launches_of_rounds(text)
    # Own 1, body 3 and condition 1, inner loop 1, branch 1; the body also runs in the first loop.
    assert found == Launches(7, 1 + 2 * 9 + 3 + 1 + 2, 1, 1)


def test_collectives_behind_a_computation() -> None:
    found = overlap(OF_GPU)
    assert (found.total, found.hidden, found.behind_products) == (4, 2, 1)
    assert found.exposed == ("async-start", "all-reduce.2")
    assert (found.total_bytes, found.hidden_bytes) == (32 + 4 + 6 + 20, 32 + 6)


@pytest.mark.parametrize(
    ("during", "is_long"),
    [
        ('custom-call(%state), custom_call_target="__cublas$gemm"', True),
        ('custom-call(%state), custom_call_target="__cudnn$fmhaSoftmax"', True),
        ('custom-call(%state), custom_call_target="__cub$DeviceRadixSort"', False),
        ("fusion(%state), kind=kCustom, calls=%product", True),
        ("dot(%state, %state)", True),
    ],
)
def test_what_is_long_enough_to_hide_a_collective(during: str, is_long: bool) -> None:
    product = "%product (a: f32[8]) -> f32[8] {\n  ROOT %dot.9 = f32[8]{0} dot(%a, %a)\n}\n\n"
    text = OF_GPU.replace("fusion(%state), kind=kLoop, calls=%fused", during, 1)
    found = overlap(text.replace("%body (", f"{product}%body ("))
    assert (found.hidden, found.behind_products) == (2, 1 + is_long)


@pytest.mark.parametrize("rounds", [5, None])
def test_of_a_program_of_this_machine(rounds: int | None) -> None:
    def on_device(x, count):
        def one(at):
            return at[0] + 1, jnp.sin(jax.lax.psum(at[1], AXES))

        last = count if rounds is None else rounds
        return jax.lax.while_loop(lambda at: at[0] < last, one, (jnp.int32(0), x))[1]

    specs = PartitionSpec(AXES), PartitionSpec()
    over_mesh = jax.shard_map(
        on_device, mesh=mesh_of(2), in_specs=specs, out_specs=specs[0], check_vma=False
    )
    text = jax.jit(over_mesh).lower(np.ones(64, np.float32), np.int32(3)).compile().as_text()
    found = launches(text)
    assert (found.host_loops, found.host_branches) == (int(rounds is None), 0)
    assert found.kernels > 1
    assert found.launches >= (found.kernels if rounds is None else found.kernels + 2 * 4)
    sent = overlap(text)
    assert (sent.total, sent.hidden, sent.total_bytes) == (1, 0, 32 * 4)
