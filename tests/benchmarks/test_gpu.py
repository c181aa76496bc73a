"""The suite gpu: what it counts and finds in programs, its recipes, and parts that go on."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import cases_of, faults
from benchmarks.gpu.compiling import arrays_of_logits, flops, unnamed
from benchmarks.gpu.measured import finish, timed, with_values
from benchmarks.gpu.recipes import RECIPES, chosen, config_of, row_names
from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.step_time import Rounds
from tests.support.hlo import Product

ONE = (1, 1, 1)
GOOD: dict[str, Any] = {
    **{"row": "h100/q_rag/e5/1x1x1", "program": "update", "target": "h100", "platform": "cuda"},
    **{"mesh": ONE, "layers": 2, "learns": True, "steps": 1000, "state_arrays": 5, "donated": 4},
    **{"attention_forward": 4, "attention_backward": 2, "attention_unfused": 0, "logits": 0},
    **{"float32_unnamed": [], "asks_host": [], "sends_inside_branches": [], "nondeterministic": []},
    **{"arguments": 2**30, "outputs": 0, "temporaries": 2**30, "compiled_s": 3.0, "lines": 10},
    **{"flops": {"bf16": 1e14}, "sends": [], "cost": {}},
}
WRONG = {
    "no gradient is fused": {"attention_backward": 0},
    "attention by XLA": {"attention_unfused": 2},
    "float32": {"float32_unnamed": ["f32[8,8] = f32[8,8] × f32[8,8], dense"]},
    "the host is asked": {"asks_host": ["infeed"]},
    "a device may wait for ever": {"sends_inside_branches": ["all-reduce"]},
    "no fixed order": {"nondeterministic": ["scatter"]},
    "copies of the state": {"donated": 1},
    "all logits": {"logits": 1},
    "all scores": {"scores": 2**31, "largest_scores": 0.5},
}


def compiled_text(function: Any, *shapes: tuple[int, ...]) -> str:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*arguments).compile().as_text()


def test_flops_count_rounds_of_loops() -> None:
    def looped(a, b):
        return jax.lax.fori_loop(0, 7, lambda _, x: x @ b, a)

    found = flops(compiled_text(looped, (4, 16), (16, 16)), {})
    assert sum(found.values()) == 7 * 2 * 4 * 16 * 16


def test_flops_of_a_loop_over_rows_are_those_of_the_rounds_that_its_lengths_give() -> None:
    def looped(tokens, lengths, a):
        def one(state):
            number, x, tokens, lengths = state
            return number + 1, x @ x, tokens + number, lengths

        state = (jnp.int32(0), a, tokens, lengths)
        return jax.lax.while_loop(lambda state: state[0] < state[3].max(), one, state)

    shapes = [jax.ShapeDtypeStruct((8, 5), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)]
    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    text = jax.jit(looped).lower(*shapes, square).compile().as_text()
    once = sum(flops(text, {}).values())
    assert once == 2 * 16**3
    assert sum(flops(text, {(8, 5): Rounds(3.0)}).values()) == 3 * once


def test_a_sound_program_has_no_fault_and_a_price() -> None:
    assert faults(GOOD) == []
    by_name = {case.case.rpartition(": ")[2]: case for case in cases_of(GOOD)}
    assert by_name["memory"].value == 2
    assert by_name["memory"].holds
    details = by_name["products"].details
    assert details["GPU-hours"] == pytest.approx(1000 * 1e14 / 989e12 / 0.26 / 3600)
    assert details["dollars"] == 3 * details["GPU-hours"]


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_each_fault_is_found(wrong: dict[str, Any]) -> None:
    assert len(faults(GOOD | wrong)) == 1
    assert not cases_of(GOOD | wrong)[0].holds


def test_a_program_that_needs_more_than_a_device_has_does_not_hold() -> None:
    memory = cases_of(GOOD | {"temporaries": 90 * 2**30})[1]
    assert memory.holds is False
    assert cases_of({"row": "r", "program": "update", "failed": "out of memory"})[0].holds is False


def test_float32_products_that_are_meant_are_no_fault() -> None:
    meant = Product("f32[2] = f32[2] × f32[2]", "jit(f)/rt,td->rd/dot_general")
    other = Product("f32[2] = f32[2] × f32[2]", "jit(f)/dense/dot_general")
    assert unnamed([meant], "cuda") == []
    assert len(unnamed([meant, other], "cuda")) == 1


def test_logits_of_a_block_are_seen_and_tables_are_not() -> None:
    def logits(x, table):
        return jnp.exp(x @ table.T).sum()

    text = compiled_text(logits, (4096, 64), (5000, 64))
    assert arrays_of_logits(text, 5000, 64)
    assert not arrays_of_logits(compiled_text(logits, (128, 64), (5000, 64)), 5000, 64)


def test_rows_are_chosen_by_regular_expressions() -> None:
    names = row_names(False, "h100")
    assert len(set(names)) == len(names)
    assert chosen(names, ["e5/1x8x1$"]) == ["h100/q_rag/e5/1x8x1"]
    for pattern in ("nobody", "("):
        with pytest.raises(InputError, match="--only"):
            chosen(names, [pattern])


@pytest.mark.long
def test_models_of_full_size_are_opened_without_weights(tmp_path: Path) -> None:
    config = config_of(RECIPES["q_rag/contriever"], ONE, tmp_path, drawn=False)
    loaded = load_encoder(Path(config.encoder.path))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(loaded.stored)) > 1e8
    config = config_of(RECIPES["rlvr/qwen3-1.7b"], (1, 8, 1), tmp_path, drawn=False)
    model = load_language_model(Path(config.model.path))
    found = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.stored))
    assert found == 1_720_574_976  # as the model's page says: 1.7B
    assert config.runtime.mesh == (1, 8, 1)


def test_parts_go_on_where_they_were_interrupted(tmp_path: Path) -> None:
    calls = []

    def part(name: str) -> list[dict[str, Any]]:
        calls.append(name)
        if name == "b" and calls.count("b") == 1:
            raise subprocess.SubprocessError("ended with status 9")
        return [{"case": name, "value": 1.0, "unit": "ms"}]

    first = finish(tmp_path, ["a", "b"], part)
    assert first["b"][0]["value"] is None
    assert "status 9" in first["b"][0]["unit"]
    assert [case["value"] for each in finish(tmp_path, ["a", "b"], part).values() for case in each]
    assert calls == ["a", "b", "b"]
    assert set(json.loads((tmp_path / "results.json").read_text())) == {"a", "b"}


def test_a_program_is_timed_with_values_for_its_shapes() -> None:
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    state = {"w": shape, "mu": shape, "key": jax.eval_shape(lambda: jax.random.key(0))}
    values = with_values((state, jax.ShapeDtypeStruct((8,), jnp.int32)))
    assert np.isfinite(values[0]["w"]).all()
    assert np.asarray(values[0]["w"]).std() > 0
    step = jax.jit(lambda state, tokens: (state | {"w": state["w"] + tokens.sum()}, tokens))
    found = timed("tiny", Program("update", step, (state, values[1])))
    assert found["value"] > 0
    assert found["unit"] == "ms"
