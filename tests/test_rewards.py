"""A run's own server: room on its GPU, settings that cannot work, its loss and its end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from configs import hotpotqa
from qrag_jax import rewards
from qrag_jax.errors import InputError
from qrag_jax.feedback.questions import Asking
from qrag_jax.rewards import Asked, Rewards, RewardsLost, leave_room, open_rewards
from qrag_jax.runtime.interrupt import StopSignal
from tests.entry_points import Commands
from tests.llm.stand_in import StandIn, model_folder, running, stand_in, wait_until

__all__ = ["model_folder", "stand_in"]
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def config(**llm: Any):
    made = hotpotqa.get_config("tiny")
    made.reward.name = "answer_f1"
    for name, value in llm.items():
        made.llm[name] = value
    return made


def test_jax_leaves_room_for_a_server_on_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FRACTION, raising=False)
    own = {"url": "", "server": {"devices": "", "memory_share": 0.45}}
    leave_room(own | {"url": "http://127.0.0.1:8000/v1"})
    leave_room(own | {"server": {"devices": "1", "memory_share": 0.9}})
    assert FRACTION not in os.environ
    leave_room(own)
    assert os.environ[FRACTION] == "0.50"
    monkeypatch.setenv(FRACTION, "0.2")
    leave_room(own)
    assert os.environ[FRACTION] == "0.2"


def test_answers_that_cannot_fit_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"config.llm.max_tokens is 9000, but .* 4096 tokens"),
        open_rewards(config(max_tokens=9000), tmp_path, print),
    ):
        pass


def test_a_wait_ends_when_the_server_is_given_up_or_the_run_is_to_stop() -> None:
    lost = ""
    waiting = Rewards(None, Asking(), 0.5, print, lost=lambda: lost)  # type: ignore[arg-type]
    never, stop = Asked([], concurrent.futures.Future()), StopSignal()
    stop.requested = True
    assert waiting.wait(never, stop) is None
    lost = "vLLM was given up"
    with pytest.raises(RewardsLost, match="given up"):
        waiting.wait(never, StopSignal())


def test_every_host_has_files_of_its_own() -> None:
    assert rewards._of_host("answers.sqlite", "") == "answers.sqlite"
    assert rewards._of_host("logs/vllm.log", "-2") == "logs/vllm-2.log"
    assert rewards._of_host("", "-2") == ""


@dataclasses.dataclass(frozen=True)
class Run:
    """The command of a run with a server of its own that never answers questions."""

    arguments: tuple[str, ...]


@pytest.fixture
def run(stand_in: StandIn, model_folder: Path, tmp_path: Path) -> Run:
    return Run(
        (
            "--config=configs/hotpotqa.py:tiny",
            "--config.encoder.length_buckets=1",
            "--config.reward.name=answer_f1",
            f"--config.llm.server.model={model_folder}",
            f"--config.llm.server.python={stand_in.python}",
            "--config.llm.server.restarts=1",
            f"--workdir={tmp_path / 'run'}",
        )
    )


def test_a_server_that_was_given_up_ends_the_run(
    run: Run, stand_in: StandIn, commands: Commands
) -> None:
    environment = commands.environment | {"STAND_IN": "dies again"}
    process = commands.start("train", *run.arguments, env=environment)
    assert process.stdout is not None
    heard = ""
    for line in process.stdout:
        heard += line
        if "does not answer; waiting" in line or "vLLM serves little" in line:
            break
    os.kill(stand_in.pids()[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err[-2000:]
    assert "error: vLLM was given up after 1 restarts" in out
    assert "Traceback" not in err
    assert len(stand_in.starts()) == 2
    wait_until(lambda: not any(map(running, stand_in.pids())))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_the_server_starts_nothing_is_left(
    number: signal.Signals, run: Run, stand_in: StandIn, commands: Commands
) -> None:
    environment = commands.environment | {"STAND_IN": "hangs"}
    process = commands.start("train", *run.arguments, env=environment)
    assert process.stdout is not None
    assert any("training questions" in line for line in process.stdout)  # all else is read
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err[-2000:]
    assert "stopped, saved at step 0" in out
    wait_until(lambda: not any(map(running, stand_in.pids())))
