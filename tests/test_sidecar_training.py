"""Trainings with the real vLLM, on CPU: `make test-sidecar`.

Models are random, so rewards are small; what is tested is that a server's answers are learned from,
and that a server that is killed in the middle loses nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import Server
from tests.entry_points import (
    Commands,
    assert_same_state,
    flags_of,
    losses,
    metric_lines,
    wait_for_step,
)
from tests.llm.server.test_sidecar import ON_CPU, PYTHON, family, pytestmark, settings
from tests.llm.stand_in import running
from tests.rollouts.token_setup import write_calling_model
from tests.support import tiny_qwen3

__all__ = ["pytestmark"]

STEPS, ROOM, SHORT = 6, 2048, 640
Q_RAG = flags_of(
    "hotpotqa.py:tiny",
    f"train.steps={STEPS} train.log_every=1 train.checkpoint_every=100 train.eval_every=100 "
    "encoder.length_buckets=1 reward.name=answer_f1 reward.staleness=1 llm.max_tokens=24 "
    "llm.cut_off=score",
)
RLVR = flags_of(
    "rlvr.py:tiny",
    "model.lora.rank=4 stages=grpo sampling.engine=server sampling.temperature=0.7 "
    "tools.turn_tokens=16 tools.max_turns=3 tools.staleness=1 optimizer.learning_rate=1e-2 "
    "train.steps=3 questions.bridge_train=64 train.batch_size=2 train.checkpoint_every=1",
)


@contextlib.contextmanager
def serve(folder: Path, factory: pytest.TempPathFactory, **changes: Any) -> Iterator[Server]:
    with Server(settings(folder, factory.mktemp("logs") / "vllm.log", **changes)) as server:
        server.wait()
        yield server


def asks(server: Server) -> tuple[str, ...]:
    return (f"--config.llm.url={server.url}", "--config.llm.model=tiny")


def learned(workdir: Path) -> list[dict[str, Any]]:
    return [line for line in metric_lines(workdir) if "train/loss" in line]


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
    assert lines[-1]["llm/failures"] == 0
    # Gibberish without a letter is no answer; it is masked.
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    # A server that the run starts itself is killed after the first loss.
    started = {"python": PYTHON, "model": folder, "max_model_len": ROOM, "dtype": "float32"}
    started |= {"arguments": str(ON_CPU)}
    own = [f"--config.llm.server.{name}={value}" for name, value in started.items()]
    own += ["--config.llm.cache=''", f"--workdir={workdir}"]
    process = commands.start("train", *Q_RAG, *own)
    wait_for_step(process, workdir, 1)
    ours = family(process.pid)[1:]
    named = {pid: command(pid) for pid in ours}
    fronts = [pid for pid in ours if b"api_server" in named[pid] and b"watchdog" not in named[pid]]
    os.kill(fronts[0], signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-3000:]
    assert "vLLM is down" in out
    assert out.count("vLLM serves tiny at") == 2
    assert_same_state(workdir, whole, STEPS)
    assert losses(workdir) == losses(whole)
    assert not any(map(running, ours))


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


def test_adapters_are_published_a_step_later(
    publishing: Server, calling: Path, commands: Commands, tmp_path: Path
) -> None:
    given = (*RLVR, *asks(publishing), f"--config.model.path={calling}")
    commands.succeed("train", *given, f"--workdir={tmp_path}")
    lines = learned(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["train/unscored_share"] == 0 for line in lines)
    # Weights are those that sampled where nothing was learned between.
    assert lines[0]["train/sampler_kl"] < 1e-6
    assert abs(lines[0]["train/sampler_largest_ratio"] - 1) < 1e-2
    assert max(line["train/sampler_kl"] for line in lines[1:]) > 1e-6
    assert lines[-1]["llm/failures"] == 0
    assert any(name.startswith("tiny@1.") for name in Endpoint(publishing.url).model_names())
