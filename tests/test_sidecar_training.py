"""Trainings with the real vLLM, on CPU, and its protocol beside ours: `make test-sidecar`.

Models are random, so rewards are small; what is tested is that a server's answers are learned from,
that a server that is killed in the middle loses nothing, and that vLLM samples as the device does.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.llm.endpoint import Endpoint, http_options
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.text.scaffolds import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.models.pretrained import load_language_model
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.environment_play import SESSION, GenerateServer, Wanted
from qrag_jax.rollouts.trajectories import SampleRequest, SamplingConfig
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


def serve(folder: Path, factory: pytest.TempPathFactory, **changes: Any) -> Server:
    return Server(settings(folder, factory.mktemp("logs") / "vllm.log", **changes))


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
    assert lines[-1]["llm/tokens_out"] >= lines[-1]["llm/answers"]
    assert lines[-1]["llm/failures"] == 0
    # Gibberish without a letter is no answer; it is masked.
    assert all(line["train/unscored_share"] <= 0.5 for line in lines)
    assert all(0 <= line["train/return"] < 1 for line in lines)
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
    given = (
        *RLVR,
        *asks(publishing),
        f"--config.model.path={calling}",
        "--config.tools.staleness=1",
    )
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


# -------------------------------------------------- /inference/v1/generate beside ours

WINDOW, TOKENS = 256, 12
ASKED = ("Who leads it?", "Where was the founder born?", "And then?")


@pytest.fixture(scope="module")
def theirs(calling: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    arguments = (*ON_CPU, "--enable-scale-out")
    given = settings(calling, log, max_model_len=WINDOW, arguments=arguments, publish=True)
    with Server(given) as served:
        assert Endpoint(served.url).model_names() == ("tiny",)
        yield served.url


class Ours:
    """Our server on the same model, whose device speaks the likeliest tokens."""

    def __init__(self, folder: Path) -> None:
        loaded = load_language_model(folder, "float32")
        self.renderer = ChatRenderer(loaded.tokenizer, HERMES)
        model = dataclasses.replace(loaded.model, stop_ids=self.renderer.stop_ids())
        sampler = DeviceSampler(model, SamplingConfig(temperature=0.0, room=WINDOW, rows=4))
        self._sampler = RoundSampler(sampler, jax.tree.map(jnp.asarray, loaded.params))

    def want(self, wanted: Wanted) -> None:
        key, most = np.zeros(2, np.uint32), wanted.sampling["max_tokens"]
        (future,) = self._sampler.submit([SampleRequest(wanted.ids, key, most)])
        wanted.turn.set_result(future.result())


def asked(url: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
    options = http_options(url, key, httpx2.HTTPTransport) | {"trust_env": False}
    root = options.pop("base_url").rstrip("/").removesuffix("/v1")
    with httpx2.Client(timeout=120, **options) as http:
        reply = http.post(f"{root}/inference/v1/generate", json=body, headers={SESSION: "1-ab"})
    return reply.status_code, reply.json()


def places(value: Any, empty: bool, where: str = "") -> Iterator[str]:
    """Where a JSON value has something, of a list in its first item; with nulls where `empty`."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, empty, f"{where}.{name}")
    elif isinstance(value, list):
        for each in value[:1]:
            yield from places(each, empty, f"{where}[]")
    if value is not None or empty:
        yield where


def test_the_same_requests_have_the_same_answers(theirs: str, calling: Path) -> None:
    ours = Ours(calling)
    with GenerateServer("tiny", WINDOW, ours.renderer, ours.want) as server:
        for question in ASKED:
            ids = ours.renderer.opening([{"role": "user", "content": question}]).tolist()
            sampling = {
                "temperature": 0.0,
                "max_tokens": TOKENS,
                "stop_token_ids": [*ours.renderer.stop_ids()],
                "logprobs": 1,
                "skip_special_tokens": False,
            }
            body = {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
            status, vllm = asked(theirs, body)
            assert status == 200, vllm
            status, found = asked(server.url, body, server.key)
            assert status == 200, found
            vllm["choices"][0].pop("weight_versions")  # ours: null, one version an episode
            assert {*places(vllm, False)} <= {*places(found, True)}
            one, other = vllm["choices"][0], found["choices"][0]
            assert other["token_ids"] == one["token_ids"]
            assert other["finish_reason"] == one["finish_reason"]
            np.testing.assert_allclose(
                [each["logprob"] for each in other["logprobs"]["content"]],
                [each["logprob"] for each in one["logprobs"]["content"]],
                atol=1e-3,
            )
        wrong = {"model": "another", "token_ids": [1], "sampling_params": {}}
        assert asked(theirs, wrong)[0] == asked(server.url, wrong, server.key)[0] == 404
