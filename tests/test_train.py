"""Training: what a run logs, what a started run refuses, bad input, trackers, and stages."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import ml_collections
import pytest

from configs import hotpotqa, own
from qrag_jax import train
from qrag_jax.errors import InputError
from qrag_jax.systems.q_rag import QRag
from qrag_jax.systems.q_rag_config import IMITATE, PQN, QRagConfig
from tests import devices
from tests.entry_points import (
    CHECKPOINT_EVERY,
    EVAL_EVERY,
    SHARED,
    STEPS,
    Commands,
    assert_same_state,
    metric_lines,
    refusal,
)

FIRST_STEP = "speed/time_to_first_step"


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------- what is logged


def test_metrics_of_every_step(finished_run: Path) -> None:
    lines = metric_lines(finished_run)
    training = [line for line in lines if "train/loss" in line]
    for line in training:
        assert all(value is not None and math.isfinite(value) for value in line.values())
        assert {"train/grad_norm", "train/td_error", "train/return", "train/fact_em"} <= set(line)
        assert 0 <= line["train/padding_share"] < 1
        assert line["train/env_steps"] == line["step"] * 8 * 2  # questions × max_steps
        # The temperature follows the learning rate (α_t = α_0·lr_t / lr_0).
        assert line["train/alpha"] == pytest.approx(0.05 * line["train/learning_rate"] / 1e-3)
    assert training[0]["train/grad_norm"] > 0
    scored = [line for line in lines if "eval/fact_em" in line]
    assert [line["step"] for line in scored] == [*range(0, STEPS + 1, EVAL_EVERY)]
    for line in scored:
        assert line["eval/return_until_found"] == line["eval/fact_em"]
        assert line["eval/fact_f1_until_found"] >= line["eval/fact_f1"]
        for score in ("fact_em", "fact_f1", "return", "fact_precision_until_found"):
            assert 0 <= line[f"eval/{score}"] <= 1
            assert line[f"untrained/{score}"] == scored[0][f"eval/{score}"]
            assert line[f"single_step/{score}"] == scored[0][f"eval_single_step/{score}"]
    # All is compiled at the start; the first checkpoint may compile a copy.
    counts = [line["speed/compilations"] for line in training]
    assert len(set(counts[1:CHECKPOINT_EVERY])) == len(set(counts[CHECKPOINT_EVERY:])) == 1
    assert [line["step"] for line in lines if FIRST_STEP in line] == [1]
    returns = {line["step"]: line["eval/return"] for line in scored}
    (best,) = (finished_run / "checkpoints/best").iterdir()
    assert returns[int(best.name)] == max(returns.values())
    last = sorted(int(path.name) for path in (finished_run / "checkpoints/last").iterdir())
    assert last == [STEPS - CHECKPOINT_EVERY, STEPS]


# ---------------------------------------------------------------------- started again


def test_a_finished_run_started_again_changes_nothing(run_copy: Path, commands: Commands) -> None:
    before = files(run_copy)
    changed = "--config.optimizer.learning_rate=0.01"
    text = refusal(commands.run("train", *SHARED, f"--workdir={run_copy}", changed))
    assert "config.optimizer.learning_rate" in text
    assert files(run_copy) == before
    out = commands.succeed("train", *SHARED, f"--workdir={run_copy}")
    assert f"resumed {run_copy} at step {STEPS}" in out
    after = files(run_copy)
    for name in ("config.json", "metrics.jsonl", "encoder/model.safetensors"):
        assert after[name] == before[name]
    assert {n for n in after if n.startswith("checkpoints")} == {
        n for n in before if n.startswith("checkpoints")
    }


def test_a_second_start_takes_its_programs_from_the_users_cache(
    run_copy: Path, commands: Commands, tmp_path: Path
) -> None:
    environment = commands.environment
    for name in [name for name in environment if name.startswith("JAX_PERSISTENT")]:
        del environment[name]
    del environment["JAX_COMPILATION_CACHE_DIR"]  # as for a user
    environment["QRAG_CACHE"] = str(tmp_path)
    hits = []
    for _ in range(2):
        shutil.rmtree(run_copy / "checkpoints" / "last" / str(STEPS))
        commands.succeed("train", *SHARED, f"--workdir={run_copy}", env=environment)
        (line,) = [x for x in metric_lines(run_copy) if FIRST_STEP in x and x["step"] != 1]
        assert line["step"] == STEPS - CHECKPOINT_EVERY + 1
        hits.append(line["speed/compilation_cache_hits"])
    assert hits[0] == 0
    assert hits[1] >= 1  # the training step; programs of under half a second are not kept


# ---------------------------------------------------------------------- bad input


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ml_collections.ConfigDict:
    # These tests compile nothing; JAX shall not be turned to a folder that goes away.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    result = hotpotqa.get_config("tiny")
    result.data.cache = str(tmp_path / "cache")
    result.data.limit = 20
    return result


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"data.path": "/no/such.jsonl"}, "/no/such.jsonl"),
        ({"reward.name": "judge"}, "config.llm.url"),
        ({"train.accumulation": 3}, f"{3 * devices.COUNT}"),
        ({"runtime.mesh": (64, 1, 1)}, "config.runtime.mesh"),
    ],
)
def test_settings_that_do_not_fit_the_data_or_the_machine(
    config: ml_collections.ConfigDict, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config.update_from_flattened_dict(fields)
    with pytest.raises(InputError, match=named):
        train.train(config, tmp_path / "run")
    # The refused start must not stand in the way of the corrected one.
    assert not (tmp_path / "run" / "config.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_workdir_that_is_a_file_and_data_that_leak(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=str(tmp_path / "file")):
        train.train(config, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    config.data.path = str(tmp_path)
    source = {"_id": "a", "question": "Who?", "answer": "Ada", "supporting_facts": [["Ada", 0]]}
    record = {**source, "context": [["Ada", ["Born."]], ["Bob", ["Not."]]]}
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps(record))
    with pytest.raises(InputError, match="hotpotqa"):  # each question is one to train on, too
        train.train(config, tmp_path / "run")


# ---------------------------------------------------------------------- trackers


def test_trackers_are_refused_before_anything_is_computed_or_left_out(
    commands: Commands, tmp_path: Path
) -> None:
    environment = {k: v for k, v in commands.environment.items() if "WANDB" not in k}
    environment["NETRC"] = str(tmp_path / "none")
    workdir = tmp_path / "run"
    words = (*SHARED, "--config.train.steps=4", f"--workdir={workdir}")
    text = refusal(commands.run("train", *words, "--config.log.to=wandb", env=environment))
    installed = importlib.util.find_spec("wandb") is not None
    assert ("WANDB_API_KEY" if installed else "qrag_jax[wandb]") in text
    assert not workdir.exists()
    commands.succeed("train", *words, "--config.log.to=()")
    assert not (workdir / "tensorboard").exists()
    commands.succeed("train", *words, "--config.log.project=other")  # this section may change
    assert (workdir / "tensorboard").exists()


# ---------------------------------------------------------------------- imitation, then PQN

IMITATED, STAGED = 3, 6


def staged(*stages: str, **fields: Any) -> ml_collections.ConfigDict:
    config = hotpotqa.get_config("tiny").unlock()
    config.encoder.scratch.update(layers=1, hidden=16)
    config.encoder.update(length_buckets=1, block_sizes=1)
    config.stages = stages
    config.imitate.update(steps=IMITATED, batch_size=8, learning_rate=1e-3)
    config.train.update(steps=STAGED - IMITATED, eval_every=100, checkpoint_every=100, log_every=1)
    for name, value in fields.items():
        section, _, field = name.partition("__")
        config[section][field] = value
    return config


def test_a_run_stopped_in_either_stage_and_between_them_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train.train(staged(IMITATE, PQN), tmp_path / "whole") == 0
    lines = metric_lines(tmp_path / "whole")
    assert [line["step"] for line in lines if "train/accuracy" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "train/td_error" in line] == [4, 5, 6]
    update, done = QRag.update, {"steps": 0}

    def stopped(self: QRag, state: Any, episodes: Any) -> Any:
        done["steps"] += 1
        if done["steps"] in (2, IMITATED, STAGED - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, episodes)

    monkeypatch.setattr(QRag, "update", stopped)
    for _ in range(3):
        assert train.train(staged(IMITATE, PQN), tmp_path / "run") == 128 + signal.SIGTERM
    assert train.train(staged(IMITATE, PQN), tmp_path / "run") == 0
    assert done["steps"] == STAGED
    assert_same_state(tmp_path / "run", tmp_path / "whole", STAGED)


def test_a_finished_run_with_more_steps_is_the_longer_run(tmp_path: Path) -> None:
    def trains(folder: str, steps: int) -> int:
        config = staged(PQN, optimizer__schedule="constant", train__steps=steps)
        return train.train(config, tmp_path / folder)

    assert [trains("one", 2), trains("one", 4), trains("other", 4)] == [0, 0, 0]
    assert_same_state(tmp_path / "one", tmp_path / "other", 4)
    with pytest.raises(InputError, match=r"config\.train\.steps"):
        trains("one", 2)


@pytest.mark.parametrize(
    ("stages", "fields", "named"),
    [
        (("sft",), {}, "config.stages"),
        ((IMITATE,), {"imitate__shared_by": 3, "env__positions": "none"}, "config.imitate.batch"),
    ],
)
def test_stages_that_make_no_sense(
    tmp_path: Path, stages: tuple[str, ...], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        train.train(staged(*stages, **fields), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_facts_to_imitate_must_be_there_and_their_order_is_the_datas(tmp_path: Path) -> None:
    record = {"chunks": ["a is b", "b is c"], "answers": ["c"]}
    records = [record | {"id": str(n), "question": f"Who is {n}?"} for n in range(40)]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in records))
    config = own.get_config("tiny").unlock()
    config.data.path, config.stages = str(path), (IMITATE,)
    config.reward.name = "answer_in_chunk"
    with pytest.raises(InputError, match="imitate"):
        train.train(config, tmp_path / "run")
    for name, order, known in (
        ("two_wiki", "auto", True),
        ("hotpotqa", "auto", False),
        ("hotpotqa", "data", True),
        ("musique", "any", False),
    ):
        config = staged(PQN, data__gold_order=order)
        config.data.sources = {name: {"weight": 1.0}}
        assert (name in QRagConfig.of(config).data.ordered) is known
