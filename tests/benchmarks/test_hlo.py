"""What is read from compiled programs: small ones of this machine, and lines of one for a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.support import hlo

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
  ROOT %dot.8 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/rt,td->rd/dot_general"}
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
    assert found[0] == ("f32[8,4] = f32[8,16] × f32[16,4]", "jit(f)/rt,td->rd/dot_general")
    assert found[1:] == [("f32[8,4] = f32[8,16] × f32[16,4]", "")]  # cuBLAS's, with its workspace
    assert [shapes for shapes, _ in hlo.products(OF_GPU, "bf16")] == [
        "bf16[8,4] = bf16[8,16] × bf16[16,4]"
    ]
    assert hlo.donated(OF_GPU) == 2
    assert hlo.asks_host(OF_GPU) == []


def compiled(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_what_asks_the_host_is_found() -> None:
    def asks(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), jnp.float32), x)

    numbers = np.ones(4, np.float32)
    assert hlo.asks_host(compiled(asks, numbers))
    assert hlo.asks_host(compiled(jnp.sin, numbers)) == []


LOOPS = """\
HloModule jit_step, is_scheduled=true

%body (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %att.1 = bf16[8]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %tuple.1 = (s32[], bf16[8]{0}) tuple(%i, %att.1)
}

%round (state: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %while.1 = (s32[], bf16[8]{0}) while(%state), condition=%less, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %back.1 = bf16[8]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT %tuple.2 = (s32[], bf16[8]{0}) tuple(%i, %back.1)
}

ENTRY %main (p: bf16[8]) -> bf16[8] {
  %while.2 = (s32[], bf16[8]{0}) while(%first), condition=%more, body=%round, \
backend_config={"known_trip_count":{"n":"4"}}
  %while.3 = (s32[], bf16[8]{0}) while(%while.2), condition=%some, body=%round.2
  %att.2 = bf16[8]{0} custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %copy.3 = bf16[8]{0} copy(%att.2)
}
"""


def test_attention_in_loops_counts_as_often_as_they_are_known_to_run() -> None:
    assert hlo.attention_calls(LOOPS) == (4 * 6 + 1, 4)
    unknown = LOOPS.replace('backend_config={"known_trip_count":{"n":"4"}}', "")
    assert hlo.attention_calls(unknown) == (6 + 1, 1)
    times = hlo.times_run(hlo.instructions(LOOPS))
    assert times == {
        "main": 1,
        "round": 4,
        "body": 24,
        "less": 24,
        "more": 4,
        "some": 1,
        "round.2": 1,
    }


def test_scans_of_a_compiled_program_are_counted() -> None:
    def scanned(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, length=7)[0]

    text = compiled(scanned, np.ones((4, 4), np.float32))
    assert 7 in hlo.times_run(hlo.instructions(text)).values()
