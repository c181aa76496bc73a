"""RLVR sampled by the real vLLM, on CPU: `make test-sidecar`.

The model is random, but calls tools (see tests/rollouts/calling_model.py). What is tested is that
its versions play and are learned from, that a run that is killed loses no question, and that vLLM
samples what the device would.
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import Server
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.rollouts.agent_experience import QuestionOrder
from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.server_sampler import ServerSampler
from qrag_jax.rollouts.token_sampler import Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.served_policy import Versioned, _noisy
from tests.entry_points import Commands, losses, metric_lines
from tests.llm.server.test_sidecar import PYTHON, pytestmark
from tests.llm.server.test_sidecar import settings as server_settings
from tests.rollouts.calling_model import write_calling_model
from tests.systems.test_rlvr_served import opened, settings

__all__ = ["pytestmark"]

ROOM, QUESTIONS, SEED = 640, 64, 42
TRAINING = (
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    config = server_settings(
        folder, log, max_model_len=ROOM, lora_rank=8, loaded_adapters=4, publish=True
    )
    with Server(config) as served:
        yield served


def given(folder: Path, server: Server) -> tuple[str, ...]:
    return (
        f"--config.model.path={folder}",
        f"--config.llm.url={server.url}",
        "--config.llm.model=tiny",
    )


def learned(workdir: Path) -> list[dict[str, Any]]:
    return [line for line in metric_lines(workdir) if "train/loss" in line]


@pytest.mark.parametrize("staleness", [0, 1])
def test_three_steps(
    staleness: int, server: Server, folder: Path, commands: Commands, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    own = (f"--config.tools.staleness={staleness}", "--config.train.steps=3")
    out = commands.succeed("train", *TRAINING, *given(folder, server), *own, f"--workdir={workdir}")
    assert "the server's log-probabilities are" in out
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
    assert 0 < lines[-1]["llm/handover_seconds"] < 5
    names = Endpoint(server.url).model_names()
    assert any(name.startswith(f"tiny@{2 - staleness}.") for name in names)


@pytest.mark.parametrize("rank", [4, 0])
def test_our_own_server(rank: int, folder: Path, commands: Commands, tmp_path: Path) -> None:
    """With adapters, and with all weights, which are exchanged."""
    workdir = tmp_path / "run"
    own = (
        f"--config.model.path={folder}",
        f"--config.model.lora.rank={rank}",
        f"--config.llm.server.python={PYTHON}",
        "--config.llm.server.cpu_cache_gib=1",
        '--config.llm.server.arguments=("--enforce-eager",)',
        "--config.tools.staleness=1",
        "--config.train.steps=3",
    )
    out = commands.succeed("train", *TRAINING, *own, f"--workdir={workdir}")
    assert "vLLM serves model at" in out
    lines = learned(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["train/sampler_kl"] < 1e-6
    assert all(line["train/unscored_share"] == 0 for line in lines)
    assert (workdir / "vllm.log").exists()


def test_killed_at_random_moments(
    server: Server, folder: Path, commands: Commands, tmp_path: Path
) -> None:
    """No question is lost or trained twice."""
    workdir, steps, draw = tmp_path / "run", 8, random.Random(0)
    own = ("--config.tools.staleness=1", f"--config.train.steps={steps}")
    words = (*TRAINING, *given(folder, server), *own, f"--workdir={workdir}")
    order = QuestionOrder(QUESTIONS, 2, SEED)
    for kill in range(3):
        process = commands.start("train", *words)
        after = len(losses(workdir)) + draw.randint(1, 2)
        deadline = time.monotonic() + 300
        while len(losses(workdir)) < after and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(draw.random() / 2)
        process.kill()
        process.communicate(timeout=60)
        # One that was being written has another name.
        names = [path.name for path in (workdir / "checkpoints" / "last").iterdir()]
        kept = max(int(name) for name in names if name.isdecimal())
        extra = workdir / "checkpoints" / "last" / str(kept) / "extra" / "metadata"
        progress = json.loads(extra.read_text())
        assert progress["batches"] == kept, kill
        for ahead, batch in enumerate(progress["pending"]):
            asked = [each["question"] for each in batch[:: len(batch) // 2]]
            assert asked == order.at(kept + ahead).numbers.tolist()
            versions = {t["version"] for e in batch for s in e["segments"] for t in s}
            (version,) = versions
            assert version.split(".")[0] == str(kept + ahead - 1)
    commands.succeed("train", *words)
    assert [step for step, _ in losses(workdir)] == list(range(1, steps + 1))
    assert all(line["train/unscored_share"] == 0 for line in learned(workdir))


def test_greedy_turns_are_those_of_the_device(server: Server, folder: Path, tmp_path: Path) -> None:
    """64 prompts of three turns, token by token, by one adapter while two others come."""
    config = settings(
        folder, server.url, tools__staleness=1, questions__bridge_train=64, llm__concurrency=64
    )
    with opened(config, tmp_path / "run") as (system, run):
        stop, keys, apart = StopSignal(), np.zeros(2, np.uint32), 0.0
        system.experience(run, stop)
        served, scaffold = system.served, system.inputs.speech.scaffold
        sizes = system.config.model.lora.sizes
        assert served is not None
        assert sizes is not None
        adapters = _noisy(system.first_state().params, sizes)
        model = served.sampler(Versioned(adapters, 1), stop).model
        greedy = SamplingConfig(temperature=0.0, room=ROOM, chunk=64)
        own = dataclasses.replace(system.inputs.model.loaded.model, stop_ids=scaffold.stop_ids)
        device = DeviceSampler(own, greedy)
        whole = Adapted(system.base[0], adapters)
        openings = [system.inputs.agent.opening(task.question) for task in system.inputs.train]
        contexts = [np.array(scaffold.opening(each), np.int32) for each in openings]
        assert len({each.tobytes() for each in contexts}) == 64
        with Client(ClientConfig(server.url, "tiny", concurrency=64)) as client:
            server_sampler = ServerSampler(client.submit, greedy, scaffold.stop_ids)

            def asked(requests: list[SampleRequest]) -> list[Sampled]:
                turns = [each.result(300) for each in server_sampler.sample(model, requests)]
                assert all(isinstance(each, Sampled) for each in turns), turns
                return [each for each in turns if isinstance(each, Sampled)]

            first = [SampleRequest(ids, keys, 24) for ids in contexts]
            began = asked(first)
            for turn in range(3):
                requests = [SampleRequest(ids, keys, 24) for ids in contexts]
                for number, (mine, its) in enumerate(
                    zip(device.sample(whole, requests), asked(requests), strict=True)
                ):
                    np.testing.assert_array_equal(mine.ids, its.ids)
                    assert mine.finish == its.finish
                    apart = max(apart, float(np.abs(mine.log_probs - its.log_probs).max()))
                    after = scaffold.after(mine.ids, (("tool", "Document ID: 3\nA river."),))
                    contexts[number] = np.concatenate([contexts[number], mine.ids, after])
                if turn < 2:
                    other = jax.tree.map(lambda leaf, by=turn: leaf * (0.5 + by), adapters)
                    served.sampler(Versioned(other, 10 + turn), stop)
            names = served._endpoint.model_names()
            assert sum(name.startswith(("tiny@10.", "tiny@11.")) for name in names) == 2
            for before, again in zip(began, asked(first), strict=True):
                np.testing.assert_array_equal(before.ids, again.ids)
        assert len({each.ids.tobytes() for each in began}) > 8
        assert apart < 1e-4
