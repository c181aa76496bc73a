"""The server of turns: vLLM's shapes, the checks of verifiers' client, and one sentence each no."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.rollouts.generate_server import SESSION, GenerateServer, Wanted
from qrag_jax.rollouts.token_sampler import STOP, Sampled
from tests.rollouts.chats import chat_tokenizer

TOKENIZER = chat_tokenizer()
RENDERER = ChatRenderer(TOKENIZER, HERMES)
ROOM = 64
DRAWN = Sampled(np.array([5, 9, 311], np.int32), np.array([-0.25, -1.5, -0.1], np.float32), STOP)


class Asked:
    """A server, and what it was asked for."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []
        self.answer: Sampled | Failure = DRAWN

    def want(self, wanted: Wanted) -> None:
        self.wanted.append(wanted)
        wanted.turn.set_result(self.answer)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        root = self.server.url.removesuffix("/v1")
        own = {"Authorization": f"Bearer {self.server.key}", SESSION: "7-ab", **headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{root}{path}", data=data, headers=own)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture
def asked() -> Iterator[Asked]:
    found = Asked()
    with GenerateServer("policy", ROOM, RENDERER, found.want) as found.server:
        yield found


def test_a_turn_has_the_shape_that_verifiers_checks(asked: Asked) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 3, "stop_token_ids": [*RENDERER.stop_ids()]}
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": sampling}
    status, reply = asked.ask("/inference/v1/generate", body)
    assert status == 200
    (choice,) = reply["choices"]
    assert choice["token_ids"] == DRAWN.ids.tolist()
    assert choice["finish_reason"] == "stop"
    assert reply["model"] == "policy"
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert [each["token"] for each in choice["logprobs"]["content"]] == [
        "token_id:5",
        "token_id:9",
        "token_id:311",
    ]
    given = np.array([each["logprob"] for each in choice["logprobs"]["content"]], np.float32)
    np.testing.assert_array_equal(given, DRAWN.log_probs)
    (wanted,) = asked.wanted
    assert wanted.episode == 7
    assert wanted.ids.tolist() == [1, 2, 3]
    assert wanted.sampling == {"temperature": 1.0, "max_tokens": 3}


def test_the_model_and_its_room_are_told(asked: Asked) -> None:
    status, reply = asked.ask("/v1/models")
    assert status == 200
    assert [(card["id"], card["max_model_len"]) for card in reply["data"]] == [("policy", ROOM)]


@pytest.mark.parametrize(
    ("changes", "headers", "status", "says"),
    [
        ({"model": "another"}, {}, 404, "the model 'another' does not exist"),
        ({"token_ids": []}, {}, 400, "no list of token ids"),
        ({"token_ids": [1, -2]}, {}, 400, "no list of token ids"),
        ({"token_ids": [1] * ROOM}, {}, 400, f"maximum context length is {ROOM}"),
        ({"sampling_params": {"stop_token_ids": [3]}}, {}, 400, "use a renderer of this model"),
        ({}, {SESSION: "ab"}, 400, "names no episode"),
        ({}, {"Authorization": "Bearer wrong"}, 401, "the API key is wrong"),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    asked: Asked, changes: dict[str, Any], headers: dict[str, str], status: int, says: str
) -> None:
    body = {"model": "policy", "token_ids": [1], **changes}
    found, reply = asked.ask("/inference/v1/generate", body, **headers)
    assert found == status
    assert says in reply["error"]["message"]
    assert not asked.wanted


def test_a_failure_is_an_error(asked: Asked) -> None:
    asked.answer = Failure("server", "the sampler is down")
    status, reply = asked.ask("/inference/v1/generate", {"model": "policy", "token_ids": [1]})
    assert (status, reply["error"]["message"]) == (503, "the sampler is down")
    assert asked.ask("/nothing", {})[0] == 404


def test_messages_become_ids_as_for_v0(asked: Asked) -> None:
    messages = [{"role": "user", "content": "Q"}]
    _, reply = asked.ask("/render/opening", {"messages": messages, "tools": None})
    assert reply["token_ids"] == RENDERER.opening(messages).tolist()
    said = TOKENIZER("yes<|im_end|>", add_special_tokens=False).input_ids
    follows = [{"role": "tool", "tool_call_id": "x", "content": "found"}]
    _, reply = asked.ask("/render/after", {"token_ids": said, "messages": follows})
    after = RENDERER.after(np.array(said, np.int32), follows)
    assert after is not None
    assert reply["token_ids"] == after.tolist()
    _, reply = asked.ask("/render/spoken", {"token_ids": said})
    assert reply == {"content": "yes", "calls": []}
    status, reply = asked.ask("/render/opening", {"messages": [{"role": "user", "content": [{}]}]})
    assert status == 400
    assert "is no text" in reply["error"]["message"]
