"""Training: what a run logs, what a started run refuses, its stages and adapters."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files
from qrag_jax.systems import training
from qrag_jax.systems.q_rag.config import PQN
from qrag_jax.systems.q_rag.system import QRag
from tests import devices, machine
from tests.entry_points import (
    CHECKPOINT_EVERY,
    EVAL_EVERY,
    SHARED,
    STEPS,
    Commands,
    assert_same_state,
    end,
    losses,
    metric_lines,
    refusal,
    saved_state,
    wait_for_step,
)
from tests.systems.corpora import tree
from tests.systems.small_runs import small_q_rag


def test_metrics_of_every_step(finished_run: Path) -> None:
    lines = metric_lines(finished_run)
    training = [line for line in lines if "train/loss" in line]
    for line in training:
        assert all(value is not None and math.isfinite(value) for value in line.values())
        assert line["train/env_steps"] == line["step"] * 8 * 2  # questions × max_steps
        # The temperature follows the learning rate (α_t = α_0·lr_t / lr_0).
        assert line["train/alpha"] == pytest.approx(0.05 * line["train/learning_rate"] / 1e-3)
    scored = [line for line in lines if "eval/fact_em" in line]
    assert [line["step"] for line in scored] == [*range(0, STEPS + 1, EVAL_EVERY)]
    for line in scored:
        assert line["eval/return_until_found"] == line["eval/fact_em"]
        assert line["eval/fact_f1_until_found"] >= line["eval/fact_f1"]
        assert line["untrained/return"] == scored[0]["eval/return"]
        assert line["single_step/return"] == scored[0]["eval_single_step/return"]
    # All is compiled at the start; the first checkpoint may compile a copy.
    counts = [line["speed/compilations"] for line in training]
    assert len(set(counts[1:CHECKPOINT_EVERY])) == len(set(counts[CHECKPOINT_EVERY:])) == 1
    returns = {line["step"]: line["eval/return"] for line in scored}
    (best,) = (finished_run / "checkpoints/best").iterdir()
    assert returns[int(best.name)] == max(returns.values())
    last = sorted(int(path.name) for path in (finished_run / "checkpoints/last").iterdir())
    assert last == [STEPS - CHECKPOINT_EVERY, STEPS]


def test_a_finished_run_started_again_changes_nothing(run_copy: Path, commands: Commands) -> None:
    before = tree(run_copy)
    out = commands.succeed("train", *SHARED, f"--workdir={run_copy}")
    assert f"resumed {run_copy} at step {STEPS}" in out
    after = tree(run_copy)
    for name in ("config.json", "metrics.jsonl", "encoder/model.safetensors"):
        assert after[name] == before[name]


# ---------------------------------------------------------------------- bad input

ASKED = {"reward.name": "answer_em", "llm.url": "http://127.0.0.1:9/v1", "llm.model": "tiny"}


@pytest.fixture
def config() -> ml_collections.ConfigDict:
    result = hotpotqa.get_config("tiny").unlock()
    result.data.limit = 20
    return result


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"data.path": "/no/such.jsonl"}, "/no/such.jsonl"),
        (ASKED, "http://127.0.0.1:9/v1"),
        (ASKED | {"llm.api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"train.accumulation": 3}, f"{3 * devices.COUNT}"),
        ({"runtime.mesh": (64, 1, 1)}, "config.runtime.mesh"),
    ],
)
def test_settings_that_do_not_fit_the_data_or_the_machine(
    config: ml_collections.ConfigDict, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config.update_from_flattened_dict(fields)
    with pytest.raises(InputError, match=named):
        training.train(config, tmp_path / "run")
    # The refused start must not stand in the way of the corrected one.
    assert not (tmp_path / "run").exists()


def test_a_workdir_that_is_a_file_and_data_that_leak(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=str(tmp_path / "file")):
        training.train(config, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    config.data.path = str(tmp_path)
    source = {"_id": "a", "question": "Who?", "answer": "Ada", "supporting_facts": [["Ada", 0]]}
    record = {**source, "context": [["Ada", ["Born."]], ["Bob", ["Not."]]]}
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text(json.dumps(record))
    with pytest.raises(InputError, match="hotpotqa"):  # each question is one to train on, too
        training.train(config, tmp_path / "run")


# ---------------------------------------------------------------------- stages

IMITATED, STAGED = 3, 6


def staged(steps: int = STAGED - IMITATED) -> ml_collections.ConfigDict:
    return small_q_rag(
        imitate__steps=IMITATED,
        train__steps=steps,
        train__eval_every=100,
        train__checkpoint_every=100,
        optimizer__schedule="constant",
    )


@pytest.mark.usefixtures("one_device")
def test_stopped_in_a_stage_and_lengthened_is_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert training.train(staged(), whole) == 0
    lines = metric_lines(whole)
    assert [line["step"] for line in lines if "train/accuracy" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "train/imitation_loss" in line] == [4, 5, 6]
    assert [line["step"] for line in lines if "train/td_error" in line] == [4, 5, 6]
    update, begun = QRag.update, itertools.count(1)

    def stopped(self: QRag, state: Any, episodes: Any) -> Any:
        if next(begun) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, episodes)

    monkeypatch.setattr(QRag, "update", stopped)
    assert training.train(staged(steps=1), run) == 128 + signal.SIGTERM
    assert training.train(staged(steps=1), run) == 0
    assert training.train(staged(), run) == 0
    assert next(begun) == STAGED + 1  # no step was taken twice
    assert_same_state(run, whole, STAGED)
    with pytest.raises(InputError, match=r"config\.train\.steps"):
        training.train(staged(steps=1), run)


# ---------------------------------------------------------------------- adapters


@pytest.mark.usefixtures("one_device")
def test_adapters_alone_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    fields = {"train__steps": 3, "train__checkpoint_every": 1, "encoder__lora__rank": 4}
    config = small_q_rag(stages=(PQN,), encoder__lora__dropout=0.2, **fields)
    assert training.train(config, run) == 0
    state = saved_state(run, 3)
    arrays = {name for name, array in state.items() if array.ndim > 0 and name != "key"}
    assert all(name.endswith(("lora_a", "lora_b")) for name in arrays)
    of_params = {name: state[name] for name in arrays if name.startswith("params/")}
    assert len(of_params) == 6 * 2  # BERT's linear maps
    # They have moved from their start, where B is 0.
    for name, array in of_params.items():
        assert (np.abs(array) > 1e-5).any(), name
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "last" / "3")
    assert training.train(config, again) == 0
    assert_same_state(again, run, 3)


# ---------------------------------------------------------------------- stopped, damaged, read-only


def last_step(workdir: Path) -> int:
    return max(int(p.name) for p in (workdir / "checkpoints/last").glob("*") if p.name.isdigit())


def test_a_closed_terminal_stops_in_good_order(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    """At first only untrained weights are scored; the clock brings the next evaluation."""
    workdir = tmp_path / "run"
    given = ("train", *SHARED, "--config.train.eval_every=1000", f"--workdir={workdir}")
    # Nobody reads what is written, then the signal comes.
    process = commands.start(
        *given,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup
    )
    for stream in (process.stdout, process.stderr):
        stream.close()
    process.stdout = process.stderr = None
    wait_for_step(process, workdir, 3)
    assert end(process, signal.SIGHUP).returncode == 128 + signal.SIGHUP
    saved = last_step(workdir)
    assert 3 <= saved < STEPS
    assert losses(workdir)[-1][0] == saved
    assert "--checkpoint=last" in refusal(commands.run("evaluate", f"--workdir={workdir}"))
    commands.succeed(*given, "--config.train.first_eval_minutes=0.0001")
    assert_same_state(workdir, finished_run, STEPS)
    assert losses(workdir) == losses(finished_run)
    first, early, *later = (x["step"] for x in metric_lines(workdir) if "eval/return" in x)
    assert (first, later) == (0, [STEPS])
    assert saved < early < STEPS


def test_a_config_that_is_missing_or_was_cut_is_refused(run_copy: Path) -> None:
    path = run_copy / "config.json"
    for content in (None, b'{"seed": 1'):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=r"config\.json"):
            training.train(hotpotqa.get_config("tiny"), run_copy)
        path.touch()


def test_what_a_killed_start_left_is_deleted_and_nothing_else(run_copy: Path) -> None:
    before, config = tree(run_copy), hotpotqa.get_config("tiny")
    config.pqn.gamma = 0.5
    unsaved = f"checkpoints/last/{STEPS + 4}.orbax-checkpoint-tmp"
    half = [run_copy / ".encoder-0a1b2c", run_copy / unsaved]
    for folder in half:
        folder.mkdir()
        (folder / "part").write_text("x")
    (run_copy / ".config.json.1a2b.partial").write_text("{")
    # Not while they are being written.
    with whole_files.run_lock(run_copy), pytest.raises(InputError, match=str(run_copy)):
        training.train(config, run_copy)
    assert all(folder.exists() for folder in half)
    with pytest.raises(InputError, match=r"config\.pqn\.gamma"):
        training.train(config, run_copy)
    assert not any(folder.exists() for folder in half)
    assert tree(run_copy) | {".lock": b""} == before | {".lock": b""}


def test_a_run_may_be_shared_as_the_umask_says(finished_run: Path, commands: Commands) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    folders = [path for path in finished_run.rglob("*") if path.is_dir()]
    folders += [path for path in (commands.folder / "cache").rglob("*") if path.is_dir()]
    assert {path.name for path in folders} >= {"encoder", "tokens", "last"}
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask, folder


def test_a_run_that_may_only_be_read(run_copy: Path, commands: Commands, tmp_path: Path) -> None:
    with machine.read_only(run_copy):
        with pytest.raises(InputError, match="--workdir"):
            training.train(hotpotqa.get_config("tiny"), run_copy)
        scoring = ("evaluate", f"--workdir={run_copy}", "--samples=2")
        assert "--out" in refusal(commands.run(*scoring))
        commands.succeed(*scoring, f"--out={tmp_path / 'scores'}")
