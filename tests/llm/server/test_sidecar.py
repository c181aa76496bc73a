"""The real vLLM, on CPU, with a tiny random Qwen3: run by `make test-sidecar`.

The tests go from one state of one server to the next, in the order they stand in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig, ServerConfig
from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.server.publish import Publisher
from qrag_jax.llm.server.server import Server
from qrag_jax.models.files.weight_names import stored_params, tensors_from_params
from qrag_jax.models.trunks.families import QWEN3_TABLE
from qrag_jax.models.trunks.families import Qwen3Config as FlaxConfig
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.rollouts.served_policy import ServerSampler
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest, SamplingConfig
from tests.entry_points import ROOT, wait_until
from tests.llm.stand_in import family, running
from tests.support import tiny_qwen3
from tests.support.small_models import numpy_tensors

PYTHON = os.environ.get("QRAG_SIDECAR_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
COUNT = 12  # tokens sampled
# On CPU vLLM 0.32 ends when a prompt with a seed is read in parts.
ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
QUESTION = [{"role": "user", "content": "Which city is the capital of France?"}]

pytestmark = [
    pytest.mark.sidecar,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no vLLM at {PYTHON}: make sidecar-cpu"),
]


def processes(server: Server) -> list[int]:
    """All of a server's: the watchdog, vLLM's front, its engine."""
    assert server._process is not None
    return family(server._process.pid)


def copies(folder: Path) -> Callable[[Path], object]:
    """What writes the adapter of a folder into another one."""
    return lambda target: shutil.copytree(folder, target, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3.save(tiny_qwen3.model(0), tmp_path_factory.mktemp("model") / "tiny")


def settings(folder: Path, log: Path, **changes: Any) -> ServerConfig:
    fields: dict[str, Any] = {
        "model": str(folder),
        "name": "tiny",
        "python": PYTHON,
        "max_model_len": 256,
        "dtype": "float32",
        "arguments": ON_CPU,
        "log": str(log),
        "start_timeout": 900.0,
        "backoff": 0.5,
    }
    return ServerConfig(**{**fields, **changes})


class Served:
    """The server of this module and what is handed over to it."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.lines: list[str] = []
        config = settings(
            folder,
            log,
            lora_rank=8,
            loaded_adapters=6,  # of two publishers
            publish=True,
            arguments=(*ON_CPU, "--enable-scale-out"),
        )
        self.server = Server(
            config,
            log=self.lines.append,
            on_down=lambda: self.publisher.forget(),
            on_up=lambda: self.publisher.republish(),
        )

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        with self.server, Publisher(self.server.url, "tiny", "", keep=2) as self.publisher:
            self.endpoint = Endpoint(self.server.url)
            self.server.wait()
            yield

    def chat(self, model: str = "", **changes: Any) -> dict[str, Any]:
        body = {
            "model": model or self.publisher.current.model,
            "messages": QUESTION,
            "temperature": 0,
            "max_tokens": COUNT,
            "logprobs": True,
            "return_token_ids": True,
        }
        reply = self.endpoint.post("/v1/chat/completions", {**body, **changes}, timeout=120)
        assert reply.status == 200, reply.reason
        return dict(reply.json)

    def sampled(self, model: str = "") -> list[int]:
        return list(self.chat(model)["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(folder, tmp_path_factory.mktemp("logs") / "vllm.log")
    with served.open():
        all_processes = processes(served.server)
        assert len(all_processes) >= 3
        yield served
        before_stop = {*all_processes, *processes(served.server)}
    assert not any(map(running, before_stop))


def prompt() -> list[int]:
    tokens = tiny_qwen3.tokenizer().apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    return list(tokens)


def expected(model: Any) -> list[int]:
    return tiny_qwen3.greedy(model, prompt(), COUNT)[0]


@contextlib.contextmanager
def asked_meanwhile(ask: Callable[[], list[int]]) -> Iterator[list[list[int]]]:
    """The answers of four threads that ask until the block ends."""
    answers: list[list[int]] = []
    done = threading.Event()

    def go_on(_: int) -> None:
        while not done.is_set():
            answers.append(ask())

    with ThreadPoolExecutor(4) as pool:
        going = pool.map(go_on, range(4))
        try:
            yield answers
        finally:
            done.set()
        list(going)  # raises what a thread did


def test_one_version_stays_the_same_under_load(served: Served, tmp_path: Path) -> None:
    adapters = [tiny_qwen3.adapted(10 + n, tmp_path / str(n)) for n in range(5)]
    folders, answering = zip(*adapters, strict=True)
    with Publisher(served.server.url, "tiny", "", keep=4) as publisher:
        first = publisher.publish(copies(folders[0]), "load-0").model
        wanted = expected(answering[0])
        with asked_meanwhile(lambda: served.sampled(first)) as answers:
            for number in (1, 2, 3):
                publisher.publish(copies(folders[number]), f"load-{number}")
                other = expected(answering[number])
                assert served.sampled(f"tiny@load-{number}") == other
        assert len(answers) >= 4
        assert all(answer == wanted for answer in answers)
        publisher.publish(copies(folders[4]), "load-4")  # of which the first has to leave
        left = [f"tiny@load-{number}" for number in (1, 2, 3, 4)]
        assert [name for name in served.endpoint.model_names() if "load" in name] == left
        for name in left:
            body = {"lora_name": name}
            assert served.endpoint.post("/v1/unload_lora_adapter", body).status == 200


def test_turns_depend_on_seeds_and_end_at_stop_ids(served: Served, tmp_path: Path) -> None:
    """Their log-probabilities: see tests/test_sidecar_training.py."""
    adapter = copies(tiny_qwen3.adapted(20, tmp_path / "a")[0])
    model = served.publisher.publish(adapter, "turns").model
    client_config = ClientConfig(served.server.url, "tiny")
    keys = np.random.default_rng(0).integers(0, 2**32, (16, 2), dtype=np.uint32)
    ids = np.array(prompt(), np.int32)
    asked = [SampleRequest(ids, key, 3 * COUNT) for key in keys]
    # Of all 310 tokens these end a turn; the model's own end of text, 1, does not.
    stop_ids = tuple(range(2, 310, 20))
    with Client(client_config) as client:
        config = SamplingConfig(temperature=0.7, room=200)
        sampler = ServerSampler(client.submit, config, stop_ids, model)
        turns, again = (
            [sampler.read(one, each.result(120)) for one, each in zip(asked, sampler.submit(asked))]
            for _ in range(2)
        )
        other = dataclasses.replace(sampler, model="tiny@none")
        unknown = other.read(asked[0], other.submit(asked[:1])[0].result(120))
    assert isinstance(unknown, Failure)
    assert unknown.cause == "request"
    for turn, same in zip(turns, again, strict=True):
        assert isinstance(turn, Sampled), turn
        assert isinstance(same, Sampled), same
        np.testing.assert_array_equal(turn.ids, same.ids)
        assert (turn.finish == "stop") == (turn.ids[-1] in stop_ids)
    assert len({tuple(turn.ids) for turn in turns if isinstance(turn, Sampled)}) > 8


def test_jax_parameters_are_served(served: Served) -> None:
    newer = tiny_qwen3.model(1)
    module = Transformer(FlaxConfig.from_dict(newer.config.to_dict(), "test"))
    params = jax.tree.map(
        np.asarray, stored_params(QWEN3_TABLE, module, numpy_tensors(newer), "test")
    )
    ours = expected(newer)
    assert ours != expected(tiny_qwen3.model(0))
    tensors = {
        f"model.{n}": np.asarray(t) for n, t in tensors_from_params(QWEN3_TABLE, params).items()
    }
    published = served.publisher.publish(tensors, "jax")
    assert published == ("tiny", "jax")
    assert served.sampled() == ours
    assert served.endpoint.get("/weight_info").json == {"weight_version": "jax"}
    body = {"model": "tiny", "token_ids": prompt()}
    body["sampling_params"] = {"temperature": 0, "max_tokens": COUNT}
    reply = served.endpoint.post("/inference/v1/generate", body)
    assert reply.status == 200, reply.reason
    (choice,) = reply.json["choices"]
    assert choice["token_ids"] == ours
    assert {span["version"] for span in choice["weight_versions"]} == {"jax"}


def test_answers_under_way_are_of_one_version(served: Served, folder: Path) -> None:
    def ask() -> list[int]:
        answer = served.chat(max_tokens=150, ignore_eos=True)
        return list(answer["choices"][0]["token_ids"])

    def is_answering() -> bool:
        lines = served.endpoint.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("vllm:num_requests_running{")]
        return any(float(line.split()[-1]) > 0 for line in counts)

    with asked_meanwhile(ask) as answers:
        wait_until(is_answering)
        served.publisher.publish(numpy_tensors(tiny_qwen3.model(0)), "base-again")
    old = tiny_qwen3.greedy(tiny_qwen3.model(1), prompt(), COUNT)[0]
    new = tiny_qwen3.greedy(tiny_qwen3.model(0), prompt(), COUNT)[0]
    assert len(answers) >= 4
    assert all(answer[: len(old)] == old or answer[: len(new)] == new for answer in answers)
    assert old in [answer[: len(old)] for answer in answers]
    assert served.sampled() == expected(tiny_qwen3.model(0))
