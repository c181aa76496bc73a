"""The suite gpu: what it finds in compiled programs, and that its parts go on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.gpu import cases_of, faults
from benchmarks.gpu.compiling import arrays_of_logits, unnamed
from benchmarks.gpu.measured import finish
from qrag_jax.runtime.mesh import AXES
from tests.devices import mesh_of
from tests.support.hlo import Product, collectives
from tests.support.same_course import different_courses

GOOD: dict[str, Any] = {
    **{"row": "h100/q_rag/e5/1x1x1", "program": "update", "target": "h100", "platform": "cuda"},
    **{"mesh": (1, 1, 1), "layers": 2, "learns": True, "steps": 1000, "state_arrays": 5},
    **{"attention_forward": 4, "attention_backward": 2, "attention_unfused": 0, "logits": 0},
    **{"float32_unnamed": [], "asks_host": [], "sends_inside_branches": [], "nondeterministic": []},
    **{"arguments": 2**30, "outputs": 0, "temporaries": 2**30, "compiled_s": 3.0, "lines": 10},
    **{"flops": {"bf16": 1e14}, "sends": [], "cost": {}, "donated": 4},
}
WRONG: tuple[dict[str, Any], ...] = (
    *({"attention_backward": 0}, {"attention_unfused": 2}, {"asks_host": ["infeed"]}),
    *({"float32_unnamed": ["f32[8,8]"]}, {"sends_inside_branches": ["all-reduce"]}),
    *({"nondeterministic": ["scatter"]}, {"donated": 1}, {"logits": 1}),
    {"scores": 2**31, "largest_scores": 0.5},
)


def test_each_fault_of_a_program_is_found() -> None:
    assert faults(GOOD) == []
    for wrong in WRONG:
        assert len(faults(GOOD | wrong)) == 1, wrong
        assert not cases_of(GOOD | wrong)[0].holds
    memory = cases_of(GOOD)[1]
    assert (memory.value, memory.holds) == (2, True)
    assert cases_of(GOOD | {"temporaries": 90 * 2**30})[1].holds is False
    assert cases_of({"row": "r", "program": "update", "failed": "out of memory"})[0].holds is False
    details = next(case for case in cases_of(GOOD) if "GPU-hours" in case.details).details
    assert details["GPU-hours"] == pytest.approx(1000 * 1e14 / 989e12 / 0.26 / 3600)


def compiled_text(function: Any, *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_logits_of_a_block_are_seen_and_tables_are_not() -> None:
    def logits(x, table):
        return jnp.exp(x @ table.T).sum()

    assert arrays_of_logits(compiled_text(logits, (4096, 64), (5000, 64)), 5000, 64)
    assert not arrays_of_logits(compiled_text(logits, (128, 64), (5000, 64)), 5000, 64)
    meant = Product("f32[2] = f32[2] × f32[2]", "jit(f)/rt,td->rd/dot_general")
    other = Product("f32[2] = f32[2] × f32[2]", "jit(f)/dense/dot_general")
    assert len(unnamed([meant, other], "cuda")) == 1


def test_parts_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    calls = []

    def part(name: str) -> list[dict[str, Any]]:
        calls.append(name)
        if name == "b" and calls.count("b") == 1:
            raise subprocess.SubprocessError("ended with status 9")
        return [{"case": name, "value": 1.0, "unit": "ms"}]

    assert finish(tmp_path, ["a", "b"], part)["b"][0]["value"] is None
    assert finish(tmp_path, ["a", "b"], part)["b"][0]["value"] == 1.0
    assert calls == ["a", "b", "b"]


# ---------------------------------------------------------------- which devices reach a collective

SPLIT, COPIED = PartitionSpec(AXES), PartitionSpec()


def text_of(on_device: Callable[..., jax.Array]) -> str:
    """The program of `on_device(own, same)` on 2 × 2 × 2 devices; `same` is equal everywhere."""
    over_mesh = jax.shard_map(
        on_device, mesh=mesh_of(2, 2, 2), in_specs=(SPLIT, COPIED), out_specs=SPLIT, check_vma=False
    )
    text = jax.jit(over_mesh).lower(np.ones(32, np.float32), np.int32(3)).compile().as_text()
    assert collectives(text)
    return text


def gathered(own, names=AXES):
    return jax.lax.all_gather(own, names, tiled=True)


def count(numbers):
    return (numbers > 0.5).sum(dtype=jnp.int32)


def sums(rounds, own, names=AXES):
    """As many sums over devices as `rounds` says."""

    def one(at):
        return at[0] + 1, jnp.sin(jax.lax.psum(at[1], names))

    return jax.lax.while_loop(lambda at: at[0] < rounds, one, (jnp.int32(0), own))[1]


def one_branch(way, own):
    return jax.lax.cond(way, lambda x: jax.lax.psum(x, AXES), jnp.sin, own)


def swapped(own):
    return jax.lax.ppermute(own, "fsdp", [(0, 1), (1, 0)])


def in_group(own, same):
    return sums(count(gathered(own, "fsdp")), own, "fsdp")


SAFE = {
    "rounds from gathered numbers": lambda own, same: sums(count(gathered(own)), own),
    "rounds from a sum": lambda own, same: sums(count(jax.lax.psum(own, AXES)), own),
    "rounds from an unsplit input": lambda own, same: sums(same, own),
    "rounds equal inside the group": in_group,
    "a branch for all": lambda own, same: one_branch(same > 2, own),
}
UNSAFE = {
    "rounds from the device's own numbers": lambda own, same: sums(count(own), own),
    "rounds equal in a smaller group": lambda own, same: sums(count(gathered(own, "fsdp")), own),
    "rounds from its number": lambda own, same: sums(same + jax.lax.axis_index("fsdp"), own),
    "rounds from a neighbour": lambda own, same: sums(count(swapped(own)), own),
    "a branch of the device's own": lambda own, same: one_branch(own.sum() > 1, own),
}


@pytest.mark.parametrize("case", [*SAFE, *UNSAFE])
def test_what_a_device_may_not_reach_is_refused(case: str) -> None:
    assert bool(different_courses(text_of((SAFE | UNSAFE)[case]))) == (case in UNSAFE)


# Groups over the middle axis, and over others or unknown ones, in each form of HLO.
MIDDLE = ("{{0,2},{1,3},{4,6},{5,7}}", "[4,2]<=[2,2,2]T(0,2,1)", "mesh['a'=2,'b'=2,'c'=2] {'b'}")
OTHERS = ("{{0,1},{2,3},{4,5},{6,7}}", "[4,2]<=[8]", "mesh['a'=2,'b'=4] {'a'}", "@unknown")


def test_groups_and_shardings_are_read_in_each_form_of_hlo() -> None:
    text = text_of(in_group)
    for groups in (*MIDDLE, *OTHERS):
        changed = re.sub(
            rf"( all-reduce\(.*replica_groups=){re.escape(MIDDLE[0])}", rf"\g<1>{groups}", text
        )
        assert f"replica_groups={groups}" in changed
        assert bool(different_courses(changed)) == (groups in OTHERS), groups
    text, written = text_of(UNSAFE["rounds from the device's own numbers"]), "devices=[8]<=[8]"
    assert f"sharding={{{written}}}, " in text
    for sharding in ("devices=[1,8]<=[8] last_tile_dim_replicate", "replicated"):
        assert different_courses(text.replace(written, sharding)) == []
    assert different_courses(text.replace(f"sharding={{{written}}}, ", ""))
