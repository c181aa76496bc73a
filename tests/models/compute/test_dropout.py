"""Dropout on adapters: its masks by their definition, and PEFT's model with just these masks."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.models.adapters import ALL_LINEAR, LoraConfig, target_modules
from qrag_jax.models.compute.dropout import TokenDropout, drop, row_digests, token_digests
from qrag_jax.models.compute.linear import Linear, side_by_side
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.pretrained import LoadedEncoder, family_of, with_adapters, with_new_adapters
from tests.models.conftest import torch_family

RATE = 0.3
KEY = jax.random.key(11)
# Rows 1 and 3 are equal; rows 0 and 4 begin alike; row 5 is absent.
TOKENS = np.random.default_rng(0).integers(6, 40, (6, 9)).astype(np.int32)
TOKENS[3], TOKENS[4, :4] = TOKENS[1], TOKENS[0, :4]
LENGTHS = np.array([9, 4, 7, 4, 5, 0], np.int32)
PRESENT = LENGTHS > 0
BLOCKS = Blocks((12, 20), (5, 9), (4.0, 8.0))  # rows do not stand where they stand in TOKENS
FAMILIES = ("bert", "xlm-roberta", "qwen3")


def digest_by_hand(row: list[int], position: int) -> int:
    total = sum((token + 1) * 0x2C9277B5**i for i, token in enumerate(row))
    return (total + position * 0x9E3779B9) % 2**32


def random_words(*shape: int) -> np.ndarray:
    """Keys of maps."""
    return np.random.default_rng(5).integers(2**32, size=(*shape, 2), dtype=np.uint32)


def row(number: int) -> list[int]:
    return TOKENS[number, : LENGTHS[number]].tolist()


# ---------------------------------------------------------------------- digests and masks


def test_digests_are_of_the_content_alone() -> None:
    found = np.asarray(row_digests(jnp.asarray(TOKENS), jnp.asarray(LENGTHS)))
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, [digest_by_hand(row(n), 0) for n in range(6)])
    assert len(set(found.tolist())) == 5  # of six rows two are equal
    wide = np.concatenate([TOKENS, np.full((6, 4), 7, np.int32)], axis=1)[::-1]
    np.testing.assert_array_equal(row_digests(wide, LENGTHS[::-1]), found[::-1])
    positions = np.arange(6, dtype=np.int32)
    expected = [digest_by_hand(row(n), n) for n in range(6)]
    np.testing.assert_array_equal(token_digests(jnp.asarray(found), positions), expected)


def test_zeros_and_lengths_make_rows_differ() -> None:
    tokens = np.zeros((3, 4), np.int32)
    found = row_digests(jnp.asarray(tokens), jnp.array([1, 2, 4]))
    assert len(set(np.asarray(found).tolist())) == 3


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_the_share_dropped_is_the_rate_and_the_mean_is_kept(rate) -> None:
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    tokens = TokenDropout(jnp.arange(40, dtype=jnp.uint32), rate)
    many = jax.jit(jax.vmap(partial(drop, x, dropout=tokens)))(random_words(400))
    many = np.asarray(many)
    zeros = many == 0
    np.testing.assert_allclose(many, np.where(zeros, 0, x / (1 - rate)), rtol=1e-6)
    count = zeros.size
    assert abs(zeros.mean() - rate) < 5 * (rate * (1 - rate) / count) ** 0.5
    # Each entry is dropped now and then, whatever its token and feature.
    assert np.abs(zeros.mean(axis=0) - rate).max() < 6 * (rate * (1 - rate) / 400) ** 0.5
    spread = np.abs(x) * (rate / (1 - rate) / 400) ** 0.5
    assert (np.abs(many.mean(axis=0) - x) <= 6 * spread).all()
    # Tokens, features and keys are dropped independently of each other.
    for pair in (zeros[:, 1:] & zeros[:, :-1], zeros[..., 1:] & zeros[..., :-1]):
        assert abs(pair.mean() - rate**2) < 0.005
    assert abs((zeros[1:] & zeros[:-1]).mean() - rate**2) < 0.005


def test_the_dtype_is_kept() -> None:
    tokens = TokenDropout(jnp.arange(2, dtype=jnp.uint32), 0.5)
    assert drop(jnp.ones((2, 8), jnp.bfloat16), random_words(), tokens).dtype == jnp.bfloat16


# ---------------------------------------------------------------------- against PEFT


def mixed(number: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        number = (number ^ (number >> shift)) * factor % 2**32
    return number


def mask(map_number: int, layer: int, width: int) -> np.ndarray:
    """What one map multiplies its input of TOKENS by, entry by entry: `[B, L, width]`."""
    key = jax.random.fold_in(jax.random.fold_in(KEY, map_number), layer)
    one, two = map(int, jax.random.key_data(key))
    result = np.zeros((*TOKENS.shape, width), np.float32)
    for number, length in enumerate(LENGTHS):
        for position in range(length):
            of_token = mixed(digest_by_hand(row(number), position) ^ one)
            for feature in range(width):
                drawn = mixed((of_token + mixed((feature + two) % 2**32)) % 2**32)
                result[number, position, feature] = drawn / 2**32 >= RATE
    return result / (1 - RATE)


class Masked(torch.nn.Module):
    def __init__(self, mask: np.ndarray) -> None:
        super().__init__()
        self.mask = torch.tensor(mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


def adapted(family: str, family_bases: dict[str, LoadedEncoder], folder) -> tuple[Any, Any, Any]:
    """PEFT's model with our masks in place of its own dropout, our encoder and its adapters."""
    peft = pytest.importorskip("peft", reason="peft, the reference for adapters, is missing")
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=RATE, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(torch_family(family), settings)
    model.save_pretrained(folder)
    loaded = with_adapters(family_bases[family], folder)
    table = family_of(loaded.model_config, "").table
    for number, (_, name) in enumerate(sorted(target_modules(table, ALL_LINEAR).items())):
        for layer in range(2):
            module = model.base_model.model.get_submodule(name.format(layer))
            module.lora_dropout["default"] = Masked(mask(number, layer, module.in_features))
    return model, loaded, loaded.adapters


def their_embeddings(model: Any, encoder: Any) -> torch.Tensor:
    """Pooled by hand, absent rows left out."""
    tokens = torch.tensor(TOKENS[PRESENT], dtype=torch.long)
    for module in model.modules():
        if isinstance(module, Masked):
            module.mask = module.mask[: len(tokens)]  # the absent row comes last
    inside = torch.arange(TOKENS.shape[1]) < torch.tensor(LENGTHS[PRESENT])[:, None]
    hidden = model(input_ids=tokens, attention_mask=inside.long()).last_hidden_state
    if encoder.pooling == "last":
        pooled = hidden[torch.arange(len(tokens)), torch.tensor(LENGTHS[PRESENT] - 1).long()]
    else:
        pooled = (hidden * inside[..., None]).sum(1) / inside.sum(1)[:, None]
    pooled = torch.nn.functional.normalize(pooled) if encoder.normalise else pooled
    return encoder.scale * pooled


jitted = jax.jit(embed_rows, static_argnums=(0, 1))
jitted_pull_back = jax.jit(pull_back, static_argnums=(0, 1))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in FAMILIES],
)
def test_embeddings_and_gradients_are_pefts(family, family_bases, tmp_path) -> None:
    model, loaded, adapters = adapted(family, family_bases, tmp_path)
    encoder = loaded.encoder
    params = Adapted(loaded.params, adapters, KEY)
    stacked = Adapted(
        params.base, jax.tree.map(lambda leaf: leaf[None], params.adapters), KEY[None]
    )
    rows = TOKENS, LENGTHS
    found, _ = jitted(encoder, BLOCKS, encoder.tower(stacked, 0), TokenRows(*rows))
    expected = their_embeddings(model, encoder)
    np.testing.assert_allclose(found[PRESENT], expected.detach().numpy(), atol=1e-5)
    plain = jitted(
        encoder, BLOCKS, encoder.tower(stacked._replace(dropout_key=None), 0), TokenRows(*rows)
    )[0]
    assert np.abs(plain - found).max() > 1e-2
    np.testing.assert_array_equal(found[1], found[3])  # equal rows, equal masks

    cotangents = np.random.default_rng(1).standard_normal(found.shape).astype(np.float32)
    gradient, _ = jitted_pull_back(encoder, BLOCKS, params, TokenRows(*rows), cotangents)
    (expected * torch.tensor(cotangents[PRESENT])).sum().backward()
    table = family_of(loaded.model_config, "").table
    for path, name in target_modules(table, ALL_LINEAR).items():
        for layer in range(2):
            module = model.base_model.model.get_submodule(name.format(layer))
            for ours, theirs in (("lora_a", module.lora_A), ("lora_b", module.lora_B)):
                wanted = theirs["default"].weight.grad.numpy().T
                ours_found = gradient["layers"][path[-1]][ours][layer]
                scale = np.abs(wanted).max()
                assert scale > 1e-4
                np.testing.assert_allclose(ours_found, wanted, atol=1e-4 * scale, err_msg=name)


# ---------------------------------------------------------------------- where it does not act


def test_other_blocks_orders_and_remat_give_the_same(family_bases) -> None:
    loaded = with_new_adapters(family_bases["bert"], LoraConfig(2, 8.0, "all-linear", RATE), 0)
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(
        lambda leaf: 0.3 * rng.standard_normal(leaf.shape).astype(np.float32), loaded.adapters
    )
    params = Adapted(loaded.params, adapters, KEY)
    cotangents = rng.standard_normal((6, 16)).astype(np.float32)
    order = rng.permutation(6)
    wide = np.concatenate([TOKENS, np.full((6, 3), 9, np.int32)], axis=1)
    encoder, other = loaded.encoder, Blocks((72,), (12,), (12.0,))
    layers = dataclasses.replace(encoder, module=encoder.module.clone(remat="layers"))
    expected, _ = jitted_pull_back(encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS), cotangents)
    found, _ = jitted_pull_back(
        layers, other, params, TokenRows(wide[order], LENGTHS[order]), cotangents[order]
    )
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4 * np.abs(two).max())


def test_the_mean_over_many_keys_is_the_undropped_output() -> None:
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    parts = [
        {"kernel": draw(16, 6), "lora_a": draw(16, 2), "lora_b": draw(2, 6)},
        {"kernel": draw(16, 4)},  # has no adapter
        {"kernel": draw(16, 8), "lora_a": draw(16, 2), "lora_b": draw(2, 8)},
    ]
    x, tokens = draw(5, 16), TokenDropout(jnp.arange(5, dtype=jnp.uint32), RATE)

    def with_key(part: dict[str, Any], key: jax.Array) -> dict[str, Any]:
        return part | ({"lora_key": key[None]} if "lora_a" in part else {})

    def apply(params: dict[str, Any], width: int) -> jax.Array:
        return Linear(width, use_bias=False).apply({"params": params}, x, tokens)

    @jax.jit
    @jax.vmap
    def both(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        keyed = [with_key(p, k) for p, k in zip(parts, keys, strict=True)]
        apart = [apply(part, part["kernel"].shape[1]) for part in keyed]
        return apply(side_by_side(keyed), 18), jnp.concatenate(apart, axis=1)

    joined, apart = (np.asarray(found, np.float64) for found in both(random_words(4000, 3)))
    np.testing.assert_allclose(joined, apart, atol=1e-4)
    undropped = np.asarray(apply(side_by_side(parts), 18))
    errors = joined.std(axis=0) / 4000**0.5  # of the mean
    assert (np.abs(joined.mean(axis=0) - undropped) <= 6 * errors + 1e-4).all()
    # Where there is no adapter nothing is dropped, and the two others have masks of their own.
    assert errors[:, 6:10].max() < 1e-6 < 0.01 < errors[:, :6].min()
    moved = joined - joined.mean(axis=0)
    across = np.einsum("ktf,ktg->tfg", moved[..., :6], moved[..., 10:]) / 4000
    allowed = 6 * np.einsum("tf,tg->tfg", *(joined.std(0)[:, i] for i in (slice(6), slice(10, 18))))
    assert (np.abs(across) <= allowed / 4000**0.5).all()


def test_without_a_key_the_program_is_the_same(family_bases) -> None:
    loaded = with_new_adapters(family_bases["bert"], LoraConfig(2, 8.0, "all-linear", RATE), 0)
    without = dataclasses.replace(loaded.encoder, lora_dropout=0.0)
    params = Adapted(loaded.params, loaded.adapters)
    cotangents = np.ones((6, 16), np.float32)
    programs = {
        jitted_pull_back.lower(
            encoder, BLOCKS, params, TokenRows(TOKENS, LENGTHS), cotangents
        ).as_text()
        for encoder in (loaded.encoder, without)
    }
    assert len(programs) == 1
    assert "threefry" not in programs.pop()  # which makes the keys of maps
    dropped = jitted_pull_back.lower(
        loaded.encoder,
        BLOCKS,
        params._replace(dropout_key=KEY),
        TokenRows(TOKENS, LENGTHS),
        cotangents,
    )
    assert "threefry" in dropped.as_text()


def test_rows_without_digests_are_refused(family_bases) -> None:
    loaded = with_new_adapters(family_bases["bert"], LoraConfig(2, 8.0, "all-linear", RATE), 0)
    stacked = jax.tree.map(lambda leaf: leaf[None], loaded.adapters)
    tower = loaded.encoder.tower(Adapted(loaded.params, stacked, KEY[None]), 0)
    with pytest.raises(ValueError, match="rows with digests"):
        loaded.encoder.embed(tower, TOKENS, LENGTHS)
