"""Training and evaluation in an environment of verifiers, by a scripted one and by the real one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.entry_points import (
    Commands,
    end,
    flags_of,
    json_lines,
    losses,
    metric_lines,
    refusal,
    wait_until,
)
from tests.environments.verifiers_pythons import PACKAGES, PYTHON, needs_verifiers

MADE = Path(__file__).parent / "rollouts" / "scripted_environment.py"
TINY = flags_of(
    "rlvr.py:verifiers",
    "model.tiny.layers=1 model.tiny.weights= model.tiny.hidden=64 model.tiny.heads=2 "
    "model.tiny.key_heads=1 model.tiny.intermediate=64 model.tiny.vocab=400 tools.turn_tokens=12 "
    "sampling.room=256 grpo.members=3 train.steps=4 train.log_every=1 train.eval_every=4 "
    "train.checkpoint_every=1 eval.samples=2",
)


def flags(workdir: Path, does: str = "chat", python: Path | str = MADE) -> list[str]:
    arguments = {"does": does, "marks": str(workdir) + ".mark"}
    return [
        *TINY,
        f"--workdir={workdir}",
        "--config.env.verifiers=made",
        f"--config.env.python={python}",
        f"--config.env.arguments={json.dumps(arguments)}",
    ]


@pytest.fixture(scope="module")
def trained_here(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("verifiers") / "run"
    commands.succeed("train", *flags(workdir))
    return workdir


def test_a_training_logs_the_parts_of_rewards_one_by_one(trained_here: Path) -> None:
    rows = metric_lines(trained_here)
    assert max(row["step"] for row in rows) == 4
    last = [row for row in rows if "train/loss" in row][-1]
    assert last["env/half"] == pytest.approx(last["env/reward"] / 2)
    assert last["failed_episodes"] == last["lost_processes"] == last["untrained_tokens"] == 0


@pytest.mark.nightly
def test_a_killed_training_goes_on_bit_for_bit(
    trained_here: Path, commands: Commands, tmp_path: Path
) -> None:
    """Here its environment's process is killed at first, and later the training itself."""
    workdir = tmp_path / "run"
    process = commands.start("train", *flags(workdir, "die"))
    wait_until(lambda: list(workdir.glob("checkpoints/last/2*")), process)
    assert end(process, signal.SIGKILL).returncode == -signal.SIGKILL
    commands.succeed("train", *flags(workdir, "die"))
    assert losses(workdir) == losses(trained_here)


def test_an_evaluation_writes_their_results_and_ours(
    trained_here: Path, commands: Commands, tmp_path: Path
) -> None:
    copy = tmp_path / "environment.py"
    shutil.copy(MADE, copy)
    given = ["evaluate", f"--workdir={trained_here}", "--checkpoint=last", "--sampled=2"]
    given += [f"--out={tmp_path / 'eval'}", "--config.env.verifiers=made"]
    assert "config.env.python" in refusal(commands.run(*given))  # no program that a folder names
    given += [f"--config.env.python={copy}"]
    assert "reward" in commands.succeed(*given)
    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    for name in ("last-4", "untrained"):
        folder = tmp_path / "eval" / name
        rows, traces = (json_lines(folder / f"{x}.jsonl") for x in ("predictions", "traces"))
        rewards = [each["traces"][0]["rewards"]["reward"]["score"] for each in traces]
        assert [row["reward"] for row in rows] == rewards
        assert len(rows) == 2 * summary["questions"]["reported"]
    # The same log by an environment that was edited.
    copy.write_text(copy.read_text() + "# edited\n")
    assert "--restart" in refusal(commands.run(*given))
    out = tmp_path / "rows.jsonl"
    commands.succeed("predict", f"--workdir={trained_here}", *given[-2:], f"--out={out}")
    assert {"segments", "parts"} <= json_lines(out)[0]["trajectory"].keys()


@needs_verifiers
@pytest.mark.nightly
def test_verifiers_itself_trains(commands: Commands, tmp_path: Path) -> None:
    given = flags(tmp_path / "run", python=PYTHON)
    given += ["--config.env.verifiers=made-v1", "--config.env.arguments={}"]
    given += ["--config.train.steps=2", "--config.sampling.room=1000"]
    environment = {**commands.environment}
    environment["PYTHONPATH"] += f":{PACKAGES}"
    commands.succeed("train", *given, env=environment)
    last = [line for line in metric_lines(tmp_path / "run") if "train/loss" in line][-1]
    assert "env/right" in last
    assert last["failed_episodes"] == 0
