"""HARR by the commands: killed inside a rollout, played on two hosts, scored, refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import harr_grpo
from qrag_jax.data.sample import Decomposition
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.whole_files import half
from qrag_jax.systems import harr
from tests.entry_points import (
    Commands,
    assert_same_state,
    end,
    losses,
    metric_lines,
    refusal,
    wait_until,
)
from tests.llm.model_server import Call, ModelServer, Reply
from tests.systems.knowing_model import KnowingModel

STEPS = 4
REACT = (
    "--config=configs/harr_grpo.py:synthetic-react-tiny",
    "--config.train.log_every=1",
    f"--config.train.steps={STEPS}",
    f"--config.train.eval_every={STEPS}",
    "--config.encoder.scratch.layers=1",
    "--config.llm.model=tiny",
    "--config.llm.cache=''",
)
TRAINING, QUESTIONS = 64, 4  # questions to train on, and of one batch


def returns(workdir: Path) -> dict[int, float]:
    lines = metric_lines(workdir)
    return {line["step"]: line["train/return"] for line in lines if "train/return" in line}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decomposition]:
    """How the training questions are taken apart, and then the others, by their text."""
    folder = tmp_path_factory.mktemp("apart") / "run"
    with (
        Run.open(folder, 0.0) as run,
        harr.open_system(harr_grpo.get_config("tiny"), run) as system,
    ):
        every = (*system.inputs.train, *system.inputs.dev)
        pairs = {each.question: system.inputs.apart.get(each.id) for each in every}
    return {question: each for question, each in pairs.items() if each is not None}


@pytest.mark.nightly
def test_killed_inside_a_rollout(
    apart: dict[str, Decomposition], commands: Commands, tmp_path: Path
) -> None:
    """The model server kills the training before it answers the third batch's first request.

    Play is one batch ahead: what is saved by then is the first step.
    """
    knowing = KnowingModel(apart)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    saved = killed / "checkpoints" / "last" / "1"
    processes: list[Any] = []

    def kills(call: Call) -> Reply:
        if processes and len(begun(server.calls, apart)) > 2 * QUESTIONS:
            wait_until(saved.exists)
            processes.pop().kill()
        return knowing(call)

    with ModelServer(knowing) as server:
        given = (
            *(*REACT, "--config.train.checkpoint_every=1", f"--config.llm.url={server.url}"),
            "--config.agent.staleness=1",
        )
        commands.succeed("train", *given, f"--workdir={whole}")
        asked = begun(server.calls, apart)
        server.calls.clear()
        server.script = kills
        process = commands.start("train", *given, f"--workdir={killed}")
        processes.append(process)
        assert end(process).returncode == -signal.SIGKILL
        assert not processes
        server.calls.clear()
        out = commands.succeed("train", *given, f"--workdir={killed}")
        again = begun(server.calls, apart)
    assert f"resumed {killed} at step 1" in out
    # The batches before are not played again; all later ones are, each question once.
    assert len(asked) == STEPS * QUESTIONS
    by_batch = [sorted(asked[n : n + QUESTIONS]) for n in range(0, len(asked), QUESTIONS)]
    resumed = [sorted(again[n : n + QUESTIONS]) for n in range(0, len(again), QUESTIONS)]
    assert resumed == by_batch[2:]
    assert losses(killed) == losses(whole)
    assert returns(killed) == returns(whole)
    assert_same_state(killed, whole, STEPS)
    changed = (*given, "--config.agent.staleness=0", f"--workdir={whole}")
    assert "config.agent.staleness" in refusal(commands.run("train", *changed))


def begun(calls: Sequence[Call], apart: Mapping[str, Decomposition]) -> list[str]:
    """The training questions whose first plan was asked for, in this order."""
    found = []
    for call in list(calls):
        messages = call.body["messages"]
        if len(messages) != 2 or "<passages>" in call.prompt or "<searches>" in call.prompt:
            continue
        (question,) = (each for each in apart if each in call.prompt)
        if [*apart].index(question) < TRAINING:
            found.append(question)
    return found


def test_scores(commands: Commands, scored: Callable[[str], Path], tmp_path: Path) -> None:
    workdir = Path(shutil.copytree(scored("harr"), tmp_path / "run"))
    summary = json.loads((workdir / "eval" / "summary.json").read_text())
    trained = next(scores for name, scores in summary["scores"].items() if "last" in name)
    asked = summary["questions"]
    assert asked["apart"]
    assert (asked["choosing"], asked["reported"]) == (8, 5)  # of 11 and 5
    (log,) = workdir.glob("eval/last-4/agent_seed42.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == trained["questions"] == 5
    assert {half(row["id"]) for row in rows} == {1}  # others chose the checkpoint
    shown = [json.loads(line) for line in (workdir / "episodes.jsonl").read_text().splitlines()]
    assert {half(each["row"]["id"]) for each in shown} == {0}
    assert trained["f1"]["mean"] == pytest.approx(sum(row["f1"] for row in rows) / len(rows))
    assert all(row["sampled"] == 4 for row in rows)
    passes = summary["pass@k"]
    assert passes["1"] <= passes["2"] <= passes["4"]
    # Killed in the middle: the rest is played, and the log is as before.
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:3]) + '{"id')
    arguments = (f"--workdir={workdir}", "--checkpoint=last", "--sampled=4")
    commands.succeed("evaluate", *arguments)
    assert [json.loads(line) for line in log.read_text().splitlines()] == rows
    again = refusal(commands.run("evaluate", *arguments, "--config.policy.passages=1"))
    assert "--restart" in again
