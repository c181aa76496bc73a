"""Training: what a run leaves behind, what a started run refuses, bad input in one sentence."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import ml_collections
import pytest
from tensorboardX.proto import event_pb2

from configs import hotpotqa
from qrag_jax import train
from qrag_jax.errors import InputError
from tests import devices
from tests.entry_points import (
    CHECKPOINT_EVERY,
    EVAL_EVERY,
    SHARED,
    STEPS,
    Commands,
    losses,
    metric_lines,
    refusal,
    saved_state,
)
from tests.systems.parts import samples_of

pytestmark = pytest.mark.long

PER_STEP = {
    *("loss", "mean_q", "mean_target", "td_error", "entropy", "return", "fact_em", "grad_norm"),
    *("learning_rate", "alpha", "padding_share", "env_steps"),
    *("skipped_steps", "skipped_in_a_row"),
}
SPEED = {
    *("steps_per_second", "input_wait_share", "compilations", "compilation_seconds", "seconds"),
}
FIRST_STEP = "speed/time_to_first_step"


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------- what is left behind


def test_what_a_run_leaves_behind(finished_run: Path) -> None:
    config = json.loads((finished_run / "config.json").read_text())
    assert config["train"]["steps"] == STEPS
    assert config["optimizer"]["learning_rate"] == 1e-3
    names = {path.name for path in (finished_run / "encoder").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert (finished_run / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    last = sorted(int(path.name) for path in (finished_run / "checkpoints/last").iterdir())
    assert last == [STEPS - CHECKPOINT_EVERY, STEPS]
    (best,) = (finished_run / "checkpoints/best").iterdir()
    returns = {
        line["step"]: line["eval/return"]
        for line in metric_lines(finished_run)
        if "eval/return" in line
    }
    assert returns[int(best.name)] == max(returns.values())
    assert json.loads((finished_run / "training.json").read_text())["seconds"] > 0
    assert not [path.name for path in finished_run.iterdir() if path.name.startswith(".encoder")]


def test_metrics_of_every_step(finished_run: Path) -> None:
    lines = metric_lines(finished_run)
    training = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in training] == list(range(1, STEPS + 1))
    for line in training:
        names = {f"train/{name}" for name in PER_STEP} | {f"speed/{name}" for name in SPEED}
        assert set(line) == names | {"step"}
        assert all(value is not None and math.isfinite(value) for value in line.values())
        assert 0 <= line["train/padding_share"] < 1
        assert line["train/env_steps"] == line["step"] * 8 * 2  # questions × max_steps
        # The temperature follows the learning rate (α_t = α_0·lr_t / lr_0).
        assert line["train/alpha"] == pytest.approx(0.05 * line["train/learning_rate"] / 1e-3)
    assert training[0]["train/grad_norm"] > 0
    scored = [line for line in lines if "eval/fact_em" in line]
    assert [line["step"] for line in scored] == list(range(0, STEPS + 1, EVAL_EVERY))
    for line in scored:
        cut = ("return_until_found", "fact_f1_until_found", "fact_precision_until_found")
        assert line["eval/return_until_found"] == line["eval/fact_em"]
        assert line["eval/fact_f1_until_found"] >= line["eval/fact_f1"]
        for score in ("fact_em", "fact_f1", "fact_precision", "fact_recall", "return", *cut):
            assert 0 <= line[f"eval/{score}"] <= 1
            assert line[f"untrained/{score}"] == scored[0][f"eval/{score}"]
            assert line[f"single_step/{score}"] == scored[0][f"eval_single_step/{score}"]


def test_nothing_is_compiled_after_the_start(finished_run: Path) -> None:
    counts = [
        line["speed/compilations"]
        for line in metric_lines(finished_run)
        if "speed/compilations" in line
    ]
    assert len(set(counts[1:CHECKPOINT_EVERY])) == 1
    # The first checkpoint may compile a copy; from then on everything has been met once.
    assert len(set(counts[CHECKPOINT_EVERY:])) == 1


def test_tensorboard_can_be_read(finished_run: Path) -> None:
    (path,) = (finished_run / "tensorboard").iterdir()
    data, seen = path.read_bytes(), {}
    while data:  # records: length (8 bytes), checksum (4), event, checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        seen |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + size :]
    for step, loss in losses(finished_run):
        assert seen["train/loss", step] == pytest.approx(loss)
    assert ("eval/fact_em", STEPS) in seen


# ---------------------------------------------------------------------- started again


def test_finished_run_started_again(run_copy: Path, commands: Commands) -> None:
    before = files(run_copy)
    state = saved_state(run_copy, STEPS)
    out = commands.succeed("train", *SHARED, f"--workdir={run_copy}")
    assert f"resumed {run_copy} at step {STEPS}" in out
    after = files(run_copy)
    for name in ("config.json", "metrics.jsonl", "encoder/model.safetensors"):
        assert after[name] == before[name]
    assert {n for n in after if n.startswith("checkpoints")} == {
        n for n in before if n.startswith("checkpoints")
    }
    assert saved_state(run_copy, STEPS).keys() == state.keys()


def test_a_best_checkpoint_of_step_0_is_told(untrained_best: Path, commands: Commands) -> None:
    out = commands.succeed("train", *SHARED, f"--workdir={untrained_best}")
    assert "the best checkpoint so far is that of step 0, the untrained weights" in out
    assert "--checkpoint=last" in out


def test_either_return_chooses_the_best(commands: Commands, tmp_path: Path) -> None:
    """A reward that is the lower the more facts are taken: the two returns disagree."""
    workdir = tmp_path / "run"
    fields = ("--config.reward.per_fact_reward=-2.0", "--config.eval.best_by=return_until_found")
    commands.succeed("train", *SHARED, *fields, f"--workdir={workdir}")
    scored = [line for line in metric_lines(workdir) if "eval/return" in line]
    (best,) = (workdir / "checkpoints/best").iterdir()
    first_best = {
        name: max(scored, key=lambda line, name=name: line[f"eval/{name}"])["step"]
        for name in ("return", "return_until_found")
    }
    assert int(best.name) == first_best["return_until_found"] != first_best["return"]


def test_other_settings_are_refused_and_nothing_is_lost(run_copy: Path, commands: Commands) -> None:
    before = files(run_copy)
    changed = "--config.optimizer.learning_rate=0.01"
    text = refusal(commands.run("train", *SHARED, f"--workdir={run_copy}", changed))
    assert "config.optimizer.learning_rate: the run has 0.001, given is 0.01" in text
    assert files(run_copy) == before


def test_first_step_is_timed_and_a_second_start_compiles_little(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    assert [line["step"] for line in metric_lines(run_copy) if FIRST_STEP in line] == [1]
    environment = commands.environment
    del environment["JAX_COMPILATION_CACHE_DIR"]  # as for a user
    environment["QRAG_CACHE"] = str(tmp_path)
    told = []
    for _ in range(2):
        shutil.rmtree(run_copy / "checkpoints" / "last" / str(STEPS))
        out = commands.succeed("train", *SHARED, f"--workdir={run_copy}", env=environment)
        (line,) = [line for line in out.splitlines() if line.startswith("first step after")]
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d)?", line)]
        told.append(dict(zip(("seconds", "compiling", "programs", "cached"), numbers, strict=True)))
        (metrics,) = [
            line for line in metric_lines(run_copy) if FIRST_STEP in line and line["step"] != 1
        ]
        assert metrics["step"] == STEPS - CHECKPOINT_EVERY + 1
        assert metrics[FIRST_STEP] == pytest.approx(told[-1]["seconds"], abs=0.06)
        assert metrics["speed/compilation_cache_hits"] == told[-1]["cached"]
        assert told[-1]["compiling"] < told[-1]["seconds"]
    first, second = told
    assert first["cached"] == 0
    assert second["cached"] >= 1  # the training step; programs of under half a second are not kept
    assert second["programs"] == first["programs"]
    assert second["compiling"] < first["compiling"] / 2


# ---------------------------------------------------------------------- bad input


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ml_collections.ConfigDict:
    # These tests compile nothing; JAX shall not be turned to a folder that goes away.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    result.data.synthetic.train = 20
    return result


def refused(config: ml_collections.ConfigDict, workdir: Path) -> str:
    with pytest.raises(InputError) as caught:
        train.train(config, workdir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"data.path": "/no/such.jsonl"}, "/no/such.jsonl does not exist"),
        ({"optimizer.schedule": "step"}, "config.optimizer.schedule is 'step'"),
        (
            {"reward.name": "f1"},
            "config.reward.name is 'f1'; use one of ground_truth, gt,",
        ),
        ({"eval.best_by": "f1"}, "config.eval.best_by is 'f1'; use one of return, return_until"),
        ({"reward.name": "judge"}, "config.llm.url"),
        (
            {"encoder.dtype": "int8"},
            "config.encoder.dtype is 'int8'; use one of auto, float32, bfloat16",
        ),
        ({"encoder.remat": "all"}, "config.encoder.remat is 'all'; use one of none, dots, layers"),
        ({"encoder.path": "no/such/folder"}, "no/such/folder"),
        ({"env.max_steps": 9}, "config.env.max_steps is 9, but no hotpotqa question has more than"),
        ({"encoder.scratch.positions": 32}, "but the encoder has 32 positions"),
        ({"train.accumulation": 3}, f"use a multiple of {3 * devices.COUNT}."),
        ({"profile": -1}, "config.profile is -1; it must be at least 0."),
        ({"train.log_every": 0}, "config.train.log_every is 0; it must be at least 1."),
        ({"runtime.mesh": (64, 1, 1)}, "config.runtime.mesh is (64, 1, 1)"),
    ],
)
def test_bad_settings(
    config: ml_collections.ConfigDict, fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    good = config.copy_and_resolve_references()
    config.update_from_flattened_dict(fields)
    assert says in refused(config, tmp_path / "run")
    # The refused start must not stand in the way of the corrected one.
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert good != config


def test_workdir_that_is_a_file(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    text = refused(config, tmp_path / "run")
    assert str(tmp_path / "run") in text
    assert (tmp_path / "run").read_text() == "mine"


def test_training_on_the_evaluation_questions(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    config.data.path = str(tmp_path)
    source = {"_id": "a", "question": "Who?", "answer": "Ada", "supporting_facts": [["Ada", 0]]}
    record = {**source, "context": [["Ada", ["Born."]], ["Bob", ["Not."]]]}
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps(record))
    assert "every hotpotqa training question is also" in refused(config, tmp_path / "run")


def test_command_line_tells_bad_data_in_one_sentence(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    arguments = ("--config=configs/hotpotqa.py:tiny", f"--workdir={tmp_path / 'run'}")
    path = tmp_path / "train.jsonl"
    text = refusal(commands.run("train", *arguments, f"--config.data.path={path}"))
    assert f"{path} is empty" in text
    path = tmp_path / "nowhere"
    text = refusal(commands.run("train", *arguments, f"--config.data.path={path}"))
    assert f"{path} does not exist" in text


def test_command_line_without_config(commands: Commands) -> None:
    assert "configs/hotpotqa.py" in refusal(commands.run("train"))


# ---------------------------------------------------------------------- one file as the data


def test_single_file_is_held_out_in_part(commands: Commands, tmp_path: Path) -> None:
    made = hotpotqa.get_config("tiny")
    made.data.cache = str(tmp_path)
    samples_of(made, "train")
    (path,) = tmp_path.glob("synthetic/*/train.jsonl")
    ids = {json.loads(line)["_id"] for line in path.read_text().splitlines()}
    data, workdir = path, tmp_path / "run"
    arguments = (
        *("--config=configs/hotpotqa.py:tiny", f"--workdir={workdir}"),
        *(f"--config.data.path={data}", "--config.train.steps=1"),
        "--config.encoder.length_buckets=1",
        "--config.encoder.block_sizes=1",
    )
    out = commands.succeed("train", *arguments)
    kept = int(out.partition(" of them for train")[0].split()[-1])
    commands.succeed("evaluate", f"--workdir={workdir}")
    (path,) = workdir.glob("eval/best-*/eval_seed42.jsonl")
    log = path.read_text().splitlines()
    scored = {json.loads(line)["id"] for line in log}
    assert len(scored) == len(log) == len(ids) - kept
    assert scored < ids
    # The same records under another path, and then others: only with these it cannot go on.
    data = data.rename(tmp_path / "moved.jsonl")
    arguments = (*arguments, f"--config.data.path={data}")
    commands.succeed("train", *arguments)
    assert json.loads((workdir / "config.json").read_text())["data"]["path"] == str(data)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    record = next(record for record in records if record["_id"] not in scored)
    record["question"] += " Really?"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "are not those that" in refusal(commands.run("train", *arguments))
