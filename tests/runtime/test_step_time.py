"""The estimated time of programs: small ones compiled here, and lines as XLA writes for an H100."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.runtime import step_time, step_time_lines
from qrag_jax.runtime.device_speeds import SPEEDS, Links, Speeds, speeds_of
from qrag_jax.runtime.dry_run import Program, program_lines
from qrag_jax.runtime.hlo import Module, bytes_of
from qrag_jax.runtime.hlo_work import Work, work_of
from qrag_jax.runtime.step_time import (
    COLLECTIVES,
    HOST,
    LAUNCHES,
    MEMORY,
    PRODUCTS,
    Assumptions,
    Rounds,
    collective_seconds,
    estimate,
    group_of,
)

LINKS = Links(host=8, inside=100.0, between=10.0, inside_latency=0.5, between_latency=2.0)
# A slow device, on which seconds can be counted by hand.
SLOW = Speeds(
    "slow", {"f32": 10.0, "bf16": 100.0}, 1e9, 50.0, launch=1.0, host_wait=0.25, links=LINKS
)


def compiled(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def program(body: str, before: str = "") -> str:
    return (
        f"HloModule jit_step, is_scheduled=true\n\n{before}\nENTRY %main () -> f32[] {{\n{body}}}"
    )


def work_in(text: str, name: str) -> Work:
    module = Module.of(text)
    return work_of(module, module.computations[module.entry][name])


# ---- programs of this machine


def test_a_product_compiled_here_has_the_flops_and_bytes_of_its_shapes() -> None:
    def product(a, b):
        return jnp.matmul(a, b, precision="highest")

    a, b = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32)
    found = estimate(compiled(product, a, b), SLOW)
    assert found.products == {"f32": 2 * 8 * 4 * 16}
    assert sum(kind.bytes for kind in found.kinds.values()) == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert found.seconds == 2 * 8 * 4 * 16 / 10 + found.kernels
    assert found.share_of_peak(512.0) == pytest.approx(512 / found.seconds / 10)


def test_products_in_batches_and_in_several_kernels_add_up() -> None:
    def twice(a, b, c):
        scores = jnp.einsum("nqd,nkd->nqk", a, b, precision="highest")
        return jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(scores), c, precision="highest")

    n, q, k, d = 3, 8, 16, 4
    shapes = (n, q, d), (n, k, d), (n, k, d)
    text = compiled(twice, *(np.ones(shape, np.float32) for shape in shapes))
    assert estimate(text, SLOW).flops == 2 * 2 * n * q * k * d


def test_a_row_taken_from_a_large_table_does_not_cost_the_table() -> None:
    def look_up(table, number):
        return jax.lax.dynamic_slice(table, (number, 0), (1, 64)) * 2

    text = compiled(look_up, np.ones((5000, 64), np.float32), 3)
    moved = sum(kind.bytes for kind in estimate(text, SLOW).kinds.values())
    assert 2 * 4 * 64 <= moved < 20 * 4 * 64


# ---- lines of a GPU's program

FUSIONS = """\
%sliced (p: f32[12,768,768], i: s32[]) -> bf16[768,768] {
  %p = f32[12,768,768]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,768,768]{2,1,0} dynamic-slice(%p, %i, %zero, %zero), dynamic_slice_sizes={1,768,768}
  %flat = f32[768,768]{1,0} bitcast(%one)
  ROOT %half = bf16[768,768]{1,0} convert(%flat)
}

%looked_up (table: f32[30522,768], ids: s32[8192,1]) -> f32[8192,768] {
  %table = f32[30522,768]{1,0} parameter(0)
  %ids = s32[8192,1]{1,0} parameter(1)
  ROOT %rows = f32[8192,768]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,768}
}

%put (whole: f32[2,12,768], part: f32[768], i: s32[]) -> f32[2,12,768] {
  %whole = f32[2,12,768]{2,1,0} parameter(0)
  %part = f32[768]{0} parameter(1)
  %i.1 = s32[] parameter(2)
  %wide = f32[1,1,768]{2,1,0} bitcast(%part)
  ROOT %new = f32[2,12,768]{2,1,0} dynamic-update-slice(%whole, %wide, %i.1, %i.1, %i.1)
}

%added (total: f32[30522,768], where: s32[64,1], more: f32[64,768]) -> f32[30522,768] {
  %total = f32[30522,768]{1,0} parameter(0)
  %where = s32[64,1]{1,0} parameter(1)
  %more = f32[64,768]{1,0} parameter(2)
  ROOT %sum = f32[30522,768]{1,0} scatter(%total, %where, %more), to_apply=%add
}

%gemm (a: bf16[8192,768], b: bf16[768,2304]) -> bf16[8192,2304] {
  %a = bf16[8192,768]{1,0} parameter(0)
  %b = bf16[768,2304]{1,0} parameter(1)
  ROOT %dot.7 = bf16[8192,2304]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
USES = """\
  %w = f32[12,768,768]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %t = f32[30522,768]{1,0} parameter(2)
  %q = s32[8192,1]{1,0} parameter(3)
  %v = f32[2,12,768]{2,1,0} parameter(4)
  %u = f32[768]{0} parameter(5)
  %k = s32[64,1]{1,0} parameter(6)
  %m = f32[64,768]{1,0} parameter(7)
  %x = bf16[8192,768]{1,0} parameter(8)
  %y = bf16[768,2304]{1,0} parameter(9)
  %slice.1 = bf16[768,768]{1,0} fusion(%w, %n), kind=kLoop, calls=%sliced
  %rows.1 = f32[8192,768]{1,0} fusion(%t, %q), kind=kLoop, calls=%looked_up
  %put.1 = f32[2,12,768]{2,1,0} fusion(%v, %u, %n), kind=kLoop, calls=%put
  %sum.1 = f32[30522,768]{1,0} fusion(%t, %k, %m), kind=kInput, calls=%added
  ROOT %gemm.1 = bf16[8192,2304]{1,0} fusion(%x, %y), kind=kCustom, calls=%gemm
"""


@pytest.mark.parametrize(
    ("name", "read", "written"),
    [
        ("slice.1", 4 * 768**2 + 4, 2 * 768**2),
        ("rows.1", 4 * 8192 * 768 + 4 * 8192, 4 * 8192 * 768),
        ("put.1", 4 * 768 + 4, 4 * 768),
        # What is added to is read as well.
        ("sum.1", 4 * 64 + 4 * 64 * 768, 2 * 4 * 64 * 768),
        ("gemm.1", 2 * (8192 * 768 + 768 * 2304), 2 * 8192 * 2304),
    ],
)
def test_a_fusion_moves_the_parts_that_it_takes(name, read, written) -> None:
    work = work_in(program(USES, FUSIONS), name)
    assert (work.read, work.written) == (read, written)


def test_a_product_inside_of_a_fusion_counts_by_the_type_of_its_factors() -> None:
    text = program(USES, FUSIONS)
    assert work_in(text, "gemm.1").products == {"bf16": 2 * 8192 * 768 * 2304}
    in_full = text.replace("bf16[", "f32[")
    assert set(work_in(in_full, "gemm.1").products) == {"tf32"}
    exact = in_full.replace("rhs_contracting", "operand_precision={highest,highest}, rhs_contr")
    assert set(work_in(exact, "gemm.1").products) == {"f32"}
    assert SPEEDS["h100"].peak("tf32") > 7 * SPEEDS["h100"].peak("f32")


CALLS = """\
  %q = bf16[70,224,12,64]{3,2,1,0} parameter(0)
  %l = s32[70]{0} parameter(1)
  %a = bf16[8,16]{1,0} parameter(2)
  %b = bf16[16,4]{1,0} parameter(3)
  %fwd.1 = (bf16[70,12,224,64]{3,1,2,0}, u8[100]{0}) custom-call(%q, %q, %q, %l), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"fmha_scale": 0.125, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": \
["70", "12", "224", "224"], "tuple_shapes": []}, "mask_type": "PADDING"}}
  %bwd.1 = (bf16[70,12,224,64]{3,1,2,0}, bf16[70,12,224,64]{3,1,2,0}, u8[0]{0}) \
custom-call(%q, %q, %q, %l), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %gemm = (bf16[8,4]{1,0}, s8[99]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
"""


def test_fused_attention_and_cublas_count_by_their_shapes() -> None:
    text, forward = program(CALLS), 2 * 2 * 70 * 12 * 224 * 224 * 64
    work = work_in(text, "fwd.1")
    assert work.products == {"bf16": forward}
    part = 2 * 70 * 224 * 12 * 64
    # The room that cuDNN works in is not written to memory once and for all.
    assert (work.read, work.written) == (3 * part + 4 * 70, part)
    assert work_in(text, "bwd.1").products == {"bf16": 2.5 * forward}
    causal = text.replace('"PADDING"', '"PADDING_CAUSAL"')
    assert work_in(causal, "fwd.1").products == {"bf16": forward / 2}
    assert work_in(text, "gemm").products == {"bf16": 2 * 8 * 4 * 16}
    kinds = estimate(text, SPEEDS["h100"]).kinds
    assert kinds["fused attention"].count == kinds["fused attention, gradient"].count == 1


SORTED = """\
%pairs (keys: f32[4096], values: s32[4096]) -> (f32[4096], s32[4096]) {
  %keys = f32[4096]{0} parameter(0)
  %values = s32[4096]{0} parameter(1)
  ROOT %sort.1 = (f32[4096]{0}, s32[4096]{0}) sort(%keys, %values), dimensions={0}, to_apply=%less
}
"""
SORT = """\
  %k = f32[4096]{0} parameter(0)
  %v = s32[4096]{0} parameter(1)
  ROOT %sorted = (f32[4096]{0}, s32[4096]{0}) fusion(%k, %v), kind=kInput, calls=%pairs
"""


def test_a_gpus_sort_goes_over_its_data_several_times() -> None:
    # Of 4,096 elements in tiles of 1,024: in the tiles; then at 1,024 and below; at 2,048, 1,024
    # and below.
    tiled = dataclasses.replace(SLOW, sort_tile=1024)
    assert tiled.sort_passes(4096) == 1 + 2 + 3
    assert tiled.sort_passes(1000) == SLOW.sort_passes(4096) == 1
    once, often = (estimate(program(SORT, SORTED), speeds) for speeds in (SLOW, tiled))
    assert once.parts[MEMORY] == 2 * 2 * 4 * 4096 / 50
    assert often.seconds == pytest.approx(6 * once.seconds)
    assert often.kernels == 6
    assert SPEEDS["h100"].sort_passes(6_291_456) == 91


# ---- loops and branches

LOOPS = """\
%short (c: f32[100]) -> f32[100] {
  %c = f32[100]{0} parameter(0)
  ROOT %tan.1 = f32[100]{0} copy(%c)
}

%long (d: f32[100]) -> f32[100] {
  %d = f32[100]{0} parameter(0)
  %cos.1 = f32[100]{0} copy(%d)
  ROOT %cos.2 = f32[100]{0} copy(%cos.1)
}

%body (s: (f32[100], s32[8], s32[8,285])) -> (f32[100], s32[8], s32[8,285]) {
  %s = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  %x.1 = f32[100]{0} get-tuple-element(%s), index=0
  %i = s32[] constant(0)
  ROOT %branch = f32[100]{0} conditional(%i, %x.1, %x.1), branch_computations={%short, %long}
}

%left (s: (f32[100], s32[8], s32[8,285])) -> pred[] {
  %s.1 = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%outer (s: (f32[100], s32[8], s32[8,285])) -> (f32[100], s32[8], s32[8,285]) {
  %s.2 = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %inner = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) while(%s.2), condition=%left, body=%body
}
"""
COUNTED = """\
  %p = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) parameter(0)
  ROOT %w = (f32[100]{0}, s32[8]{0}, s32[8,285]{1,0}) while(%p), condition=%left, body=%outer, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
"""


@pytest.mark.parametrize(
    ("course", "copies"),
    [(Rounds(2.0, (0.75, 0.25)), 2 * 1.25), (Rounds(4.0, (0.0, 1.0)), 8.0), (None, 1.5)],
)
def test_loops_are_multiplied_and_branches_weighted(course, copies) -> None:
    assumed = Assumptions({(8, 285): course} if course else {})
    found = estimate(program(COUNTED, LOOPS), SLOW, assumed)
    rounds = course.rounds if course else 1.0
    assert found.kinds["copy"].count == 3 * copies
    assert found.parts[MEMORY] == pytest.approx(3 * copies * 800 / 50)
    assert found.parts[LAUNCHES] == 3 * copies
    # The host asks before each round and after the last one, and for the branch of each round.
    assert found.parts[HOST] == pytest.approx(3 * (rounds + 1 + rounds) * 0.25)
    assert found.loops == {(8, 285): rounds}
    assert step_time.rows_of_loops(program(COUNTED, LOOPS)) == {(8, 285)}


def test_a_round_of_a_loop_is_what_stands_inside() -> None:
    """Of the loops that the host asks, the outermost alone; the inner one takes one round."""
    loop = "while(%p), condition=%left, body="
    asked = COUNTED.split(loop)[0] + f"{loop}%body\n"
    first = asked.replace("ROOT %w", "%v")
    text = program(first + asked.split("\n")[1] + "\n", LOOPS)
    found = step_time.estimates_of_rounds(text, SLOW)
    assert [each.kinds["copy"].count for each in found] == [1.5, 1.5]
    (outer,) = step_time.estimates_of_rounds(program(asked.replace("%body", "%outer"), LOOPS), SLOW)
    assert outer.parts[MEMORY] == pytest.approx(1.5 * 800 / 50)
    assert outer.parts[HOST] == pytest.approx((2 + 1) * 0.25)
    assert step_time.estimates_of_rounds(program(COUNTED, LOOPS), SLOW) == []


# ---- collectives

SENT = """\
  %p = f32[100]{0} parameter(0)
  %start = (f32[100]{0}, f32[800]{0}) all-gather-start(%p), \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, backend_config={"is_sync":false}
  %copy.1 = f32[100]{0} copy(%p)
  %done = f32[800]{0} all-gather-done(%start)
  ROOT %sum = f32[100]{0} all-reduce(%copy.1), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
"""


def test_a_collective_hides_behind_the_kernels_until_its_end() -> None:
    gathered, reduced = 0.5 + 7 * 400 / 100, 0.5 + 2 * 7 / 8 * 400 / 100
    copied = 800 / 50 + 1
    found = estimate(program(SENT), SLOW)
    assert found.parts[COLLECTIVES] == pytest.approx(gathered - copied + reduced)
    assert found.seconds == pytest.approx(gathered + reduced)
    assert found.kinds["all-gather"].seconds == pytest.approx(gathered)
    at_once = estimate(program(SENT.replace('"is_sync":false', '"is_sync":true')), SLOW)
    assert at_once.seconds == pytest.approx(gathered + copied + reduced)


def test_collectives_of_one_link_wait_for_each_other() -> None:
    second = SENT.replace("%start", "%start.2").replace("%done", "%done.2").splitlines()
    lines = SENT.splitlines()
    text = program("\n".join([*lines[:2], second[1], *lines[2:4], second[3], lines[4], ""]))
    gathered, reduced = 0.5 + 7 * 400 / 100, 0.5 + 2 * 7 / 8 * 400 / 100
    assert estimate(text, SLOW).seconds == pytest.approx(2 * gathered + reduced)


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all-reduce", range(8), 0.5 + 2 * 7 / 8 * 8),
        ("reduce-scatter", range(4), 0.5 + 3 / 4 * 8),
        ("all-gather", range(2), 0.5 + 8),  # of 800 bytes of each device
        ("collective-permute", (0, 1), 0.5 + 8),
        ("all-reduce", range(16), 2 + 2 * 15 / 16 * 10),  # 8 cards of a host, 80 bytes/s
        ("all-reduce", range(4, 10), 2 + 2 * 5 / 6 * 40),  # 2 cards of the second host
        ("all-gather", (0, 8), 2 + 80),
        ("all-reduce", (3,), 0),
    ],
)
def test_seconds_of_collectives(kind, group, seconds) -> None:
    assert collective_seconds(kind, 800.0, tuple(group), SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,1},{2,3}}, dimensions={0}", (0, 1)),
        ("replica_groups=[1,8]<=[8]", tuple(range(8))),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("source_target_pairs={{0,3},{3,0}}", (0, 3)),
        ("dimensions={0}", ()),
    ],
)
def test_groups_are_read_in_both_spellings(text, group) -> None:
    assert group_of(text) == group


# ---- devices and words


def test_devices_are_known_by_the_names_that_jax_gives_them() -> None:
    assert speeds_of("NVIDIA H100 80GB HBM3") is SPEEDS["h100"]
    assert speeds_of("NVIDIA A100-SXM4-80GB") is SPEEDS["a100"]
    assert speeds_of("NVIDIA H100 PCIe") is speeds_of("cpu") is None


def test_bytes_of_types() -> None:
    assert bytes_of("(bf16[8,4]{1,0}, pred[3], f8e4m3fn[5]{0}, token[])") == 64 + 3 + 5
    assert bytes_of("f32[]") == 4


def test_the_words_name_the_bound_the_dearest_and_what_is_assumed() -> None:
    found = estimate(program(USES, FUSIONS), SPEEDS["h100"])
    first, *kinds, assumed, host = step_time_lines.lines(found)
    assert first.startswith("estimated ")
    assert "NVIDIA H100 SXM" in first
    assert f"bound by {found.bound}" in first
    assert len(kinds) == len(found.kinds) == 5
    assert "1 x product of bf16 to bf16[8192, 2304]" in "".join(kinds)
    assert "989 bf16" in assumed
    assert "5 kernels" in assumed
    assert "10 µs" in host
    product = 2 * 8192 * 768 * 2304 / 989e12
    assert found.parts[PRODUCTS] == pytest.approx(product)


def test_a_dry_run_for_a_known_device_tells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2
    programs = [Program("update", jax.jit(jnp.matmul), shapes)]
    assert not any("estimated" in line for line in program_lines(programs))
    name = "qrag_jax.runtime.dry_run.speeds_of"
    monkeypatch.setattr(name, lambda kind: SLOW)
    told = list(program_lines(programs))
    assert sum(line.startswith("    estimated 1") for line in told) == 1
