"""The sampler on a server: a small HTTP server that draws from a table, and what it may do wrong.

See tests/llm/server/test_sidecar.py for vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from qrag_jax.errors import InputError
from qrag_jax.llm.client.client import Client
from qrag_jax.llm.client.client_config import ClientConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.rollouts.sampler_check import check_log_probs
from qrag_jax.rollouts.server_sampler import ServerSampler, seed_of
from qrag_jax.rollouts.token_sampler import Sampled, SampleRequest, SamplingConfig
from tests.llm.asking import eventually
from tests.llm.model_server import Call, ModelServer, Reply

VOCAB, STOPS = 12, (2, 7)
CONFIG = SamplingConfig(temperature=0.6, room=40)
VERSIONS = {
    name: np.random.default_rng(seed).normal(0, 1.5, (VOCAB, VOCAB))
    for seed, name in enumerate(("tiny@1", "tiny@2"))
}


def draw(call: Call) -> Reply:
    """What vLLM would answer if a token's logits were a row of a table, by the token before."""
    body = call.body
    logits, generator = VERSIONS[body["model"]], np.random.default_rng(body["seed"])
    ids, log_probs = [body["prompt"][-1]], []
    finish = "length"
    for _ in range(body["max_tokens"]):
        scores = log_softmax(logits[ids[-1]] / (body["temperature"] or 1.0))
        chances = np.exp(scores) / np.exp(scores).sum()
        likeliest = not body["temperature"]
        ids.append(int(scores.argmax() if likeliest else generator.choice(VOCAB, p=chances)))
        log_probs.append(float(scores[ids[-1]]))
        if ids[-1] in body["stop_token_ids"]:
            finish = "stop"
            break
    choice = {"token_ids": ids[1:], "finish_reason": finish}
    choice["logprobs"] = {"tokens": [str(i) for i in ids[1:]], "token_logprobs": log_probs}
    # A turn that is nothing but its end has no text.
    return Reply(" ".join(str(i) for i in ids[1:] if i not in STOPS), choice=choice)


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(draw) as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    settings: dict[str, Any] = {"attempts": 2, "retry_pause": 0.01}
    with Client(ClientConfig(server.url, "tiny", **settings), log=lambda line: None) as made:
        yield made


@pytest.fixture
def sampler(client: Client) -> ServerSampler:
    return ServerSampler(client.submit, CONFIG, STOPS)


def request(ids: list[int], key: int = 0, most: int = 9) -> SampleRequest:
    return SampleRequest(np.array(ids, np.int32), np.array([key, 5], np.uint32), most)


def turn(sampler: ServerSampler, asked: SampleRequest, model: str = "tiny@1") -> Sampled:
    (future,) = sampler.sample(model, [asked])
    found = future.result(30)
    assert isinstance(found, Sampled), found
    return found


def failure(sampler: ServerSampler, asked: SampleRequest) -> Failure:
    (future,) = sampler.sample("tiny@1", [asked])
    found = future.result(30)
    assert isinstance(found, Failure), found
    return found


def table_log_probs(version: str, asked: SampleRequest, found: Sampled, at: float) -> np.ndarray:
    before = np.concatenate([asked.ids[-1:], found.ids[:-1]])
    return log_softmax(VERSIONS[version][before] / at, axis=1)[range(len(before)), found.ids]


def test_turns_are_those_of_the_version(sampler: ServerSampler) -> None:
    given = [request([3, number % VOCAB], key=number) for number in range(60)]
    ends = set()
    for version in VERSIONS:
        futures = sampler.sample(version, given)
        for asked, future in zip(given, futures, strict=True):
            found = future.result(30)
            assert isinstance(found, Sampled)
            assert (found.ids.dtype, found.log_probs.dtype) == (np.int32, np.float32)
            expected = table_log_probs(version, asked, found, CONFIG.temperature)
            np.testing.assert_allclose(found.log_probs, expected, rtol=1e-6)
            stops = np.isin(found.ids, STOPS)
            assert not stops[:-1].any()
            assert found.finish == ("stop" if stops[-1] else "length")
            assert len(found.ids) == 9 or stops[-1]
            ends.add((found.finish, len(found.ids)))
    assert {("length", 9), ("stop", 9), ("stop", 1)} <= ends


def test_what_the_server_is_sent(server: ModelServer, client: Client) -> None:
    sampler = ServerSampler(client.submit, CONFIG, STOPS, extra={"priority": 1, "top_p": 1.0})
    turn(sampler, request([3, 1], most=200))
    (call,) = server.calls
    assert call.path == "/v1/completions"
    assert call.body == {
        "model": "tiny@1",
        "prompt": [3, 1],
        "temperature": 0.6,
        "max_tokens": 38,  # as much as there is room for
        "seed": seed_of(request([3, 1])),
        "logprobs": 1,
        "return_token_ids": True,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "priority": 1,
        # vLLM takes those of the model's generation_config.json otherwise.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def test_draws_go_by_the_key_and_the_position(sampler: ServerSampler) -> None:
    asked = request([3, 1], key=4)
    first = turn(sampler, asked)
    np.testing.assert_array_equal(turn(sampler, asked).ids, first.ids)
    seeds = {seed_of(request([3] * length, key)) for length in range(1, 30) for key in range(30)}
    assert len(seeds) == 29 * 30
    assert all(0 <= seed < 2**63 for seed in seeds)
    swapped = asked._replace(key=asked.key[::-1])
    assert seed_of(swapped) != seed_of(asked)
    # The tokens before do not matter, and neither does how many are asked for.
    assert seed_of(request([9, 9], key=4, most=2)) == seed_of(asked)


def test_greedy_turns(client: Client) -> None:
    greedy = ServerSampler(client.submit, dataclasses.replace(CONFIG, temperature=0.0), STOPS)
    asked = request([3, 1], most=4)
    found = turn(greedy, asked)
    token = 1
    for number, log_prob in zip(found.ids, found.log_probs, strict=True):
        scores = log_softmax(VERSIONS["tiny@1"][token])
        token = int(scores.argmax())
        assert number == token
        assert log_prob == pytest.approx(scores.max(), rel=1e-6)


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str, str]] = [
    (lambda c: c.pop("token_ids"), "malformed", "gave no token ids; start vLLM 0.10.2 or newer"),
    (lambda c: c.pop("logprobs"), "malformed", "gave 0 log-probabilities of 5 tokens; start vLLM"),
    (
        lambda c: c["logprobs"]["token_logprobs"].pop(),
        "malformed",
        "gave 4 log-probabilities of 5 tokens; start vLLM with --logprobs-mode processed_logprobs",
    ),
    (lambda c: c["logprobs"].update(token_logprobs=[None] * 5), "malformed", "no log-probabil"),
    (lambda c: c["logprobs"].update(token_logprobs=[3.5] * 5), "malformed", "processed_logprobs"),
    (lambda c: c["logprobs"].update(token_logprobs=[-9999.0] * 5), "malformed", "processed_logp"),
    (lambda c: c["token_ids"].__setitem__(1, 2**40), "malformed", "use vLLM"),
    (lambda c: c["token_ids"].__setitem__(1, -1), "malformed", "use vLLM"),
    (lambda c: c["token_ids"].__setitem__(1, 7), "malformed", "went on behind a stop id"),
    (
        lambda c: c.update(finish_reason="stop"),
        "malformed",
        "ended the turn with token 4, which is none of the stop ids 2, 7; use one that follows",
    ),
    (lambda c: c.update(finish_reason="abort"), "broken_off", "broke the answer off"),
]


@pytest.mark.parametrize(("change", "cause", "says"), CHANGES, ids=[says for *_, says in CHANGES])
def test_turns_that_are_not_as_asked(
    change: Callable[[dict[str, Any]], Any],
    cause: str,
    says: str,
    server: ModelServer,
    sampler: ServerSampler,
) -> None:
    choice: dict[str, Any] = {"token_ids": [3, 1, 5, 8, 4], "finish_reason": "length"}
    choice["logprobs"] = {"tokens": ["x"] * 5, "token_logprobs": [-0.5] * 5}
    server.script = lambda call: Reply("x", choice=choice)
    assert turn(sampler, request([3], most=5)).ids.tolist() == [3, 1, 5, 8, 4]
    change(choice)
    found = failure(sampler, request([3], most=5))
    assert found.cause == cause
    assert says in found.message


def test_more_or_fewer_tokens_than_asked(server: ModelServer, client: Client) -> None:
    server.script = lambda call: draw(
        dataclasses.replace(call, body={**call.body, "max_tokens": 4, "stop_token_ids": []})
    )
    sampler = ServerSampler(client.submit, CONFIG, ())
    assert len(turn(sampler, request([3], most=4)).ids) == 4
    found = failure(sampler, request([3], most=6))
    assert found.cause == "too_long"
    assert "after 4 of 6 tokens; raise config.llm.server.max_model_len" in found.message
    found = failure(sampler, request([3], most=3))
    assert (found.cause, found.message[:35]) == ("malformed", "the server gave 4 tokens, 3 were as")


def test_another_version_than_asked(server: ModelServer, sampler: ServerSampler) -> None:
    server.script = lambda call: dataclasses.replace(draw(call), model="tiny@2")
    found = failure(sampler, request([3]))
    assert found.cause == "malformed"
    assert found.message == "the model tiny@1 was asked, and tiny@2 answered"
    server.script = lambda call: Reply(status=404, text="The model `tiny@1` does not exist.")
    assert failure(sampler, request([3])).cause == "request"


@pytest.mark.parametrize(
    "extra",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.1},
        {"repetition_penalty": 1.05},
        {"min_tokens": 0},
    ],
)
def test_another_distribution_is_refused(extra: dict[str, Any], client: Client) -> None:
    (name,) = extra
    with pytest.raises(InputError, match=f"{name}=.* changes the distribution that tokens are"):
        ServerSampler(client.submit, CONFIG, STOPS, extra=extra)
    with pytest.raises(InputError, match="stop_token_ids is set by the sampler"):
        ServerSampler(client.submit, CONFIG, STOPS, extra={"stop_token_ids": [3]})


def test_contexts_without_room(server: ModelServer, sampler: ServerSampler) -> None:
    with pytest.raises(ValueError, match="request 1 has 40 tokens; there is room for 1 to 39"):
        sampler.sample("tiny@1", [request([3]), request([3] * 40)])
    assert server.calls == []


def test_turns_come_one_by_one_and_may_be_taken_back(
    server: ModelServer, client: Client, sampler: ServerSampler
) -> None:
    server.script = lambda call: dataclasses.replace(
        draw(call), delay=30.0 * (call.body["prompt"] == [5])
    )
    slow, quick, closed = sampler.sample("tiny@1", [request([5]), request([3]), request([5])])
    assert isinstance(quick.result(30), Sampled)
    assert eventually(lambda: len(server.calls) == 3)
    assert slow.cancel()
    assert not closed.done()
    client.close()
    for future in (slow, closed):
        with pytest.raises(CancelledError):
            future.result(30)


# ---------------------------------------------------------------- the first batch


def two_kinds(scale: float, temperature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits `[S, V]`, and of a token drawn from each row its log-probability at the temperature
    and at 1."""
    random = np.random.default_rng(0)
    logits = scale * random.normal(size=(2000, 50))
    drawn = (logits / temperature + random.gumbel(size=logits.shape)).argmax(axis=1)
    at, at_one = (
        log_softmax(logits / each, axis=1)[range(2000), drawn] for each in (temperature, 1.0)
    )
    return logits, at.astype(np.float32), at_one.astype(np.float32)


# A policy that is unsure, and one that is sure of most tokens: there the two kinds are close.
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_raw_log_probabilities_are_noticed(scale: float) -> None:
    _, at, at_one = two_kinds(scale, 0.7)
    noise = np.random.default_rng(1).normal(0, 0.01, len(at)).astype(np.float32)
    found = check_log_probs(at + noise, at, at_one, temperature=0.7)
    assert found == pytest.approx(np.abs(noise).mean(), rel=1e-3)
    with pytest.raises(InputError, match=r"raw .* at the temperature 0\.7, .*processed_logprobs"):
        check_log_probs(at_one + noise, at, at_one, temperature=0.7)


def test_at_temperature_one_both_kinds_are_the_same() -> None:
    _, at, at_one = two_kinds(1.0, 1.0)
    assert check_log_probs(at, at, at_one, temperature=1.0) == 0.0


def test_another_model_is_noticed() -> None:
    logits, at, at_one = two_kinds(1.0, 0.7)
    other = log_softmax(logits[:, ::-1] / 0.7, axis=1)[:, 3].astype(np.float32)
    with pytest.raises(InputError, match=r"nats a token .* more than 0\.1; serve the model's fol"):
        check_log_probs(other, at, at_one, temperature=0.7)
    with pytest.raises(InputError, match="nan nats"):
        check_log_probs(at, np.full_like(at, np.nan), at_one, temperature=0.7)
    with pytest.raises(ValueError, match="of the same tokens"):
        check_log_probs(at[1:], at, at_one, temperature=0.7)
