"""Training, evaluation and resumption in an environment, by the made one, as a user gives them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.entry_points import Commands, losses, refusal
from tests.environments.verifiers_pythons import PACKAGES, PYTHON, needs_verifiers

pytestmark = pytest.mark.long

MADE = Path(__file__).parent / "rollouts" / "scripted_environment.py"
TINY = (
    "--config=configs/rlvr.py:verifiers",
    "--config.model.tiny.layers=2",
    "--config.model.tiny.hidden=64",
    "--config.model.tiny.heads=2",
    "--config.model.tiny.key_heads=1",
    "--config.model.tiny.intermediate=64",
    "--config.model.tiny.vocab=400",
    "--config.tools.turn_tokens=12",
    "--config.sampling.room=256",
    "--config.grpo.members=3",
    "--config.train.steps=4",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=1",
    "--config.train.eval_every=4",
    "--config.eval.samples=2",
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
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("verifiers") / "run"
    commands.succeed("train", *flags(workdir))
    return workdir


def test_a_training_logs_the_parts_of_rewards_one_by_one(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == 4
    last = [row for row in rows if "train/loss" in row][-1]
    assert last["env/half"] == pytest.approx(last["env/reward"] / 2)
    assert last["failed_episodes"] == last["lost_processes"] == last["untrained_tokens"] == 0


def test_a_killed_training_goes_on_bit_for_bit(
    trained: Path, commands: Commands, tmp_path: Path
) -> None:
    """Here its environment's process is killed at first, and later the training itself."""
    workdir = tmp_path / "run"
    given = flags(workdir, "die")
    process = commands.start("train", *given)
    while not list(workdir.glob("checkpoints/last/2*")) and process.poll() is None:
        pass
    process.kill()
    process.wait()
    commands.succeed("train", *given)
    assert losses(workdir) == losses(trained)


def test_an_evaluation_writes_their_results_and_ours(trained: Path, commands: Commands) -> None:
    given = [f"--workdir={trained}", "--checkpoint=last", "--sampled=2"]
    trusted = ["--config.env.verifiers=made", f"--config.env.python={MADE}"]
    refused = commands.run("evaluate", *given, trusted[0])
    assert "which is not run because a folder says so" in refusal(refused)
    printed = commands.succeed("evaluate", *given, *trusted)
    assert "--- Evaluation ---" in printed
    assert "reward: avg - " in printed
    summary = json.loads((trained / "eval" / "summary.json").read_text())
    for name in ("last-4", "untrained"):
        folder = trained / "eval" / name
        rows = [json.loads(each) for each in (folder / "predictions.jsonl").open()]
        results = [json.loads(each) for each in (folder / "traces.jsonl").open()]
        rewards = [each["traces"][0]["rewards"]["reward"]["score"] for each in results]
        assert [row["reward"] for row in rows] == rewards
        assert len(rows) == 2 * summary["questions"]["reported"]


def test_a_log_of_an_edited_environment_is_refused(
    trained: Path, commands: Commands, tmp_path: Path
) -> None:
    copy = tmp_path / "made.py"
    shutil.copy(MADE, copy)
    given = [f"--workdir={trained}", "--checkpoint=last", f"--out={tmp_path / 'eval'}"]
    given += ["--config.env.verifiers=made", f"--config.env.python={copy}"]
    commands.succeed("evaluate", *given)
    commands.succeed("evaluate", *given)
    copy.write_text(copy.read_text() + "# edited\n")
    assert "--restart" in refusal(commands.run("evaluate", *given))
    commands.succeed("evaluate", *given, "--restart")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("refuse", "the environment cannot be used; name another."),
        ("surrogate", "the tokenizer cannot give back a text"),
        ("end", "it ends at once"),
        ("raised", "episodes broke, and playing them again would change nothing"),
        ("no_number", "is no_number"),
    ],
)
def test_a_bad_environment_is_one_sentence(
    commands: Commands, tmp_path: Path, does: str, says: str
) -> None:
    done = commands.run("train", *flags(tmp_path / "run", does))
    assert done.returncode in (1, 2)
    printed = done.stdout + done.stderr
    assert says in printed
    assert "Traceback" not in printed


def test_predict_names_the_command_that_plays(trained: Path, commands: Commands) -> None:
    trusted = ["--config.env.verifiers=made", f"--config.env.python={MADE}"]
    done = commands.run("predict", f"--workdir={trained}", *trusted)
    assert "qrag evaluate" in refusal(done)


@needs_verifiers
def test_verifiers_itself_trains(commands: Commands, tmp_path: Path) -> None:
    given = flags(tmp_path / "run", python=PYTHON)
    given += ["--config.env.verifiers=made-v1", "--config.env.arguments={}"]
    given += ["--config.train.steps=2", "--config.sampling.room=1000"]
    environment = {**commands.environment}
    environment["PYTHONPATH"] += f":{PACKAGES}"
    commands.succeed("train", *given, env=environment)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    last = [row for row in rows if "train/loss" in row][-1]
    assert "env/right" in last
    assert last["failed_episodes"] == 0
