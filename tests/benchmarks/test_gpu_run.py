"""Parts measured on a GPU: kept one by one, gone on with, and shown beside estimate and peer."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_estimate, gpu_run
from benchmarks.gpu_parts import PARTS, RECIPES, Place, Row, _recipe, recipe_row, training_rows
from benchmarks.gpu_run import PartFailed, cases, finish, table
from benchmarks.memory_cases import BLOCK_TOKENS, MEAN_TOKENS
from benchmarks.published import MODELS
from qrag_jax.errors import InputError
from tests.runtime.test_step_time import COUNTED, LOOPS, program

DEVICE = {"platform": "gpu", "kind": "NVIDIA H100", "count": 1, "machine": "a machine"}
NAMES = ["encoder", "step-base", "step-base-torch"]


def row(name: str, value: float | None, **more) -> dict:
    return dataclasses.asdict(Row(name, value, "transitions/s", **more))


def test_an_interrupted_run_goes_on_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    kept, asked = tmp_path / "results.json", []

    def part(name: str) -> list[dict]:
        asked.append(name)
        if asked == ["encoder", "step-base"]:
            raise KeyboardInterrupt
        return [row(name, float(len(asked)))]

    with pytest.raises(KeyboardInterrupt):
        finish(kept, NAMES, part, DEVICE)
    assert list(json.loads(kept.read_text())["parts"]) == ["encoder"]
    results = finish(kept, NAMES, part, DEVICE)
    assert asked == ["encoder", "step-base", "step-base", "step-base-torch"]
    assert json.loads(json.dumps(results)) == json.loads(kept.read_text())
    assert results["parts"]["encoder"]["rows"][0]["value"] == 1.0
    assert results["device"] == DEVICE


def test_a_part_that_fails_is_noted_and_run_again(tmp_path: Path) -> None:
    kept, failing = tmp_path / "results.json", ["step-base"]

    def part(name: str) -> list[dict]:
        if name in failing:
            raise PartFailed("stopped after 590 s")
        return [row(name, 2.0)]

    first = finish(kept, NAMES, part, DEVICE)
    assert [case.value for case in cases(first)] == [2.0, 2.0, None]
    assert cases(first)[-1].details["note"] == "stopped after 590 s"
    failing.clear()
    second = finish(kept, NAMES, part, DEVICE)
    assert list(second["parts"]) == NAMES  # in the order of PARTS
    assert all("rows" in part for part in second["parts"].values())


def test_a_line_has_the_estimate_and_the_peer_beside_the_measurement() -> None:
    ours = row("PQN step", 300.0, estimate=400.0, share_of_peak=0.25, note="HotpotQA")
    theirs = row("PQN step", 100.0, peer=True, note="torch in bfloat16")
    parts = {"step-base": {"rows": [ours]}, "step-base-torch": {"rows": [theirs]}}
    (line,) = table({"parts": parts})
    assert line == (
        *("PQN step", "300", "transitions/s", "400", "0.75", "0.25", "100", "3"),
        "HotpotQA; torch in bfloat16",
    )
    absent = row("PQN step", None, peer=True, note="torch is not installed")
    (line,) = table({"parts": parts | {"step-base-torch": {"rows": [absent]}}})
    assert line[-3:] == ("", "", "HotpotQA; torch is not installed")
    (alone,) = cases({"parts": {"step-base-torch": {"rows": [absent]}}})
    assert (alone.case, alone.value) == ("PQN step: torch", None)


def test_without_a_gpu_the_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "_process", lambda *_: DEVICE | {"platform": "cpu"})
    with pytest.raises(InputError, match="JAX finds none here") as error:
        gpu_run.run(quick=False)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"--only=index: the parts are encoder, "):
        gpu_run.run(quick=False, only=["index"])


def test_a_process_that_fails_or_takes_too_long_is_a_part_that_failed(tmp_path: Path) -> None:
    with pytest.raises(PartFailed, match="status 1"):
        gpu_run._process(sys.executable, "no such part", tmp_path, [], 60.0)
    with pytest.raises(PartFailed, match="stopped after 0 s"):
        gpu_run._process(sys.executable, "encoder", tmp_path, ["--quick"], 0.01)


def test_the_log_of_a_training_gives_speed_and_quality() -> None:
    log = [
        {"step": 0, "eval/fact_em": 0.1},
        {"step": 2, "train/env_steps": 32.0, "speed/steps_per_second": 9.0},
        {"step": 4, "train/env_steps": 64.0, "speed/steps_per_second": 3.0, "eval/fact_em": 0.3},
    ]
    speed, steps, score = training_rows("training", log, 2, "HotpotQA")
    assert (speed.value, steps.value, score.value) == (3.0, 64.0, 0.3)  # 9.0 is of an older start
    assert score.note == "untrained 0.100"
    assert [row.value for row in training_rows("training", [], 0, "")] == [None] * 3


def test_every_step_of_ours_has_a_peer() -> None:
    steps = {name for name in PARTS if name.startswith("step-") and not name.endswith("-torch")}
    assert {f"{name}-torch" for name in steps} < set(PARTS)


def test_the_suites_loops_run_for_rows_of_the_mean_length() -> None:
    text = program(COUNTED, LOOPS)
    assert gpu_estimate.even_rounds(text)[8, 285].rounds == 1.0
    many = text.replace("s32[8,285]", "s32[80,285]").replace("s32[8]", "s32[80]")
    rounds = -(-80 // (BLOCK_TOKENS // MEAN_TOKENS))
    assert rounds == 2
    assert gpu_estimate.even_rounds(many)[80, 285].rounds == rounds
    found = gpu_estimate.estimate_row(many, "NVIDIA H100 80GB HBM3", {})
    assert found is not None
    (case,) = gpu_estimate.estimate_cases("a step", {"estimate": found})
    assert case.value == found["seconds"] * 1e3
    assert found["bound"] in gpu_estimate.estimate_cell({"estimate": found})
    assert gpu_estimate.estimate_row(many, "TPU v5e", {}) is None
    assert gpu_estimate.estimate_cases("a step", {"estimate": None}) == []


def test_a_recipe_is_timed_without_its_first_line_which_compiles() -> None:
    log = [
        {"step": 1, "speed/time_to_first_step": 40.2},
        *({"step": n, "speed/steps_per_second": rate} for n, rate in enumerate((0.1, 5, 4, 8))),
    ]
    found = recipe_row("recipe", log, estimate=100.0)
    assert (found.value, found.unit, found.estimate) == (200.0, "ms an update", 100.0)
    assert found.note == "first step after 40 s"
    assert recipe_row("recipe", log[:2], 100.0).value is None


def test_the_recipes_are_configs_with_known_encoders(tmp_path: Path) -> None:
    for name, (config, encoder, *_) in RECIPES.items():
        file, variant = config.split(":")
        module = importlib.import_module(f"configs.{file.removesuffix('.py')}")
        assert module.get_config(variant).encoder.path == encoder
        assert encoder in MODELS
        (row,) = _recipe(name, Place(tmp_path, quick=True))
        assert row.value is None
        assert "is not quick" in row.note
