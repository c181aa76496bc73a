"""Dropout and adapters: our masks in torch's and PEFT's models, and on a mesh.

Without either, every family: tests/conformance/test_encoders.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.errors import InputError
from qrag_jax.models.compute.dropout import (
    TokenDropout,
    drop,
    kept_weights,
    map_key,
    row_digests,
    token_digests,
    trunk_keys,
)
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.first_encoder import EncoderConfig, load_encoder, with_new_adapters
from qrag_jax.models.pretrained import ALL_LINEAR, LoadedEncoder, LoraConfig, target_modules
from qrag_jax.runtime import mesh as meshes
from qrag_jax.runtime.mesh import shardings_of
from tests.devices import mesh_of
from tests.support.adapters import with_adapters
from tests.support.parity import check_gradients, gradients_in_files, on_mesh, vectors_and_gradient
from tests.support.small_models import torch_trunk, write_small_model
from tests.support.torch_encoder import embed_rows as their_embed_rows
from tests.support.torch_encoder import model_options

HIDDEN, ATTENTION, ADAPTERS = 0.3, 0.2, 0.3
KEY = jax.random.key(11)
# Rows 1 and 3 are equal; rows 0 and 4 begin alike; the last three are absent.
WIDTH = 9
TOKENS = np.random.default_rng(0).integers(6, 40, (8, WIDTH)).astype(np.int32)
TOKENS[3], TOKENS[4, :4] = TOKENS[1], TOKENS[0, :4]
LENGTHS = np.array([9, 4, 7, 4, 5, 0, 0, 0], np.int32)
ROWS, PRESENT = TokenRows(TOKENS, LENGTHS), int((LENGTHS > 0).sum())
BLOCKS = Blocks((20,), (9,), (5.0,))  # rows do not stand where they stand in TOKENS
# Places of a layer by the numbers of their keys, in the order torch's model drops at them.
ORDER = {"bert": (0, 1, 3), "new": (0, 1, 2, 3), "modernbert": (0, 1, 2)}
RATES = {"hidden_dropout_prob": HIDDEN, "attention_probs_dropout_prob": ATTENTION}
RATES_OF_MODERNBERT = {
    **dict.fromkeys(("embedding_dropout", "mlp_dropout"), HIDDEN),
    "attention_dropout": ATTENTION,
}


def dropping(encoder: TextEncoder) -> Any:
    return dataclasses.replace(encoder, dropout=HIDDEN, attention_dropout=ATTENTION)


@pytest.fixture(scope="module")
def family_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedEncoder]:
    """Small random encoders, whose trunks are those of `torch_trunk`."""
    return {
        family: load_encoder(write_small_model(family, tmp_path_factory.mktemp(family)))
        for family in (*ORDER, "xlm-roberta", "qwen3")
    }


# ---------------------------------------------------------------------- masks

PLACE = np.arange(PRESENT * WIDTH).reshape(PRESENT, WIDTH)  # of the tokens of rows in one block
OF_ROWS = jnp.repeat(row_digests(TOKENS[:PRESENT], LENGTHS[:PRESENT]), WIDTH)
DIGESTS = token_digests(OF_ROWS, jnp.asarray(PLACE.ravel() % WIDTH))


def factors(key: Any, features: int, rate: float) -> np.ndarray:
    """0 or 1/(1-p) for features of tokens: `[B, L, features]`."""
    found = np.asarray(drop(jnp.ones((PLACE.size, features)), key, DIGESTS, rate))
    return found.reshape(PRESENT, WIDTH, features)


def masks(family: str, config: Any) -> Iterator[np.ndarray]:
    """What a trunk multiplies by, place after place."""
    keys = trunk_keys(KEY, config.num_hidden_layers)
    yield factors(keys[0, 0], config.hidden_size, HIDDEN)
    for of_layer in keys[1:]:
        for place in ORDER[family]:
            if place:
                inner = config.intermediate_size if place == 2 else config.hidden_size
                yield factors(of_layer[place], inner, HIDDEN)
            else:
                dropout = TokenDropout(DIGESTS, of_layer, attention=ATTENTION)
                kept = kept_weights(dropout, jnp.asarray(PLACE), config.num_attention_heads)
                assert kept is not None
                yield np.asarray(kept[0], np.float32) / (1 - ATTENTION)


def test_masks_keep_the_share_they_should_and_know_rows_by_content() -> None:
    key = jax.random.key_data(KEY)[:2]
    found = factors(key, 4000, HIDDEN)
    np.testing.assert_allclose(np.unique(found), [0, 1 / (1 - HIDDEN)], rtol=1e-6)
    np.testing.assert_allclose((found == 0).mean(axis=-1), HIDDEN, atol=0.04)  # of every token
    np.testing.assert_array_equal(found[1, : LENGTHS[1]], found[3, : LENGTHS[3]])  # equal rows
    other = factors(key + 1, 4000, HIDDEN)
    both = [(found == 0) & (mask == 0) for mask in (other, np.roll(found, 1, 1), np.roll(found, 1))]
    np.testing.assert_allclose([each.mean() for each in both], HIDDEN**2, atol=0.01)


# ---------------------------------------------------------------------- against torch and PEFT

ALONE, SPLIT = "one device", "scanned layers, in parts on eight devices"


def computed(
    loaded: Any, encoder: TextEncoder, params: Any, cotangents: np.ndarray, where: str
) -> Any:
    """Vectors and the gradient; of scanned layers, their activations are computed again."""
    if where == ALONE:
        found = vectors_and_gradient(encoder, BLOCKS, params, ROWS, cotangents, KEY)
        return jax.tree.map(np.asarray, found)
    mesh = mesh_of(2, 2, 2)
    placed: Any = shardings_of(mesh, loaded.trunk.partition_rules(), loaded.params)
    if isinstance(params, Adapted):
        pairs = shardings_of(mesh, loaded.trunk.partition_rules(), loaded.adapters)
        placed = Adapted(placed, pairs)
    assert sum(not each.is_fully_replicated for each in jax.tree.leaves(placed)) > 6
    other = dataclasses.replace(encoder, module=encoder.module.clone(scanned=True, remat="dots"))
    return on_mesh(mesh, other, BLOCKS, params, placed, ROWS, cotangents, KEY)


@pytest.mark.parametrize(
    ("family", "where"), [*((family, ALONE) for family in ORDER), ("bert", SPLIT)]
)
def test_a_trunk_drops_where_torch_does(family, where, family_bases, monkeypatch) -> None:
    monkeypatch.setattr(meshes, "LEAST_SPLIT", 1)
    model = torch_trunk(family)
    config, weights = model.config, model.state_dict()
    rates = RATES_OF_MODERNBERT if family == "modernbert" else RATES
    model = type(model)(
        type(config)(**(config.to_dict() | rates), attn_implementation="eager"),
        **({} if family == "new" else model_options(family)),
    ).train()
    for name, module in model.named_modules():
        if name.endswith("out_drop"):  # ModernBERT's own has the rate of attention weights
            module.p = HIDDEN
    model.load_state_dict(weights)
    left = masks(family, config)

    def with_our_mask(x, p=0.5, training=True, inplace=False):
        factor = torch.from_numpy(next(left))
        assert training
        assert p == (ATTENTION if x.ndim == 4 else HIDDEN)
        assert x.shape == factor.shape
        return x * factor

    monkeypatch.setattr(torch.nn.functional, "dropout", with_our_mask)
    loaded = family_bases[family]
    encoder, params = dropping(loaded.encoder), loaded.params
    expected = their_embed_rows(model, encoder, TOKENS[:PRESENT], LENGTHS[:PRESENT])
    assert next(left, None) is None  # theirs drops nowhere else
    cotangents = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    (expected * torch.tensor(cotangents[:PRESENT])).sum().backward()
    found, gradient = computed(loaded, encoder, params, cotangents, where)
    np.testing.assert_allclose(found[:PRESENT], expected.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(found[1], found[3], atol=1e-6)  # equal rows, equal masks
    plain, _ = vectors_and_gradient(loaded.encoder, BLOCKS, loaded.params, ROWS, cotangents)
    assert np.abs(found - plain).max() > 1e-2
    ours = tensors_from_params(loaded.table, gradient)
    check_gradients(ours, gradients_in_files(model))


class Masked(torch.nn.Module):
    def __init__(self, mask: np.ndarray) -> None:
        super().__init__()
        self.mask = torch.tensor(mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


@pytest.mark.parametrize("where", [ALONE, SPLIT])
def test_adapters_drop_where_peft_does(where, family_bases, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(meshes, "LEAST_SPLIT", 1)
    peft = pytest.importorskip("peft", reason="peft, the reference for adapters, is missing")
    settings = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=ADAPTERS, target_modules=ALL_LINEAR, init_lora_weights=False
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(torch_trunk("qwen3"), settings)
    model.save_pretrained(tmp_path)
    loaded = with_adapters(family_bases["qwen3"], tmp_path)
    encoder, params = loaded.encoder, Adapted(loaded.params, loaded.adapters)
    assert encoder.lora_dropout == ADAPTERS
    maps = sorted(target_modules(loaded.table, ALL_LINEAR).items())
    together = {part: fused for fused, parts in loaded.trunk.config.FUSED.items() for part in parts}
    keys = trunk_keys(KEY, 2)
    for path, name in maps:
        for layer in range(2):
            module = model.base_model.model.get_submodule(name.format(layer))
            key = map_key(keys[layer + 1], together.get(path[-1], path[-1]))
            module.lora_dropout["default"] = Masked(factors(key, module.in_features, ADAPTERS))
    expected = their_embed_rows(model, encoder, TOKENS[:PRESENT], LENGTHS[:PRESENT])
    cotangents = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    (expected * torch.tensor(cotangents[:PRESENT])).sum().backward()
    found, gradient = computed(loaded, encoder, params, cotangents, where)
    np.testing.assert_allclose(found[:PRESENT], expected.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(found[1], found[3], atol=1e-6)  # equal rows, equal masks
    for path, name in maps:
        for layer in range(2):
            module = model.base_model.model.get_submodule(name.format(layer))
            for ours, theirs in (("lora_a", module.lora_A), ("lora_b", module.lora_B)):
                wanted = theirs["default"].weight.grad.numpy().T
                assert np.abs(wanted).max() > 1e-4
                check_gradients({name: gradient["layers"][path[-1]][ours][layer]}, {name: wanted})


def test_adapters_of_some_targets_change_nothing_at_first(family_bases) -> None:
    targets = ("value", "output.dense")  # attention's output as well
    loaded = with_new_adapters(family_bases["xlm-roberta"], LoraConfig(4, 6.0, targets), seed=0)
    maps = loaded.adapters["layers"]
    assert set(maps) == {"value", "attention_output", "output"}
    for leaves in maps.values():
        assert not leaves["lora_b"].any()
        assert 0 < np.abs(leaves["lora_a"]).max() <= leaves["lora_a"].shape[1] ** -0.5
    unknown = LoraConfig(4, 8.0, ("word_embeddings", "c_attn"))
    with pytest.raises(InputError, match=r"lora\.targets.*'word_embeddings'"):
        with_new_adapters(family_bases["bert"], unknown, 0)


def test_a_model_without_dropout_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="dropout"):
        load_encoder(write_small_model("qwen3", tmp_path), EncoderConfig(dropout=0.1))
