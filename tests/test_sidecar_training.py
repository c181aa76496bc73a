"""Trainings of every system with the real vLLM, on CPU: `make test-sidecar`.

Models are random, or small, so rewards are small; what is tested is that a server's answers are
learned from, that a server or a run that is killed in the middle loses nothing, and that vLLM
samples what the device would.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import Server
from tests.entry_points import (
    Commands,
    assert_same_state,
    losses,
    metric_lines,
    wait_for_step,
)
from tests.llm.server.test_sidecar import PYTHON, family, pytestmark, settings
from tests.llm.stand_in import running
from tests.rollouts.token_setup import write_calling_model
from tests.support import tiny_qwen3

__all__ = ["pytestmark"]

STEPS, ROOM, SHORT = 6, 2048, 640
# A server that the run starts itself.
OWN = (
    f"--config.llm.server.python={PYTHON}",
    "--config.llm.server.cpu_cache_gib=1",
    '--config.llm.server.arguments=("--enforce-eager",)',
)
Q_RAG = (
    "--config=configs/hotpotqa.py:tiny",
    f"--config.train.steps={STEPS}",
    "--config.train.log_every=1",
    "--config.train.checkpoint_every=100",
    "--config.train.eval_every=100",
    "--config.encoder.length_buckets=1",
    "--config.reward.name=answer_f1",
    "--config.reward.staleness=1",
    "--config.llm.max_tokens=24",
    "--config.llm.cut_off=score",
)
QUESTIONS, SEED = 64, 42
RLVR = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.lora.rank=4",
    '--config.stages=("grpo",)',
    "--config.sampling.engine=server",
    "--config.sampling.temperature=0.7",
    "--config.tools.turn_tokens=16",
    "--config.tools.max_turns=3",
    "--config.optimizer.learning_rate=1e-2",
    f"--config.questions.bridge_train={QUESTIONS}",
    "--config.train.batch_size=2",
    "--config.train.checkpoint_every=1",
)


def serve(folder: Path, factory: pytest.TempPathFactory, **changes: Any) -> Server:
    return Server(settings(folder, factory.mktemp("logs") / "vllm.log", **changes))


def asks(server: Server) -> tuple[str, ...]:
    return (f"--config.llm.url={server.url}", "--config.llm.model=tiny")


def learned(workdir: Path) -> list[dict[str, Any]]:
    return [line for line in metric_lines(workdir) if "train/loss" in line]


def killed_after_the_first_loss(
    process: subprocess.Popen[str], workdir: Path
) -> tuple[str, list[int]]:
    """Kills the model server that a training began; its output, and the processes it had then."""
    wait_for_step(process, workdir, 1)
    ours = family(process.pid)[1:]
    front = next(
        pid for pid in ours if b"api_server" in command(pid) and b"watchdog" not in command(pid)
    )
    os.kill(front, signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    assert "vLLM is down" in out
    return out, ours


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ---------------------------------------------------------------------- Q-RAG


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.save(tiny_qwen3.model(0), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(folder, tmp_path_factory, max_model_len=ROOM) as served:
        yield served


def test_rewards_are_the_models_and_a_killed_server_changes_nothing(
    server: Server, folder: Path, commands: Commands, tmp_path: Path
) -> None:
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    commands.succeed("train", *Q_RAG, *asks(server), f"--workdir={whole}")
    lines = learned(whole)
    assert len(lines) == STEPS
    assert lines[-1]["llm/answers"] > STEPS
    assert lines[-1]["llm/tokens_out"] >= lines[-1]["llm/answers"]
    assert lines[-1]["llm/failures"] == 0
    # Gibberish without a letter is no answer; it is masked.
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    assert all(0 <= line["train/return"] < 1 for line in lines)
    own = (f"--config.llm.server.model={folder}", f"--config.llm.server.max_model_len={ROOM}")
    own += (*OWN, "--config.llm.server.dtype=float32", "--config.llm.cache=''")
    process = commands.start("train", *Q_RAG, *own, f"--workdir={workdir}")
    out, ours = killed_after_the_first_loss(process, workdir)
    assert out.count("vLLM serves tiny at") == 2
    assert_same_state(workdir, whole, STEPS)
    assert losses(workdir) == losses(whole)
    assert not any(map(running, ours))


# ---------------------------------------------------------------------- HARR


# ---------------------------------------------------------------------- LeReT


# ---------------------------------------------------------------------- RLVR


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that calls tools."""
    return write_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture(scope="module")
def publishing(calling: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    changes = {"max_model_len": SHORT, "lora_rank": 8, "loaded_adapters": 4, "publish": True}
    with serve(calling, tmp_path_factory, **changes) as served:
        yield served


@pytest.mark.parametrize("staleness", [0, 1])
def test_three_steps(
    staleness: int, publishing: Server, calling: Path, commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    own = (f"--config.tools.staleness={staleness}", "--config.train.steps=3")
    words = (*RLVR, *asks(publishing), f"--config.model.path={calling}", *own)
    commands.succeed("train", *words, f"--workdir={workdir}")
    lines = learned(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["train/unscored_share"] == 0 for line in lines)
    # Weights are those that sampled where nothing was learned between.
    fresh = lines if not staleness else lines[:1]
    assert all(line["train/sampler_kl"] < 1e-6 for line in fresh)
    assert all(abs(line["train/sampler_largest_ratio"] - 1) < 1e-2 for line in fresh)
    if staleness:
        assert max(line["train/sampler_kl"] for line in lines[1:]) > 1e-6
    assert lines[-1]["llm/failures"] == 0
    names = Endpoint(publishing.url).model_names()
    assert any(name.startswith(f"tiny@{2 - staleness}.") for name in names)
