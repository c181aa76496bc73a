"""A run's own server: room on its GPU, settings that cannot work, its loss and its end."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ml_collections import ConfigDict

from configs import hotpotqa
from qrag_jax.errors import InputError
from qrag_jax.feedback.language_model import ModelReward
from qrag_jax.feedback.questions import Asking
from qrag_jax.feedback.service import (
    Asked,
    FeedbackLost,
    PendingService,
    Rewards,
    ServiceConfig,
    leave_room,
    open_service,
)
from qrag_jax.llm.served_config import LlmConfig
from qrag_jax.llm.server.opening import Place
from qrag_jax.llm.server.server_config import ServerConfig
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.q_rag_config import QRagConfig
from tests.entry_points import Commands, refusal
from tests.llm.model_server import ModelServer
from tests.llm.stand_in import StandIn, model_folder, running, stand_in, wait_until

pytestmark = pytest.mark.long

__all__ = ["model_folder", "stand_in"]
FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def config(**llm: Any):
    made = hotpotqa.get_config("tiny")
    made.reward.name = "answer_f1"
    made.llm.update(llm)
    return made


def opened(made: ConfigDict, workdir: Path) -> AbstractContextManager[PendingService]:
    taken = QRagConfig.of(made)
    assert isinstance(taken.reward, ModelReward)
    assert taken.llm is not None
    asked = ServiceConfig(taken.reward, taken.llm, True, taken.seed, taken.data.cache_folder)
    return open_service(asked, workdir, print)


def test_jax_leaves_room_for_a_server_on_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FRACTION, raising=False)
    own = LlmConfig(server=ServerConfig("org/name", memory_share=0.45))
    leave_room(LlmConfig("http://127.0.0.1:8000/v1"))
    leave_room(LlmConfig(server=ServerConfig("org/name", devices="1", memory_share=0.9)))
    assert FRACTION not in os.environ
    leave_room(own)
    assert os.environ[FRACTION] == "0.50"
    monkeypatch.setenv(FRACTION, "0.2")
    leave_room(own)
    assert os.environ[FRACTION] == "0.2"


def test_answers_that_cannot_fit_are_refused(
    stand_in: StandIn, model_folder: Path, tmp_path: Path
) -> None:
    made = config(max_tokens=9000)
    made.llm.server.update(model=str(model_folder), python=str(stand_in.python))
    with (
        pytest.raises(InputError, match=r"config.llm.max_tokens"),
        opened(made, tmp_path),
    ):
        pass
    assert stand_in.starts() == []


def test_answers_are_kept_by_what_is_served(
    stand_in: StandIn, model_folder: Path, tmp_path: Path
) -> None:
    """Other weights in the same folder, or other arguments, are another version of the model."""

    def version(**server: Any) -> str:
        made = config(max_tokens=8)
        made.data.cache = str(tmp_path / "cache")
        made.llm.server.update(model=str(model_folder), python=str(stand_in.python), **server)
        made.llm.server.max_model_len = 0  # no budget: the folder has no tokenizer
        with opened(made, tmp_path) as service:
            return service.provenance["config.llm.version"]

    first = version()
    assert first
    assert version() == first
    other = version(arguments=("--revision", "v2"))
    (model_folder / "model.safetensors").write_bytes(b"other weights")
    assert len({first, other, version()}) == 3


def test_a_wait_ends_when_the_server_is_given_up_or_the_run_is_to_stop() -> None:
    lost = ""
    waiting = Rewards(None, Asking(), 0.5, print, lost=lambda: lost)  # type: ignore[arg-type]
    never, stop = Asked([], concurrent.futures.Future()), StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        waiting.wait(never, stop)
    lost = "vLLM was given up"
    with pytest.raises(FeedbackLost, match="given up"):
        waiting.wait(never, StopSignal())


def test_every_host_has_files_of_its_own() -> None:
    assert Place(Path(), Path()).own("answers.sqlite") == "answers.sqlite"
    assert Place(Path(), Path(), 2).own("logs/vllm.log") == "logs/vllm-2.log"
    assert Place(Path(), Path(), 2).own("") == ""


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
            "--config.encoder.block_sizes=1",
            "--config.reward.name=answer_f1",
            f"--config.llm.server.model={model_folder}",
            f"--config.llm.server.python={stand_in.python}",
            "--config.llm.server.restarts=1",
            "--config.llm.server.max_model_len=0",  # no budget: the folder has no tokenizer
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
    assert "error: vLLM was given up after 1 restarts in a row: " in out
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
    assert "stopped, before the first step" in out
    wait_until(lambda: not any(map(running, stand_in.pids())))


def test_what_is_wrong_with_the_data_does_not_wait_for_the_server(
    run: Run, stand_in: StandIn, commands: Commands
) -> None:
    environment = commands.environment | {"STAND_IN": "hangs"}
    nowhere = "--config.data.path=/no/such/folder"
    process = commands.start("train", *run.arguments, nowhere, env=environment)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: /no/such/folder does not exist" in err
    wait_until(lambda: not any(map(running, stand_in.pids())))


def test_a_missing_environment_is_told_before_the_data_are_read(
    run: Run, commands: Commands
) -> None:
    changes = ("--config.llm.server.python=/no/python", "--config.data.path=/no/such/folder")
    assert "/no/python is not there" in refusal(commands.run("train", *run.arguments, *changes))


def test_a_source_that_the_reward_cannot_score(commands: Commands, tmp_path: Path) -> None:
    """However many samples of others, made as they are needed, come before it."""
    both = tmp_path / "both.py"
    both.write_text(
        "from configs import common\n\n\n"
        "def get_config():\n"
        '    return common.tiny(common.get_config("babilong", "hotpotqa"))\n'
    )
    with ModelServer() as server:
        text = refusal(
            commands.run(
                "train",
                f"--config={both}",
                "--config.reward.name=babilong_em",
                f"--config.llm.url={server.url}",
                "--config.llm.model=tiny",
                f"--workdir={tmp_path / 'run'}",
            )
        )
    assert "hotpotqa: sample" in text
    assert "has no answer metric" in text
