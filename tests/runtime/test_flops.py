"""FLOPs of programs compiled here, and of lines as XLA writes them for an H100."""

from __future__ import annotations

import pytest

from qrag_jax.runtime.flops import Rounds, product_flops, rows_of_loops


def program(body: str, before: str = "") -> str:
    return (
        f"HloModule jit_step, is_scheduled=true\n\n{before}\nENTRY %main () -> f32[] {{\n{body}}}"
    )


GEMM = """\
%gemm (a: bf16[8192,768], b: bf16[768,2304]) -> bf16[8192,2304] {
  %a = bf16[8192,768]{1,0} parameter(0)
  %b = bf16[768,2304]{1,0} parameter(1)
  ROOT %dot.7 = bf16[8192,2304]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
USE = """\
  %x = bf16[8192,768]{1,0} parameter(8)
  %y = bf16[768,2304]{1,0} parameter(9)
  ROOT %gemm.1 = bf16[8192,2304]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
"""


def test_a_product_inside_of_a_fusion_counts_by_the_type_of_its_factors() -> None:
    text = program(USE, GEMM)
    assert product_flops(text) == {"bf16": 2 * 8192 * 768 * 2304}
    in_full = text.replace("bf16[", "f32[")
    assert set(product_flops(in_full)) == {"tf32"}
    exact = in_full.replace("rhs_contracting", "operand_precision={highest,highest}, rhs_contr")
    assert set(product_flops(exact)) == {"f32"}


INPUTS = """\
  %q = bf16[70,224,12,64]{3,2,1,0} parameter(0)
  %l = s32[70]{0} parameter(1)
  %a = bf16[8,16]{1,0} parameter(2)
  %b = bf16[16,4]{1,0} parameter(3)
"""
FORWARD = """\
  %fwd.1 = (bf16[70,12,224,64]{3,1,2,0}, u8[100]{0}) custom-call(%q, %q, %q, %l), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"fmha_scale": 0.125, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": \
["70", "12", "224", "224"], "tuple_shapes": []}, "mask_type": "PADDING"}}
"""
BACKWARD = """\
  %bwd.1 = (bf16[70,12,224,64]{3,1,2,0}, bf16[70,12,224,64]{3,1,2,0}, u8[0]{0}) \
custom-call(%q, %q, %q, %l), custom_call_target="__cudnn$fmhaSoftmaxBackward"
"""
CUBLAS = """\
  %gemm = (bf16[8,4]{1,0}, s8[99]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
"""
SCORES = 2 * 2 * 70 * 12 * 224 * 224 * 64


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        (FORWARD, SCORES),
        (FORWARD.replace('"PADDING"', '"PADDING_CAUSAL"'), SCORES / 2),
        (BACKWARD, 2.5 * SCORES),
        (CUBLAS, 2 * 8 * 4 * 16),
    ],
)
def test_fused_attention_and_cublas_count_by_their_shapes(line: str, flops: float) -> None:
    assert product_flops(program(INPUTS + line)) == {"bf16": flops}


LOOPS = """\
%short (c: bf16[8,8]) -> bf16[8,8] {
  %c = bf16[8,8]{1,0} parameter(0)
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%long (d: bf16[8,8]) -> bf16[8,8] {
  %d = bf16[8,8]{1,0} parameter(0)
  %dot.2 = bf16[8,8]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %dot.3 = bf16[8,8]{1,0} dot(%d, %dot.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (bf16[8,8], s32[8], s32[8,285])) -> (bf16[8,8], s32[8], s32[8,285]) {
  %s = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  %x.1 = bf16[8,8]{1,0} get-tuple-element(%s), index=0
  %i = s32[] constant(0)
  ROOT %branch = bf16[8,8]{1,0} conditional(%i, %x.1, %x.1), branch_computations={%short, %long}
}

%left (s: (bf16[8,8], s32[8], s32[8,285])) -> pred[] {
  %s.1 = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%outer (s: (bf16[8,8], s32[8], s32[8,285])) -> (bf16[8,8], s32[8], s32[8,285]) {
  %s.2 = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %in = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) while(%s.2), condition=%left, body=%body
}
"""
COUNTED = """\
  %p = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %w = (bf16[8,8]{1,0}, s32[8]{0}, s32[8,285]{1,0}) while(%p), condition=%left, body=%outer, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
"""


@pytest.mark.parametrize(
    ("course", "products"),
    [(Rounds(2.0, (0.75, 0.25)), 2 * 1.25), (Rounds(4.0, (0.0, 1.0)), 8.0), (None, 1.5)],
)
def test_loops_are_multiplied_and_branches_weighted(course: Rounds | None, products: float) -> None:
    text = program(COUNTED, LOOPS)
    flops = product_flops(text, {(8, 285): course} if course else {})
    assert flops == {"bf16": pytest.approx(3 * products * 2 * 8**3)}
    assert rows_of_loops(text) == {(8, 285)}
