"""Samplers, on the device and on a server: draws, and the model's log-probabilities.

See tests/conformance/test_decoders.py for greedy tokens, tests/llm/server/test_sidecar.py for vLLM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax

from qrag_jax.errors import InputError
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import Adapted, folded
from qrag_jax.models.trunks import qwen3_cache
from qrag_jax.models.trunks.qwen3 import LanguageModel, Qwen3, Qwen3Config
from qrag_jax.rollouts.device_sampler import DeviceSampler, shared_prefixes
from qrag_jax.rollouts.served_policy import ServerSampler, check_log_probs, seed_of, turn_log_probs
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.mesh import make_mesh, shardings_of
from tests.llm.model_server import Call, ModelServer, Reply, eventually

GREEDY = SamplingConfig(temperature=0.0, room=48, chunk=8)
TINY = Qwen3Config(
    vocab_size=7,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    head_dim=8,
)


def requests(lengths: Sequence[int], most: int, vocab: int = 7) -> list[SampleRequest]:
    draw = np.random.default_rng(0)
    return [
        SampleRequest(
            draw.integers(0, vocab, length).astype(np.int32),
            draw.integers(0, 2**32, 2, dtype=np.uint32),
            most,
        )
        for length in lengths
    ]


def tiny(*, scanned: bool = False, stop_ids: tuple[int, ...] = ()) -> tuple[LanguageModel, Any]:
    trunk = Qwen3(TINY, scanned=scanned)
    params = dict(trunk.init_params(jax.random.key(0)))
    params["word_embeddings"] = 8 * params["word_embeddings"]
    return LanguageModel(trunk, stop_ids, 64), params


def check_own(
    model: LanguageModel, params: Any, request: SampleRequest, sampled: Sampled, temperature: float
) -> None:
    """The log-probabilities are those of the logits of the whole row."""
    row = np.concatenate([request.ids, sampled.ids])[None]
    logits = model.logits(params, jnp.asarray(row), jnp.array([row.shape[1]]))
    every = jax.nn.log_softmax(logits[0] / temperature)
    places = np.arange(len(request.ids) - 1, row.shape[1] - 1)
    np.testing.assert_allclose(sampled.log_probs, every[places, sampled.ids], atol=1e-4)


def check_same(some: Sequence[Sampled], others: Sequence[Sampled]) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert one.finish == other.finish


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_draw_nothing(temperature: float) -> None:
    model, params = tiny()
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
    sampler = DeviceSampler(model, dataclasses.replace(GREEDY, temperature=temperature))
    with pytest.raises(InputError, match=r"config\.model\.path"):
        sampler.sample(broken, requests((3, 5), 4))


@pytest.mark.parametrize(("scanned", "places"), [(False, 128), (True, 5)])
def test_log_probs_are_those_of_the_drawn_distribution_and_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch, scanned: bool, places: int
) -> None:
    """In blocks of the cache of any size: processors and accelerators have different ones."""
    monkeypatch.setattr(qwen3_cache, "_CPU_BLOCK", places)
    model, params = tiny(scanned=scanned)
    config = SamplingConfig(temperature=0.6, room=40, chunk=4)
    asked = [
        item._replace(most=most)
        for item, most in zip(requests((5, 13, 2), 0), (9, 1, 7), strict=True)
    ]
    drawn = DeviceSampler(model, config).sample(params, asked)
    assert [len(item.ids) for item in drawn] == [9, 1, 7]
    for request, sampled in zip(asked, drawn, strict=True):
        check_own(model, params, request, sampled, 0.6)
    turns = [(request.ids, turn.ids) for request, turn in zip(asked, drawn, strict=True)]
    at, at_one = turn_log_probs(model, params, turns, (0.6, 1.0))
    np.testing.assert_allclose(at, np.concatenate([item.log_probs for item in drawn]), atol=1e-5)
    check_own(model, params, asked[0], drawn[0]._replace(log_probs=at_one[:9]), 1.0)


def test_draws_have_their_probabilities() -> None:
    model, params = tiny()
    config = SamplingConfig(temperature=0.8, room=8, chunk=4)
    (first,) = requests((4,), 1)
    keys = np.random.default_rng(1).integers(0, 2**32, (4096, 2), dtype=np.uint32)
    result = DeviceSampler(model, config).sample(params, [first._replace(key=key) for key in keys])
    counts = np.bincount([int(item.ids[0]) for item in result], minlength=TINY.vocab_size)
    logits = model.logits(params, jnp.asarray(first.ids[None]), jnp.array([4]))[0, -1]
    expected = np.asarray(jax.nn.softmax(logits / 0.8), np.float64)
    assert stats.chisquare(counts, len(keys) * expected / expected.sum()).pvalue > 1e-3
    # Each position has a draw of its own: where all tokens are as likely, they differ.
    flat = {**params, "word_embeddings": jnp.zeros_like(params["word_embeddings"])}
    for turn in DeviceSampler(model, config).sample(flat, [first._replace(most=4, key=keys[0])]):
        assert len(set(turn.ids.tolist())) > 1


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    model, params = tiny(stop_ids=(2,))
    sampler = DeviceSampler(model, SamplingConfig(temperature=1.0, room=40, chunk=4))
    asked = requests((5, 13, 2, 9, 5, 7), 12)
    asked[4] = asked[0]._replace(key=asked[4].key)  # members of one group
    together = sampler.sample(params, asked)
    check_same([sampler.sample(params, [item])[0] for item in asked], together)
    assert together[0].ids.tolist() != together[4].ids.tolist()
    assert {item.finish for item in together} == {"stop", "length"}
    for item in together:
        assert (item.finish == "stop") == (item.ids[-1] == 2)
        assert 2 not in item.ids[:-1]
    # A turn that goes on from what was drawn draws what the longer turn would have drawn.
    whole = asked[0]
    (begun,) = sampler.sample(params, [whole._replace(most=2)])
    longer = whole._replace(ids=np.concatenate([whole.ids, begun.ids]), most=10)
    assert begun.finish == "length"
    (rest,) = sampler.sample(params, [longer])
    np.testing.assert_array_equal(np.append(begun.ids, rest.ids), together[0].ids)
    # A full row ends by length.
    full = sampler.sample(params, [item._replace(most=50) for item in asked[:2]])
    assert all(len(item.ids) <= 40 - n for item, n in zip(full, (5, 13), strict=True))
    assert sampler.sample(params, []) == []


def test_rows_that_go_on_alone_draw_what_they_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qwen3_cache, "_CPU_BLOCK", 8)
    model, params = tiny(scanned=True, stop_ids=(2,))
    lengths = np.random.default_rng(3).permutation([1, 2, 2, 3] * 24 + [5, 9, 9, 12] * 8).tolist()
    asked = [
        request._replace(most=most)
        for request, most in zip(requests([5, 3, 9, 2] * 32, 0), lengths, strict=True)
    ]
    # 128 rows become 32, and these become 8. Where there are 4 from the first, none goes on alone.
    config = SamplingConfig(temperature=1.0, room=40, chunk=4, rows=128)
    together = DeviceSampler(model, config).sample(params, asked)
    check_same(
        DeviceSampler(model, dataclasses.replace(config, rows=4)).sample(params, asked), together
    )
    assert sum(len(item.ids) > 6 for item in together) >= 3


def test_prompts_that_share_prefixes_draw_what_each_draws_alone() -> None:
    model, params = tiny(stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=48, chunk=4)
    one, other, *mine = requests((21, 18, *(1 + n % 5 for n in range(14))), 12)
    asked = [
        request._replace(ids=np.concatenate([(one, other)[n % 2].ids, request.ids]))
        for n, request in enumerate(mine)
    ]
    ids = sorted((item.ids for item in asked), key=lambda item: item.tobytes())
    assert sorted(shared_prefixes(ids, 4, config.chunk)) == [(7, 18), (7, 21)]
    sampler = DeviceSampler(model, config)
    together = sampler.sample(params, asked)
    for n in (0, 1, 7):
        check_own(model, params, asked[n], together[n], 1.0)
    alone = [
        turn for first in range(0, 14, 2) for turn in sampler.sample(params, asked[first:][:2])
    ]
    check_same(alone, together)


def test_devices_draw_what_one_draws() -> None:
    count = 21
    model, params = tiny(scanned=True, stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=24, chunk=4, rows=2)
    asked = requests([1 + n % 9 for n in range(count)], 10)
    for n in range(0, count - 1, 3):  # groups, whose members do not follow each other
        asked[n + 1] = asked[n]._replace(key=asked[n + 1].key)
    mesh = make_mesh((2, 2, 2))
    shardings = shardings_of(mesh, Qwen3.partition_rules(), params, params)
    assert any(not item.is_fully_replicated for item in jax.tree.leaves(shardings))
    result = DeviceSampler(model, config, mesh).sample(jax.device_put(params, shardings), asked)
    check_same(result, DeviceSampler(model, config).sample(params, asked))


def test_adapters_are_those_merged() -> None:
    model, params = tiny(scanned=True)
    draw = np.random.default_rng(2)
    shapes = {"lora_a": (2, 16, 2), "lora_b": (2, 2, 32)}
    query = {name: draw.normal(size=size).astype(np.float32) for name, size in shapes.items()}
    adapted = Adapted(params, {"layers": {"query": query}})
    sampler = DeviceSampler(dataclasses.replace(model, lora_scale=0.5), GREEDY)
    asked = requests((5, 9), 8)
    result, merged, plain = (
        [turn.ids.tolist() for turn in sampler.sample(item, asked)]
        for item in (adapted, folded(adapted, 0.5), params)
    )
    assert result == merged != plain


# ---------------------------------------------------------------- on a server

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
        scores = log_softmax(logits[ids[-1]] / body["temperature"])
        ids.append(int(generator.choice(VOCAB, p=np.exp(scores) / np.exp(scores).sum())))
        log_probs.append(float(scores[ids[-1]]))
        if ids[-1] in body["stop_token_ids"]:
            finish = "stop"
            break
    # A turn that is nothing but its end has no text.
    text = " ".join(str(i) for i in ids[1:] if i not in STOPS)
    return Reply(text, choice=choice_of(ids[1:], log_probs, finish))


def choice_of(ids: list[int], log_probs: list[float], finish: str) -> dict[str, Any]:
    tokens = {"tokens": [str(i) for i in ids], "token_logprobs": log_probs}
    return {"token_ids": ids, "finish_reason": finish, "logprobs": tokens}


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(draw) as running:
        yield running


@pytest.fixture
def client(server: ModelServer) -> Iterator[Client]:
    settings: dict[str, Any] = {"attempts": 2, "retry_pause": 0.01}
    with Client(ClientConfig(server.url, "tiny", **settings), log=lambda line: None) as client:
        yield client


@pytest.fixture
def sampler(client: Client) -> ServerSampler:
    return ServerSampler(client.submit, CONFIG, STOPS, "tiny@1")


def request(ids: list[int], key: int = 0, most: int = 9) -> SampleRequest:
    return SampleRequest(np.array(ids, np.int32), np.array([key, 5], np.uint32), most)


def outcome(sampler: ServerSampler, asked: SampleRequest) -> Sampled | Failure:
    (future,) = sampler.submit([asked])
    return future.result(30)


def test_turns_are_those_of_the_version(sampler: ServerSampler) -> None:
    asked, ends = [request([3, number % VOCAB], key=number) for number in range(60)], set()
    for version, logits in VERSIONS.items():
        of_version = dataclasses.replace(sampler, model=version)
        for item, future in zip(asked, of_version.submit(asked), strict=True):
            result = future.result(30)
            assert isinstance(result, Sampled)
            assert (result.ids.dtype, result.log_probs.dtype) == (np.int32, np.float32)
            before = np.concatenate([item.ids[-1:], result.ids[:-1]])
            scores = log_softmax(logits[before] / 0.6, axis=1)
            np.testing.assert_allclose(
                result.log_probs, scores[range(len(before)), result.ids], rtol=1e-6
            )
            stops = np.isin(result.ids, STOPS)
            assert not stops[:-1].any()
            assert result.finish == ("stop" if stops[-1] else "length")
            assert len(result.ids) == 9 or stops[-1]
            ends.add((result.finish, len(result.ids)))
    assert {("length", 9), ("stop", 9), ("stop", 1)} <= ends


def test_what_the_server_is_sent(server: ModelServer, sampler: ServerSampler) -> None:
    assert isinstance(outcome(sampler, request([3, 1], most=200)), Sampled)
    (call,) = server.calls
    assert call.path == "/v1/completions"
    assert call.body == {
        "model": "tiny@1",
        "prompt": [3, 1],
        "temperature": 0.6,
        "max_tokens": 38,  # as much as there is room for
        # By the key and the position, not by the tokens before or how many are asked for.
        "seed": seed_of(request([9, 9], most=2)),
        "logprobs": 1,
        "return_token_ids": True,
        "stop_token_ids": [2, 7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        # vLLM takes those of the model's generation_config.json otherwise.
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def log_probs(*values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice["logprobs"].update(token_logprobs=[*values])


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no_ids": lambda c: c.pop("token_ids"),
    "too_few": log_probs(*[-0.5] * 4),
    "impossible": log_probs(*[-9999.0] * 5),
    "id_too_large": lambda c: c["token_ids"].__setitem__(1, 2**40),
    "behind_a_stop": lambda c: c["token_ids"].__setitem__(1, 7),
    "no_stop": lambda c: c.update(finish_reason="stop"),
    "abort": lambda c: c.update(finish_reason="abort"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_turns_that_are_not_as_asked(
    name: str, server: ModelServer, sampler: ServerSampler
) -> None:
    choice = choice_of([3, 1, 5, 8, 4], [-0.5] * 5, "length")
    server.script = lambda call: Reply("x", choice=choice)
    asked = request([3], most=5)
    assert outcome(sampler, asked).ids.tolist() == [3, 1, 5, 8, 4]  # type: ignore[union-attr]
    CHANGES[name](choice)
    result = outcome(sampler, asked)
    assert isinstance(result, Failure)
    assert result.cause == ("broken_off" if name == "abort" else "malformed")


def test_another_number_of_tokens_and_another_version(
    server: ModelServer, sampler: ServerSampler
) -> None:
    server.script = lambda call: draw(
        dataclasses.replace(call, body={**call.body, "max_tokens": 4, "stop_token_ids": []})
    )
    plain = dataclasses.replace(sampler, stop_ids=())
    assert isinstance(outcome(plain, request([3], most=4)), Sampled)
    for most, cause in ((6, "too_long"), (3, "malformed")):
        assert outcome(plain, request([3], most=most)).cause == cause  # type: ignore[union-attr]
    server.script = lambda call: dataclasses.replace(draw(call), model="tiny@2")
    assert outcome(sampler, request([3])).cause == "malformed"  # type: ignore[union-attr]
    server.script = lambda call: Reply(status=404, text="The model `tiny@1` does not exist.")
    assert outcome(sampler, request([3])).cause == "request"  # type: ignore[union-attr]


def test_turns_come_one_by_one_and_may_be_taken_back(
    server: ModelServer, client: Client, sampler: ServerSampler
) -> None:
    server.script = lambda call: dataclasses.replace(
        draw(call), delay=30.0 * (call.body["prompt"] == [5])
    )
    slow, quick, closed = sampler.submit([request([5]), request([3]), request([5])])
    assert isinstance(quick.result(30), Sampled)
    assert eventually(lambda: len(server.calls) == 3)
    assert slow.cancel()
    assert not closed.done()
    client.close()
    for future in (slow, closed):
        with pytest.raises(CancelledError):
            future.result(30)


# A policy that is unsure, and one that is sure of most tokens: there the two kinds are close.
@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_log_probabilities_of_another_kind_or_model_are_noticed(scale: float) -> None:
    random = np.random.default_rng(0)
    logits = scale * random.normal(size=(2000, 50))
    drawn = (logits / 0.7 + random.gumbel(size=logits.shape)).argmax(axis=1)
    at, at_one, other = (
        log_softmax(rows / item, axis=1)[range(2000), drawn].astype(np.float32)
        for rows, item in ((logits, 0.7), (logits, 1.0), (logits[:, ::-1], 0.7))
    )
    noise = random.normal(0, 0.01, len(at)).astype(np.float32)
    result = check_log_probs(at + noise, at, at_one, temperature=0.7)
    assert result == pytest.approx(np.abs(noise).mean(), rel=1e-3)
    assert check_log_probs(at_one, at_one, at_one, temperature=1.0) == 0.0  # both are the same
    with pytest.raises(InputError, match="processed_logprobs"):
        check_log_probs(at_one + noise, at, at_one, temperature=0.7)
    for wrong in (other, np.full_like(at, np.nan)):
        with pytest.raises(InputError):
            check_log_probs(wrong, at, at_one, temperature=0.7)
