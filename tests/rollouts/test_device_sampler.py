"""The sampler on the device, beside Hugging Face's `generate` and the model's own logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from qrag_jax.errors import InputError
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.compute.precision import FUSED, Precision
from qrag_jax.models.heads.language_model import LanguageModel
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.models.trunks import qwen3_cache
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.models.trunks.qwen3_cache import empty_cache
from qrag_jax.models.trunks.qwen3_decode import DecodeCache, decode_cache
from qrag_jax.models.trunks.qwen3_weights import PARTITION_RULES
from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.shared_prefixes import shared_prefixes
from qrag_jax.rollouts.token_sampler import Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.sharding import shardings_of
from tests.models.conftest import write_bpe_tokenizer
from tests.models.test_pretrained_lm import MODELS, torch_model

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


def requests(lengths: Sequence[int], most: int, vocab: int, seed: int = 0) -> list[SampleRequest]:
    draw = np.random.default_rng(seed)
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


def own_log_probs(
    model: LanguageModel, params: Any, request: SampleRequest, sampled: Sampled, temperature: float
) -> np.ndarray:
    """By the logits of the whole row."""
    row = np.concatenate([request.ids, sampled.ids])[None]
    logits = model.logits(params, jnp.asarray(row), jnp.array([row.shape[1]]))
    every = jax.nn.log_softmax(logits[0] / temperature)
    places = np.arange(len(request.ids) - 1, row.shape[1] - 1)
    return np.asarray(every[places, sampled.ids])


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_that_of_hugging_face(name: str, tmp_path: Path) -> None:
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path)
    write_bpe_tokenizer(tmp_path)
    loaded = load_language_model(tmp_path)
    given = requests((3, 17, 8, 1, 23), 12, loaded.model.trunk.config.vocab_size)
    found = DeviceSampler(loaded.model, GREEDY).sample(loaded.params, given)
    for request, ours in zip(given, found, strict=True):
        ids = torch.tensor(request.ids[None].astype(np.int64))
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0, len(request.ids) :]
        assert ours.ids.tolist() == expected.tolist()
        assert ours.finish == ("stop" if ours.ids[-1] in loaded.model.stop_ids else "length")
        again = own_log_probs(loaded.model, loaded.params, request, ours, 1.0)
        np.testing.assert_allclose(ours.log_probs, again, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_draw_nothing(temperature: float) -> None:
    model, params = tiny()
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
    sampler = DeviceSampler(model, dataclasses.replace(GREEDY, temperature=temperature))
    with pytest.raises(InputError, match=r"config\.model\.path"):
        sampler.sample(broken, requests((3, 5), 4, TINY.vocab_size))


@pytest.mark.parametrize("places", [5, 16, 128])
@pytest.mark.parametrize("scanned", [False, True])
def test_log_probs_are_those_of_the_drawn_distribution(
    monkeypatch: pytest.MonkeyPatch, scanned: bool, places: int
) -> None:
    """In blocks of the cache of any size: processors and accelerators have different ones."""
    monkeypatch.setattr(qwen3_cache, "_CPU_BLOCK", places)
    model, params = tiny(scanned=scanned)
    config = SamplingConfig(temperature=0.6, room=40, chunk=4)
    given = requests((5, 13, 2), 9, TINY.vocab_size)
    for request, sampled in zip(
        given, DeviceSampler(model, config).sample(params, given), strict=True
    ):
        assert len(sampled.ids) == 9
        again = own_log_probs(model, params, request, sampled, 0.6)
        np.testing.assert_allclose(sampled.log_probs, again, atol=1e-4)


@pytest.mark.parametrize(
    ("room", "ends"),
    [
        (40, [40]),
        (512, [512]),
        (640, [384, 768]),
        (768, [384, 768]),
        (1024, [512, 1024]),
        (4096, [512, 1024, 2048, 4096]),
        (9344, [3 * 512, 5 * 512, 10 * 512, 19 * 512]),
    ],
)
def test_the_parts_of_an_accelerators_cache(room: int, ends: list[int]) -> None:
    fused = Precision()._replace(attention=FUSED)

    def made() -> DecodeCache:
        cache = empty_cache(Qwen3(TINY, fused, scanned=True), 3, room)
        return decode_cache(cache, jnp.arange(2))

    shapes = jax.eval_shape(made)
    assert list(shapes.ends) == ends
    assert [each.shape[:3] for each in shapes.keys[1]] == [(2, 2, 8)] * len(ends)
    assert [each.shape[2] for each in shapes.values[1]] == [*np.diff([0, *ends])]


def test_draws_have_their_probabilities() -> None:
    model, params = tiny()
    config = SamplingConfig(temperature=0.8, room=8, chunk=4)
    (first,) = requests((4,), 1, TINY.vocab_size)
    keys = np.random.default_rng(1).integers(0, 2**32, (4096, 2), dtype=np.uint32)
    found = DeviceSampler(model, config).sample(params, [first._replace(key=key) for key in keys])
    counts = np.bincount([int(each.ids[0]) for each in found], minlength=TINY.vocab_size)
    logits = model.logits(params, jnp.asarray(first.ids[None]), jnp.array([4]))[0, -1]
    expected = np.asarray(jax.nn.softmax(logits / 0.8), np.float64)
    assert stats.chisquare(counts, len(keys) * expected / expected.sum()).pvalue > 1e-3


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    model, params = tiny(stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=40, chunk=4)
    given = requests((5, 13, 2, 9, 5, 7), 12, TINY.vocab_size)
    given[4] = given[0]._replace(key=given[4].key)  # members of one group
    sampler = DeviceSampler(model, config)
    together = sampler.sample(params, given)
    for request, sampled in zip(given, together, strict=True):
        (alone,) = sampler.sample(params, [request])
        np.testing.assert_array_equal(alone.ids, sampled.ids)
        np.testing.assert_allclose(alone.log_probs, sampled.log_probs, atol=1e-5)
    assert together[0].ids.tolist() != together[4].ids.tolist()
    assert {each.finish for each in together} == {"stop", "length"}
    for each in together:
        assert (each.finish == "stop") == (each.ids[-1] == 2)
        assert 2 not in each.ids[:-1]
    # A turn that goes on from what was drawn draws what the longer turn would have drawn.
    request = given[0]._replace(most=3)
    (begun,) = sampler.sample(params, [request])
    longer = request._replace(ids=np.concatenate([request.ids, begun.ids]), most=9)
    if begun.finish == "length":
        (rest,) = sampler.sample(params, [longer])
        np.testing.assert_array_equal(np.append(begun.ids, rest.ids), together[0].ids)


@pytest.mark.parametrize("scanned", [False, True])
def test_rows_that_go_on_alone_draw_what_they_would_have_drawn(
    monkeypatch: pytest.MonkeyPatch, scanned: bool
) -> None:
    monkeypatch.setattr(qwen3_cache, "_CPU_BLOCK", 8)
    model, params = tiny(scanned=scanned, stop_ids=(2,))
    lengths = np.random.default_rng(3).permutation([1, 2, 2, 3] * 24 + [5, 9, 9, 12] * 8).tolist()
    given = [
        request._replace(most=most)
        for request, most in zip(
            requests([5, 3, 9, 2] * 32, 0, TINY.vocab_size), lengths, strict=True
        )
    ]
    # 128 rows become 32, and these become 8. Where there are 4 from the first, none goes on alone.
    config = SamplingConfig(temperature=1.0, room=40, chunk=4, rows=128)
    together = DeviceSampler(model, config).sample(params, given)
    apart = DeviceSampler(model, dataclasses.replace(config, rows=4)).sample(params, given)
    for one, other in zip(together, apart, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert one.finish == other.finish
    assert sum(len(each.ids) > 6 for each in together) >= 3


def test_prompts_that_share_prefixes_draw_what_each_draws_alone() -> None:
    model, params = tiny(stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=48, chunk=4)
    one, other, *own = requests((21, 18, *(1 + n % 5 for n in range(14))), 12, TINY.vocab_size)
    given = [
        request._replace(ids=np.concatenate([(one, other)[n % 2].ids, request.ids]))
        for n, request in enumerate(own)
    ]
    ids = sorted((each.ids for each in given), key=lambda each: each.tobytes())
    runs = shared_prefixes(ids, 4, config.chunk)
    assert sorted(runs) == [(7, 18), (7, 21)]
    sampler = DeviceSampler(model, config)
    for request, sampled in zip(given, sampler.sample(params, given), strict=True):
        (alone,) = sampler.sample(params, [request])
        np.testing.assert_array_equal(alone.ids, sampled.ids)
        again = own_log_probs(model, params, request, sampled, 1.0)
        np.testing.assert_allclose(sampled.log_probs, again, atol=1e-4)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("count", [3, 21])
def test_devices_draw_what_one_draws(scanned: bool, count: int) -> None:
    model, params = tiny(scanned=scanned, stop_ids=(2,))
    config = SamplingConfig(temperature=1.0, room=24, chunk=4, rows=2)
    given = requests([1 + n % 9 for n in range(count)], 10, TINY.vocab_size)
    for n in range(0, count - 1, 3):  # groups, whose members do not follow each other
        given[n + 1] = given[n]._replace(key=given[n + 1].key)
    mesh = make_mesh((2, 2, 2))
    on_mesh = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    shardings = shardings_of(mesh, PARTITION_RULES, params, params)
    assert any(not each.is_fully_replicated for each in jax.tree.leaves(shardings))
    split = jax.device_put(on_mesh, shardings)
    alone = DeviceSampler(model, config).sample(params, given)
    for one, other in zip(
        alone, DeviceSampler(model, config, mesh).sample(split, given), strict=True
    ):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        assert one.finish == other.finish


def test_a_full_row_ends_by_length() -> None:
    model, params = tiny()
    given = requests((10, 3), 50, TINY.vocab_size)
    config = SamplingConfig(temperature=1.0, room=14, chunk=4)
    found = DeviceSampler(model, config).sample(params, given)
    assert [len(each.ids) for each in found] == [4, 11]
    assert all(each.finish == "length" for each in found)
    assert DeviceSampler(model, config).sample(params, []) == []


@pytest.mark.parametrize("scanned", [False, True])
def test_adapters_are_those_merged(scanned: bool) -> None:
    model, params = tiny(scanned=scanned)
    draw = np.random.default_rng(2)
    adapters = {
        "layers": {
            "query": {
                "lora_a": draw.normal(size=(2, 16, 2)).astype(np.float32),
                "lora_b": draw.normal(size=(2, 2, 32)).astype(np.float32),
            }
        }
    }
    model = dataclasses.replace(model, lora_scale=0.5)
    given = requests((5, 9), 8, TINY.vocab_size)
    sampler = DeviceSampler(model, GREEDY)
    adapted = Adapted(params, adapters)
    found = sampler.sample(adapted, given)
    expected = sampler.sample(merge(adapted, 0.5), given)
    plain = sampler.sample(params, given)
    assert [each.ids.tolist() for each in found] == [each.ids.tolist() for each in expected]
    assert [each.ids.tolist() for each in found] != [each.ids.tolist() for each in plain]


def test_what_has_no_room() -> None:
    model, params = tiny()
    sampler = DeviceSampler(model, SamplingConfig(room=8, chunk=4))
    given = requests((3, 8), 1, TINY.vocab_size)
    with pytest.raises(ValueError, match="request 1 has 8 tokens; there is room for 1 to 7"):
        sampler.sample(params, given)
    with pytest.raises(InputError, match=r"config\.sampling\.temperature is -1"):
        SamplingConfig(temperature=-1)
    with pytest.raises(InputError, match=r"config\.sampling\.room is 0"):
        SamplingConfig(room=0)
