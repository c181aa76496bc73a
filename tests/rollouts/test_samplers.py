"""Samplers, on the device and on a server: draws, and the model's log-probabilities.

See tests/conformance/test_decoders.py for greedy tokens, tests/llm/server/test_sidecar.py for vLLM.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
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
from qrag_jax.models.embedding import LanguageModel
from qrag_jax.models.trunks import qwen3_cache
from qrag_jax.models.trunks.families import Qwen3Config
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler, shared_prefixes
from qrag_jax.rollouts.served_policy import ServerSampler, check_log_probs, seed_of, turn_log_probs
from qrag_jax.rollouts.trajectories import Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.mesh import make_mesh, shardings_of
from tests.learners.whole_loss import SIZES
from tests.llm.model_server import Call, ModelServer, Reply
from tests.reference import logits

TINY = Qwen3Config(7, **SIZES)


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


@functools.cache
def tiny(*, scanned: bool = False, stop_ids: tuple[int, ...] = ()) -> tuple[LanguageModel, Any]:
    trunk = Transformer(TINY, scanned=scanned)
    params = dict(trunk.init_params(jax.random.key(0)))
    params["word_embeddings"] = 8 * params["word_embeddings"]
    return LanguageModel(trunk, stop_ids, 64), params


def turns_of(sampler: DeviceSampler, params: Any, asked: Sequence[SampleRequest]) -> list[Sampled]:
    return RoundSampler(sampler, params).sample(asked)


def check_own(
    model: LanguageModel, params: Any, request: SampleRequest, sampled: Sampled, temperature: float
) -> None:
    """The log-probabilities are those of the logits of the whole row."""
    row = np.concatenate([request.ids, sampled.ids])[None]
    of_row = logits(model, params, jnp.asarray(row), jnp.array([row.shape[1]]))
    every = jax.nn.log_softmax(of_row[0] / temperature)
    places = np.arange(len(request.ids) - 1, row.shape[1] - 1)
    np.testing.assert_allclose(sampled.log_probs, every[places, sampled.ids], atol=1e-4)


def check_same(some: Sequence[Sampled], others: Sequence[Sampled]) -> None:
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert one.finish == other.finish


def test_log_probs_are_those_of_the_drawn_distribution_and_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In blocks of the cache of any size: processors and accelerators have different ones."""
    monkeypatch.setattr(qwen3_cache, "_BLOCK", 5)
    monkeypatch.setattr(qwen3_cache, "_WHOLE", 5)
    model, params = tiny(scanned=True)
    config = SamplingConfig(temperature=0.6, room=40, chunk=4)
    asked = [
        item._replace(most=most)
        for item, most in zip(requests((5, 13, 2), 0), (9, 1, 7), strict=True)
    ]
    drawn = turns_of(DeviceSampler(model, config), params, asked)
    assert [len(item.ids) for item in drawn] == [9, 1, 7]
    for request, sampled in zip(asked, drawn, strict=True):
        check_own(model, params, request, sampled, 0.6)
    turns = [(request.ids, turn.ids) for request, turn in zip(asked, drawn, strict=True)]
    at, at_one = turn_log_probs(model, params, turns, (0.6, 1.0))
    np.testing.assert_allclose(at, np.concatenate([item.log_probs for item in drawn]), atol=1e-5)
    check_own(model, params, asked[0], drawn[0]._replace(log_probs=at_one[:9]), 1.0)


def test_draws_have_their_probabilities() -> None:
    model, params = tiny()
    (first,) = requests((4,), 1)
    keys = np.random.default_rng(1).integers(0, 2**32, (4096, 2), dtype=np.uint32)
    sampler = DeviceSampler(model, SamplingConfig(temperature=0.8, room=8, chunk=4))
    result = turns_of(sampler, params, [first._replace(key=key) for key in keys])
    counts = np.bincount([int(item.ids[0]) for item in result], minlength=TINY.vocab_size)
    of_first = logits(model, params, jnp.asarray(first.ids[None]), jnp.array([4]))[0, -1]
    expected = np.asarray(jax.nn.softmax(of_first / 0.8), np.float64)
    assert stats.chisquare(counts, len(keys) * expected / expected.sum()).pvalue > 1e-3
    # Each position has a draw of its own: where all tokens are as likely, they differ.
    flat = {**params, "word_embeddings": jnp.zeros_like(params["word_embeddings"])}
    (turn,) = turns_of(sampler, flat, [first._replace(most=4, key=keys[0])])
    assert len(set(turn.ids.tolist())) > 1
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
    with pytest.raises(InputError, match=r"config\.model\.path"):
        turns_of(sampler, broken, [first])


def test_a_draw_depends_on_no_other_row_and_not_on_shared_prefixes() -> None:
    model, params = tiny(stop_ids=(2,))
    sampler = DeviceSampler(model, SamplingConfig(temperature=1.0, room=48, chunk=4))
    asked = requests((5, 13, 2, 9, 5, 7), 12)
    asked[4] = asked[0]._replace(key=asked[4].key)  # members of one group
    together = turns_of(sampler, params, asked)
    check_same([turns_of(sampler, params, [item])[0] for item in asked], together)
    assert together[0].ids.tolist() != together[4].ids.tolist()
    assert {item.finish for item in together} == {"stop", "length"}
    for item in together:
        assert (item.finish == "stop") == (item.ids[-1] == 2)
        assert 2 not in item.ids[:-1]
    # A turn that goes on from what was drawn draws what the longer turn would have drawn.
    whole = asked[0]
    (begun,) = turns_of(sampler, params, [whole._replace(most=2)])
    longer = whole._replace(ids=np.concatenate([whole.ids, begun.ids]), most=10)
    assert begun.finish == "length"
    (rest,) = turns_of(sampler, params, [longer])
    np.testing.assert_array_equal(np.append(begun.ids, rest.ids), together[0].ids)
    # A full row ends by length.
    full = turns_of(sampler, params, [item._replace(most=60) for item in asked[:2]])
    assert all(len(item.ids) <= 48 - n for item, n in zip(full, (5, 13), strict=True))
    assert turns_of(sampler, params, []) == []
    # Prompts that share prefixes draw what each draws alone.
    one, other, *tails = requests((21, 18, *(1 + n % 5 for n in range(14))), 12)
    asked = [
        request._replace(ids=np.concatenate([(one, other)[n % 2].ids, request.ids]))
        for n, request in enumerate(tails)
    ]
    ids = sorted((item.ids for item in asked), key=lambda item: item.tobytes())
    assert sorted(shared_prefixes(ids, 4, 4)) == [(7, 18), (7, 21)]
    together = turns_of(sampler, params, asked)
    check_own(model, params, asked[0], together[0], 1.0)
    check_same([turns_of(sampler, params, [item])[0] for item in asked], together)


def test_rows_that_go_on_alone_draw_what_they_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qwen3_cache, "_BLOCK", 8)
    monkeypatch.setattr(qwen3_cache, "_WHOLE", 8)
    model, params = tiny(scanned=True, stop_ids=(2,))
    lengths = np.random.default_rng(3).permutation([1, 2, 2, 3] * 24 + [5, 9, 9, 12] * 8).tolist()
    asked = [
        request._replace(most=most)
        for request, most in zip(requests([5, 3, 9, 2] * 32, 0), lengths, strict=True)
    ]
    # 128 rows become 32, and these become 8. Where there are 4 from the first, none goes on alone.
    config = SamplingConfig(temperature=1.0, room=40, chunk=4, rows=128)
    together = turns_of(DeviceSampler(model, config), params, asked)
    check_same(
        turns_of(DeviceSampler(model, dataclasses.replace(config, rows=4)), params, asked), together
    )
    assert sum(len(item.ids) > 6 for item in together) >= 3


def test_devices_draw_what_one_draws() -> None:
    count = 21
    model, params = tiny(scanned=True, stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=24, chunk=4, rows=2)
    asked = requests([1 + n % 9 for n in range(count)], 10)
    for n in range(0, count - 1, 3):  # groups, whose members do not follow each other
        asked[n + 1] = asked[n]._replace(key=asked[n + 1].key)
    mesh = make_mesh((2, 2, 2))
    shardings = shardings_of(mesh, model.trunk.partition_rules(), params, params)
    assert any(not item.is_fully_replicated for item in jax.tree.leaves(shardings))
    result = turns_of(DeviceSampler(model, config, mesh), jax.device_put(params, shardings), asked)
    check_same(result, turns_of(DeviceSampler(model, config), params, asked))


def test_next_turns_read_behind_the_last_ones_draw_what_whole_prompts_draw() -> None:
    """Also if episodes end, rows lie elsewhere, prompts change, or a new episode begins."""
    model, params = tiny(stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=64, chunk=4, rows=8)
    draw = np.random.default_rng(1)
    for mesh in (None, make_mesh((2, 1, 1), jax.devices()[:2])):
        sampler = DeviceSampler(model, config, mesh)
        kept = RoundSampler(sampler, params, reuse=True)
        asked = requests((9, 9, 14, 5, 3, 7, 8, 6, 4, 11), 6)
        asked[1] = asked[0]._replace(key=asked[1].key)  # they part with their first turns
        for turn in range(4):
            results = kept.sample(asked)
            check_same([turns_of(sampler, params, [item])[0] for item in asked], results)
            longer = [
                np.concatenate([item.ids, drawn.ids, draw.integers(0, 7, 1 + 3 * n % 5)])
                for n, (item, drawn) in enumerate(zip(asked, results, strict=True))
            ]
            if turn == 1:
                longer[2][4] = (longer[2][4] + 1) % 7  # a history that was rewritten
            asked = [
                item._replace(ids=ids.astype(np.int32), key=item.key + np.uint32(1))
                for item, ids in zip(asked, longer, strict=True)
            ][::-1][: 10 - 2 * turn]
        check_same([turns_of(sampler, params, asked[:1])[0]], kept.sample(asked[:1]))


# ---------------------------------------------------------------- on a server

IDS = [3, 1, 5, 8, 4]


def choice_of(ids: list[int], log_probs: list[float], finish: str) -> dict[str, Any]:
    tokens = {"tokens": [str(i) for i in ids], "token_logprobs": log_probs}
    return {"token_ids": ids, "finish_reason": finish, "logprobs": tokens}


def replied(call: Call) -> Reply:
    """Five tokens, as vLLM answers."""
    return Reply("x", choice=choice_of(IDS, [-0.5] * 5, "length"))


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer(replied) as running:
        yield running


@pytest.fixture
def sampler(server: ModelServer) -> Iterator[ServerSampler]:
    settings: dict[str, Any] = {"attempts": 2, "retry_pause": 0.01}
    with Client(ClientConfig(server.url, "tiny", **settings), log=lambda line: None) as client:
        yield ServerSampler(
            client.submit, SamplingConfig(temperature=0.6, room=40), (2, 7), "tiny@1"
        )


def request(ids: list[int], most: int = 5) -> SampleRequest:
    return SampleRequest(np.array(ids, np.int32), np.array([0, 5], np.uint32), most)


def outcome(sampler: ServerSampler, most: int = 5) -> Any:
    asked = request([3, 1], most)
    (future,) = sampler.submit([asked])
    return sampler.read(asked, future.result(30))


def test_what_the_server_is_sent(server: ModelServer, sampler: ServerSampler) -> None:
    outcome(sampler, 200)
    (call,) = server.calls
    assert (call.body["model"], call.body["prompt"]) == ("tiny@1", [3, 1])
    assert call.body["max_tokens"] == 38  # as much as there is room for
    # By the key and the position, not by the tokens before or how many are asked for.
    assert call.body["seed"] == seed_of(request([9, 9], 2))
    assert (call.body["stop_token_ids"], call.body["ignore_eos"]) == ([2, 7], True)
    # vLLM takes those of the model's generation_config.json otherwise.
    distribution = {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    distribution |= {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}
    assert distribution.items() <= call.body.items()


def log_probs(*values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda choice: choice["logprobs"].update(token_logprobs=[*values])


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no_ids": lambda c: c.pop("token_ids"),
    "too_few": log_probs(*[-0.5] * 4),
    "impossible": log_probs(*[-9999.0] * 5),
    "behind_a_stop": lambda c: c["token_ids"].__setitem__(1, 7),
    "abort": lambda c: c.update(finish_reason="abort"),
}


def test_a_reply_is_a_turn_or_a_failure(server: ModelServer, sampler: ServerSampler) -> None:
    turn = outcome(sampler)
    assert (turn.ids.tolist(), turn.log_probs.tolist(), turn.finish) == (IDS, [-0.5] * 5, "length")
    assert (turn.ids.dtype, turn.log_probs.dtype) == (np.int32, np.float32)
    assert outcome(sampler, 6).cause == "too_long"  # the server ended it, at a limit of its own
    assert outcome(sampler, 4).cause == "malformed"
    for name, change in CHANGES.items():
        choice = choice_of([*IDS], [-0.5] * 5, "length")
        change(choice)
        server.script = lambda call, choice=choice: Reply("x", choice=choice)  # type: ignore[misc]
        assert outcome(sampler).cause == ("broken_off" if name == "abort" else "malformed"), name
    # A turn that is nothing but its end has no text.
    server.script = lambda call: Reply("", choice=choice_of([7], [-0.5], "stop"))
    assert outcome(sampler).finish == "stop"
    server.script = lambda call: dataclasses.replace(replied(call), model="tiny@2")
    assert outcome(sampler).cause == "malformed"
    server.script = lambda call: Reply(status=404, text="The model `tiny@1` does not exist.")
    assert outcome(sampler).cause == "request"


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
    others = {"at temperature 1": at_one}
    result = check_log_probs(at + noise, at, others)
    assert result == pytest.approx(np.abs(noise).mean(), rel=1e-3)
    assert check_log_probs(at_one, at_one, others) == 0.0  # both are the same
    for wrong in (at_one + noise, other, np.full_like(at, np.nan)):
        with pytest.raises(InputError):
            check_log_probs(wrong, at, others)
