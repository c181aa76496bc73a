"""Memory, devices that are not here, and FLOPs of programs, as compiled here or for an H100."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.aot import (
    TARGETS,
    FirstCalls,
    Rounds,
    cgroup_room,
    described_devices,
    product_flops,
    saving,
)
from qrag_jax.runtime.dry_run import fit
from qrag_jax.runtime.platform import CompilationCounter
from qrag_jax.runtime.saved_config import flat
from qrag_jax.systems import SYSTEMS
from tests.entry_points import ROOT

EXPERIMENTS = {
    "q_rag": ["hotpotqa", ""],
    "harr": ["harr_grpo", "tiny"],
    "rlvr": ["rlvr", "smol"],
    "leret": ["leret", "smol"],
    "deepretrieval": ["deepretrieval", "smol"],
}


def fields_in(text: str) -> list[str]:
    words = text.replace(",", " ").replace(")", " ").replace("(", " ").split()
    return [w.removeprefix("--config.").partition("=")[0] for w in words if w.startswith("--conf")]


@pytest.mark.parametrize("system", SYSTEMS)
def test_fields_that_are_named_are_fields_of_the_system(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    name, variant = EXPERIMENTS[system]
    known = flat(import_module(f"configs.{name}").get_config(variant).to_dict())
    named = fields_in(saving(system))
    assert len(named) >= 5
    assert not [name for name in named if name not in known]
    # Systems whose rows are computed in blocks refuse other values than 1.
    assert ("train.accumulation" in named) == (system == "q_rag")
    assert ("sampling.rows" in named) == (system in ("rlvr", "leret", "deepretrieval"))


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()  # where version 1 of control groups has its files
    for folder, most, used in (
        (tmp_path, "memory.max", "memory.current"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        (folder / most).write_text("4096\n")
        (folder / used).write_text("1024\n")
        (folder / "memory.stat").write_text("anon 512\ninactive_file 256\n")
    assert {*cgroup_room(tmp_path)} == {4096 - 1024 + 256}
    assert cgroup_room(tmp_path / "none") == []


def test_memory_of_a_program_is_told_once_before_it_runs_and_compiles_nothing_twice() -> None:
    lines: list[str] = []
    calls = FirstCalls(jax.local_devices()[:1], "q_rag", lines.append)
    program = jax.jit(lambda a, b: (a @ b, a.sum()), donate_argnums=0)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    a, b = (jax.device_put(jnp.ones((64, 64), jnp.float32), place) for _ in range(2))
    counter = CompilationCounter()
    calls.before("update", program, (a, b))
    calls.before("update", program, (a, b))
    jax.block_until_ready(program(a, b))
    assert counter.count == 1
    (told,) = lines
    assert told.startswith("memory of the update: ")
    assert " per device, 0.0 MiB of it there already and " in told or "KiB" in told


PEAK = """
import numpy as np
from qrag_jax.runtime.aot import PeakMemory
before = PeakMemory()
small = before.mebibytes()
np.ones(100 * 2**20, np.uint8).sum()
large = before.mebibytes()
print(small, large, PeakMemory().mebibytes())
"""


def test_peak_memory_counts_what_was_given_back() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    small, large, again = map(float, out.stdout.split())
    assert small + 90 < large < small + 150
    # Linux forgets an earlier peak.
    assert again < large - 90 if sys.platform == "linux" else again >= large


# ---------------------------------------------------------------------- described devices


@pytest.mark.parametrize(
    "name",
    ["b9", "h100x0", "h100x", "x8", "h100 x8", "H100", "", "h100x12", "v5ex3", "v6ex512"],
)
def test_unknown_devices_and_numbers_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="--for"):
        described_devices(name)


def test_what_fits_is_told_with_what_is_missing() -> None:
    target = TARGETS["h100"]
    room = int(0.92 * target.memory)
    assert fit(room, target).startswith("fits: ")
    told = fit(room + 3 * 2**30, target, "q_rag")
    assert "3.0 GiB too much" in told
    assert "--config.encoder.block_tokens" in told


# ---------------------------------------------------------------------- products


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
