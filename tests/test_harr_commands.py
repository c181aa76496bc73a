"""HARR by the commands: a run that is killed and goes on, its scores, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import harr_grpo
from qrag_jax.data.decompositions import Decomposition
from qrag_jax.runtime.digests import half
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr
from tests.entry_points import FLOAT32, Commands, losses, metric_lines, refusal, saved_state
from tests.llm.model_server import Call, ModelServer, Reply
from tests.systems.knowing_model import KnowingModel
from tests.test_train_hosts import ended, errors_of, started

pytestmark = pytest.mark.long

TINY = (
    "--config=configs/harr_grpo.py:tiny",
    "--config.train.log_every=1",
    "--config.train.steps=6",
    "--config.encoder.scratch.layers=1",
)
TRAINING, QUESTIONS = 64, 4  # questions to train on, and of one batch


@pytest.fixture(scope="module")
def run(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("harr") / "run"
    out = commands.succeed("train", *TINY, f"--workdir={workdir}")
    assert "6 steps of 4 questions × 4 episodes by the scripted agent" in out
    return workdir


def test_what_a_run_leaves(run: Path) -> None:
    lines = metric_lines(run)
    assert [line["step"] for line in lines if "eval/f1" in line] == [0, 3, 6]
    assert all("untrained/f1" in line for line in lines if "eval/f1" in line)
    assert len(losses(run)) == 6
    assert (run / "learning_curve.png").stat().st_size > 10_000


def test_a_dry_run_embeds_no_corpus(commands: Commands) -> None:
    out = commands.succeed("train", *TINY, "--dry_run")
    assert "over a corpus that is not read" in out
    assert "  update: " in out
    assert "1 programs, each compiled once" in out


def test_stopped_and_gone_on(commands: Commands, run: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "run"
    process = commands.start("train", *TINY, f"--workdir={workdir}")
    while process.poll() is None and not any("train/loss" in x for x in metric_lines(workdir)):
        pass
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, err[-2000:]
    assert "give the same command to go on" in out
    assert 0 < len(losses(workdir)) < 6
    commands.succeed("train", *TINY, f"--workdir={workdir}")
    np.testing.assert_allclose(losses(workdir), losses(run), atol=1e-6)
    assert returns(run) == returns(workdir)


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
        pairs = {each.gold.question: each.question.decomposition for each in every}
    return {question: each for question, each in pairs.items() if each is not None}


@pytest.mark.parametrize("staleness", [0, 1])
def test_killed_inside_a_rollout(
    staleness: int, apart: dict[str, Decomposition], commands: Commands, tmp_path: Path
) -> None:
    """The model server kills the training before it answers the fourth batch's first request."""
    knowing = KnowingModel(apart)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    saved = killed / "checkpoints" / "last" / str(3 - staleness)
    processes: list[Any] = []

    def kills(call: Call) -> Reply:
        if processes and len(begun(server.calls, apart)) > 3 * QUESTIONS:
            until = time.monotonic() + 120
            while not saved.exists() and time.monotonic() < until:
                time.sleep(0.01)
            processes.pop().kill()
        return knowing(call)

    with ModelServer(knowing) as server:
        given = (
            "--config=configs/harr_grpo.py:synthetic-react-tiny",
            *TINY[1:],
            "--config.train.checkpoint_every=1",
            "--config.train.eval_every=6",
            f"--config.agent.staleness={staleness}",
            f"--config.llm.url={server.url}",
            "--config.llm.model=tiny",
            "--config.llm.cache=''",
        )
        commands.succeed("train", *given, f"--workdir={whole}")
        asked = begun(server.calls, apart)
        server.calls.clear()
        server.script = kills
        process = commands.start("train", *given, f"--workdir={killed}")
        processes.append(process)
        process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL
        assert not processes
        server.calls.clear()
        out = commands.succeed("train", *given, f"--workdir={killed}")
        again = begun(server.calls, apart)
    assert f"resumed {killed} at step {3 - staleness}" in out
    # The batches before are not played again; all later ones are, each question once.
    assert len(asked) == 6 * QUESTIONS
    by_batch = [sorted(asked[n : n + QUESTIONS]) for n in range(0, len(asked), QUESTIONS)]
    gone_on = [sorted(again[n : n + QUESTIONS]) for n in range(0, len(again), QUESTIONS)]
    assert gone_on == by_batch[3:]
    assert losses(killed) == losses(whole)
    assert returns(killed) == returns(whole)
    one, other = saved_state(killed, 6), saved_state(whole, 6)
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
    changed = (*given, f"--config.agent.staleness={1 - staleness}", f"--workdir={whole}")
    assert "config.agent.staleness" in refusal(commands.run("train", *changed))


def test_agents_with_a_model_play_on_two_hosts(
    apart: dict[str, Decomposition], commands: Commands, tmp_path: Path
) -> None:
    """Each host has a client of its own; each question is asked about once."""
    alone, workdir = tmp_path / "alone", tmp_path / "run"
    with ModelServer(KnowingModel(apart)) as server:
        given = (
            *("--config=configs/harr_grpo.py:synthetic-react-tiny", *TINY[1:], FLOAT32),
            *("--config.train.eval_every=6", f"--config.llm.url={server.url}"),
            "--config.optimizer.learning_rate=1e-4",  # rounding grows with the rate
            *("--config.llm.model=tiny", "--config.llm.cache=''"),
        )
        commands.succeed("train", *given, f"--workdir={alone}")
        asked = begun(server.calls, apart)
        server.calls.clear()
        both = ended(started(commands, 2, f"--workdir={workdir}", run=given))
        assert [each.returncode for each in both] == [0, 0], errors_of(both)
        assert sorted(begun(server.calls, apart)) == sorted(asked)
    assert returns(workdir) == pytest.approx(returns(alone), abs=1e-5)
    np.testing.assert_allclose(losses(workdir), losses(alone), atol=1e-5)
    state, wanted = saved_state(workdir, 6), saved_state(alone, 6)
    for name, array in wanted.items():
        np.testing.assert_allclose(state[name], array, atol=1e-5, err_msg=name)


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


def test_scores(commands: Commands, run: Path, tmp_path: Path) -> None:
    workdir = Path(shutil.copytree(run, tmp_path / "run"))
    arguments = (f"--workdir={workdir}", "--checkpoint=last", "--sampled=4")
    out = commands.succeed("evaluate", *arguments)
    assert "gain over untrained" in out
    assert "pass@k of drawn passages: 1: " in out
    summary = json.loads((workdir / "eval" / "summary.json").read_text())
    trained = summary["scores"]["trained, last checkpoint of step 6"]
    asked = summary["questions"]
    assert asked["apart"]
    assert (asked["choosing"], asked["reported"]) == (8, 5)  # of 11 and 5
    assert trained["questions"] == 5
    (log,) = workdir.glob("eval/last-6/agent_seed42.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == 5
    assert {half(row["id"]) for row in rows} == {1}  # others chose the checkpoint
    shown = [json.loads(line) for line in (workdir / "episodes.jsonl").read_text().splitlines()]
    assert {half(each["row"]["id"]) for each in shown} == {0}
    f1 = sum(row["f1"] for row in rows) / len(rows)
    assert trained["f1"]["mean"] == pytest.approx(f1)
    assert all(row["sampled"] == 4 for row in rows)
    passes = summary["pass@k"]
    assert passes["1"] <= passes["2"] <= passes["4"]
    # Killed in the middle: the rest is played, and the log is as before.
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:3]) + '{"id')
    commands.succeed("evaluate", *arguments)
    assert [json.loads(line) for line in log.read_text().splitlines()] == rows
    again = refusal(commands.run("evaluate", *arguments, "--config.policy.passages=1"))
    assert "was begun with other settings, data or weights; give --restart" in again


def test_other_commands_say_what_they_read(commands: Commands, run: Path, tmp_path: Path) -> None:
    told = refusal(commands.run("export", f"--workdir={run}", f"--out={tmp_path}/out"))
    assert f"{run} is a run of harr, which this command cannot read; give a run of " in told
    assert told.endswith("give a run of q_rag, rlvr, leret or deepretrieval.")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--config.corpus.path=none.jsonl",), "none.jsonl"),
        (("--config.policy.tau=0",), "config.policy.tau is 0.0; it must be above 0."),
        (("--config.agent.max_hops=1",), "no train question has a decomposition of at most 1 hops"),
    ],
)
def test_refusals(
    commands: Commands, tmp_path: Path, arguments: tuple[Any, ...], told: str
) -> None:
    found = commands.run("train", *TINY, f"--workdir={tmp_path}/run", *arguments)
    assert told in refusal(found)


def test_help_lists_its_fields(commands: Commands) -> None:
    out = commands.run("train", "--help", TINY[0]).stdout
    assert "grpo.members=4" in out
    assert "reward.mixture=" in out
    assert "pqn." not in out
