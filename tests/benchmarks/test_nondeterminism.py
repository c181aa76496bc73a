"""What a GPU's program does in no fixed order: lines that XLA wrote for an H100, and lowerings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.support.hlo import nondeterministic

# The gradient of a tiny BERT's word table, without and with --xla_gpu_deterministic_ops.
ADD = """
%region_18.50 (scatter-add.2: f32[], scatter-add.3: f32[]) -> f32[] {
  %scatter-add.3 = f32[] parameter(1)
  %scatter-add.2 = f32[] parameter(0)
  ROOT %add.3.0 = f32[] add(%scatter-add.2, %scatter-add.3)
}
"""
AS_IT_IS = (
    ADD
    + """
%fused_scatter (param_0.1106: f32[512,64], param_1: s32[8192]) -> f32[512,64] {
  ROOT %scatter-add.6.1 = f32[512,64]{1,0} scatter(%param_0.1106, %bitcast.56.2, %bitcast.122.2), \
update_window_dims={1,2}, inserted_window_dims={}, scatter_dims_to_operand_dims={0}, \
index_vector_dim=1, to_apply=%region_18.50, metadata={op_name="while/body/scatter-add"}
}
"""
)
SORTED = AS_IT_IS.replace("to_apply", "indices_are_sorted=true, unique_indices=true, to_apply")
BACKWARD = """
ENTRY %main (p: bf16[4,128,4,64]) -> bf16[4,128,4,64] {
  %bwd.8 = (bf16[4,128,4,64]{3,1,2,0}, u8[0]{0}) custom-call(%p), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": \
{"is_flash_attention": true, "mask_type": "PADDING", FORCED "dropout_rate": 0.0}}
"""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (AS_IT_IS, ["scatter-add.6.1"]),
        (SORTED, []),
        (AS_IT_IS.replace(" add(", " maximum("), []),
        (AS_IT_IS.replace("f32[512,64]", "s32[512,64]"), []),
        (BACKWARD.replace("FORCED", '"force_deterministic":false,'), ["bwd.8"]),
        (BACKWARD.replace("FORCED", '"force_deterministic":true,'), []),
        (BACKWARD.replace("FORCED", '"force_deterministic": true,'), []),  # as we write it
        (BACKWARD.replace("FORCED", ""), ["bwd.8"]),  # of equal ones XLA would mark one alone
    ],
)
def test_lines_of_an_h100(text: str, named: list[str]) -> None:
    assert nondeterministic(text) == named


def lowered(function) -> str:
    """As JAX lowers it for an NVIDIA GPU; no package for GPUs is needed."""
    shape = jax.ShapeDtypeStruct
    given = shape((9, 4), jnp.float32), shape((3,), jnp.int32), shape((3, 4), jnp.float32)
    made = jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",))
    return made.compiler_ir("hlo").as_hlo_text()


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda table, at, rows: table.at[at].add(rows), 1),
        (lambda table, at, rows: table.at[at].mul(rows), 1),
        (lambda table, at, rows: jax.grad(lambda t: (t[at] * rows).sum())(table), 1),
        (lambda table, at, rows: table.at[at].add(rows, unique_indices=True), 0),
        (lambda table, at, rows: table.at[at].set(rows), 0),
        (lambda table, at, rows: table.at[at].max(rows), 0),
        (lambda table, at, rows: jnp.zeros(9, jnp.int32).at[at].add(1), 0),
    ],
)
def test_programs_lowered_for_a_gpu(function, count: int) -> None:
    assert len(nondeterministic(lowered(function))) == count
