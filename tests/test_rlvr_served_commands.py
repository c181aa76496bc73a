"""RLVR sampled by a server, by the commands: killed in the middle of rollouts, and gone on."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.rollouts.token_sampler import SamplingConfig
from tests.entry_points import Commands, losses, metric_lines, saved_state
from tests.rollouts.calling_model import write_calling_model
from tests.rollouts.policy_server import PolicyServer
from tests.test_train_hosts import play_as_one

pytestmark = pytest.mark.long

STEPS, KILLS = 5, 2
TRAINING = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.lora.rank=4",
    '--config.stages=("grpo",)',
    "--config.sampling.engine=server",
    "--config.sampling.temperature=0.7",
    "--config.tools.turn_tokens=16",
    "--config.tools.max_turns=3",
    "--config.optimizer.learning_rate=1e-2",
    "--config.questions.bridge_train=16",
    f"--config.train.steps={STEPS}",
    "--config.train.batch_size=2",
    "--config.train.checkpoint_every=1",
    "--config.train.eval_every=100",
    "--config.eval.samples=2",
    "--config.llm.model=tiny",
)


def test_killed_in_the_middle_of_rollouts(commands: Commands, tmp_path: Path) -> None:
    """No question is lost or trained twice: the weights are those of a run that was not killed."""
    folder, draw = write_calling_model(tmp_path / "model"), random.Random(0)
    sampling = SamplingConfig(engine="server", room=640)
    with PolicyServer.started(folder, sampling) as server:
        given = (
            *(*TRAINING, "--config.tools.staleness=1"),
            *(f"--config.model.path={folder}", f"--config.llm.url={server.url}"),
        )
        commands.succeed("train", *given, f"--workdir={tmp_path / 'whole'}")
        asked = len(server.asked)
        workdir = tmp_path / "killed"
        for _ in range(KILLS):
            left, reached = [draw.randint(asked // 3, asked // 2)], threading.Event()

            def counted(left: list[int] = left, reached: threading.Event = reached) -> None:
                left[0] -= 1
                if left[0] == 0:
                    reached.set()

            server.before = counted
            process = commands.start("train", *given, f"--workdir={workdir}")
            while not reached.wait(0.05):
                assert process.poll() is None, process.communicate()
            process.kill()
            process.communicate(timeout=300)
            assert process.returncode == -signal.SIGKILL
        commands.succeed("train", *given, f"--workdir={workdir}")
    one, other = (saved_state(tmp_path / name, STEPS) for name in ("killed", "whole"))
    assert one.keys() == other.keys()
    for name, value in other.items():
        np.testing.assert_array_equal(one[name], value, err_msg=name)
    assert losses(workdir) == losses(tmp_path / "whole")
    lines = [line for line in metric_lines(workdir) if "train/loss" in line]
    assert any(line["train/tokens"] > 0 for line in lines)
    assert all(line["train/unscored_share"] == 0 for line in lines)


def test_two_hosts_ask_a_server_for_what_one_asks(commands: Commands, tmp_path: Path) -> None:
    """Each host hands its versions over under names of its own, and asks for a part."""
    folder = write_calling_model(tmp_path / "model")
    sampling = SamplingConfig(engine="server", room=640)
    with PolicyServer.started(folder, sampling) as server:
        given = (
            *(*TRAINING, "--config.train.log_every=1", "--config.model.dtype=float32"),
            *("--config.optimizer.learning_rate=1e-4", f"--config.model.path={folder}"),
            f"--config.llm.url={server.url}",
        )
        play_as_one(commands, tmp_path, given, STEPS, is_stopped=False)
