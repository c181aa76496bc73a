"""/inference/v1/generate of the real vLLM beside ours: `make test-sidecar`.

The same requests to both have answers of the same shape, and greedy tokens are equal.
"""

from __future__ import annotations

import dataclasses
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.llm.endpoint import Endpoint
from qrag_jax.llm.server.server import Server
from qrag_jax.llm.text.chat_rendering import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.generate_server import SESSION, GenerateServer, Wanted
from qrag_jax.rollouts.token_sampler import SampleRequest, SamplingConfig
from tests.llm.server.test_sidecar import pytestmark
from tests.llm.server.test_sidecar import settings as server_settings
from tests.rollouts.token_setup import write_calling_model

__all__ = ["pytestmark"]

ROOM, COUNT = 256, 12
QUESTIONS = ("Who leads it?", "Where was the founder born?", "And then?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("calling") / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    arguments = ("--enforce-eager", "--enable-scale-out")
    given = server_settings(folder, log, max_model_len=ROOM, arguments=arguments, publish=True)
    with Server(given) as served:
        assert Endpoint(served.url).model_names() == ("tiny",)
        yield served.url


class Ours:
    """Our server on the same model, whose device speaks the likeliest tokens."""

    def __init__(self, folder: Path) -> None:
        loaded = load_language_model(folder, "float32")
        self.renderer = ChatRenderer(loaded.tokenizer, HERMES)
        model = dataclasses.replace(loaded.model, stop_ids=self.renderer.stop_ids())
        sampler = DeviceSampler(model, SamplingConfig(temperature=0.0, room=ROOM, rows=4))
        self._sampler = RoundSampler(sampler, jax.tree.map(jnp.asarray, loaded.params))

    def want(self, wanted: Wanted) -> None:
        key, most = np.zeros(2, np.uint32), wanted.sampling["max_tokens"]
        (future,) = self._sampler.submit([SampleRequest(wanted.ids, key, most)])
        wanted.turn.set_result(future.result())


def asked(url: str, body: dict[str, Any], key: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(  # noqa: S310
        f"{url.removesuffix('/v1')}/inference/v1/generate",
        data=json.dumps(body).encode(),
        headers={
            "Content-Type": "application/json",
            SESSION: "1-ab",
            "Authorization": f"Bearer {key}",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:  # noqa: S310
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


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


def test_the_same_requests_have_the_same_answers(theirs: str, folder: Path) -> None:
    ours = Ours(folder)
    with GenerateServer("tiny", ROOM, ours.renderer, ours.want) as server:
        for question in QUESTIONS:
            ids = ours.renderer.opening([{"role": "user", "content": question}]).tolist()
            sampling = {
                "temperature": 0.0,
                "max_tokens": COUNT,
                "stop_token_ids": [*ours.renderer.stop_ids()],
                "logprobs": 1,
                "skip_special_tokens": False,
            }
            body = {"model": "tiny", "token_ids": ids, "sampling_params": sampling}
            status, vllm = asked(theirs, body)
            assert status == 200, vllm
            status, found = asked(server.url, body, server.key)
            assert status == 200, found
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
