"""Training and scoring from a program: the same runs as the commands'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qrag_jax import Retriever, TrainedRun, evaluate, train
from qrag_jax.errors import InputError
from qrag_jax.runtime.own_code import load
from tests.entry_points import Commands

SMALL: dict[str, Any] = {
    "train.steps": 2,
    "train.eval_every": 2,
    "train.checkpoint_every": 1,
    "encoder.length_buckets": 1,
    "encoder.block_sizes": 1,
    "eval.samples": 2,
}
QUESTIONS = [
    {
        "question": f"Where was the founder of Company {number} born?",
        "chunks": [
            f"Company {number} was founded by Ada.",
            "Ada was born in Oslo.",
            "Oslo is big.",
        ],
        "support": [0, 1],
        "answers": ["Oslo"],
    }
    for number in range(8)
]


REWARD = """
def half(question, answers, taken, gold):
    return 0.5
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "my_reward.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def run(reward: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    folder = tmp_path_factory.mktemp("python") / "run"
    given: dict[str, Any] = {"data": QUESTIONS[:6], "dev": QUESTIONS[6:]}
    takes = ("question", "answers", "taken", "gold")
    function = load(f"{reward}:half", "reward", takes).function
    return train("configs/own.py:tiny", folder, **given, reward=function, **SMALL)


def test_records_in_memory_and_a_function_are_trained_on(run: TrainedRun, reward: Path) -> None:
    returns = [row["train/return"] for row in run.curve if "train/return" in row]
    assert returns == [0.5]
    summary = run.evaluate(checkpoint="last", samples=1)
    again = evaluate(run.workdir, checkpoint="last", samples=1)
    assert again["scores"] == summary["scores"]
    assert summary["config"]["reward"]["path"] == f"{reward}:half"
    assert isinstance(run.retriever("last"), Retriever)


def test_a_command_goes_on_with_it(run: TrainedRun, reward: Path, commands: Commands) -> None:
    fields = {**SMALL, "train.steps": 3, "reward.path": f"{reward}:half"}
    fields["data.path"] = run.workdir / "records"
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    commands.succeed("train", "--config=configs/own.py:tiny", f"--workdir={run.workdir}", *words)
    assert run.curve[-1]["step"] == 3


def test_what_cannot_be_trained_on_is_refused(run: TrainedRun, tmp_path: Path) -> None:
    other = {"data": QUESTIONS[1:6], "dev": QUESTIONS[6:]}
    with pytest.raises(InputError, match="other questions"):
        train("configs/own.py:tiny", run.workdir, **other, **SMALL)
    with pytest.raises(InputError, match="data and dev"):
        train("configs/own.py:tiny", tmp_path / "run", data=QUESTIONS)
    with pytest.raises(InputError, match="file"):
        train("configs/own.py:tiny", tmp_path / "run", reward=lambda **row: 0.0)
    with pytest.raises(InputError, match=r"train\.stepps"):
        train("configs/own.py:tiny", tmp_path / "run", **{"train.stepps": 3})
    assert not (tmp_path / "run").exists()
