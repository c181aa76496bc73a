"""The suite gpu: what it finds in compiled programs, and that its parts go on."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import cases_of, faults
from benchmarks.gpu.compiling import arrays_of_logits, unnamed
from benchmarks.gpu.measured import finish
from tests.support.hlo import Product

GOOD: dict[str, Any] = {
    **{"row": "h100/q_rag/e5/1x1x1", "program": "update", "target": "h100", "platform": "cuda"},
    **{"mesh": (1, 1, 1), "layers": 2, "learns": True, "steps": 1000, "state_arrays": 5},
    **{"attention_forward": 4, "attention_backward": 2, "attention_unfused": 0, "logits": 0},
    **{"float32_unnamed": [], "asks_host": [], "nondeterministic": []},
    **{"arguments": 2**30, "outputs": 0, "temporaries": 2**30, "compiled_s": 3.0, "lines": 10},
    **{"flops": {"bf16": 1e14}, "sends": [], "cost": {}, "donated": 4},
}
WRONG: tuple[dict[str, Any], ...] = (
    *({"attention_backward": 0}, {"attention_unfused": 2}, {"asks_host": ["infeed"]}),
    *(
        {"float32_unnamed": ["f32[8,8]"]},
        {"nondeterministic": ["scatter"]},
        {"donated": 1},
        {"logits": 1},
    ),
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
