"""Scanned layers, as on accelerators, against layers computed one by one, as on CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.dropout import with_key
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows, embed_rows, pull_back
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import LoadedEncoder, with_new_adapters
from qrag_jax.models.trunks.trunk import REMAT_POLICIES
from tests.models.gradients import check_gradients

pytestmark = pytest.mark.long

KEY = jax.random.key(5)
RNG = np.random.default_rng(0)
ROWS = TokenRows(
    RNG.integers(6, 40, (6, 9)).astype(np.int32), np.array([9, 4, 7, 4, 5, 0], np.int32)
)
COTANGENTS = RNG.standard_normal((6, 32)).astype(np.float32)
BLOCKS = Blocks((12, 20), (5, 9), (4.0, 8.0))
FAMILIES = ("bert", "xlm-roberta", "new", "qwen3", "modernbert", "mpnet", "nomic_bert")
QUICK = (
    ("bert", "layers"),
    ("modernbert", "layers"),
    ("mpnet", "layers"),
)  # of whole encoders, and adapters of Qwen3

embed = jax.jit(embed_rows, static_argnums=(0, 1))
gradient = jax.jit(pull_back, static_argnums=(0, 1))


def scanned(encoder: TextEncoder, **updates: Any) -> TextEncoder:
    return dataclasses.replace(encoder, module=encoder.module.clone(scanned=True, **updates))


def check(one: TextEncoder, other: TextEncoder, params: Any, played: Any) -> None:
    """Embeddings of `played` and gradients of `params` are those of the other encoder."""
    expected, found = (embed(encoder, BLOCKS, played, ROWS)[0] for encoder in (one, other))
    assert np.abs(expected).max() > 0.05
    np.testing.assert_allclose(found, expected, atol=1e-5)
    wanted, pulled = (
        gradient(encoder, BLOCKS, params, ROWS, COTANGENTS[:, : one.width])[0]
        for encoder in (one, other)
    )
    check_gradients(pulled, wanted)


@pytest.mark.parametrize(
    ("family", "remat"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in [
            *(("bert", remat) for remat in REMAT_POLICIES),
            *((name, "layers") for name in FAMILIES[1:]),
        ]
    ],
)
def test_whole_encoders(family: str, remat: str, family_bases) -> None:
    loaded: LoadedEncoder = family_bases[family]
    one, params = loaded.encoder, loaded.params
    if family != "qwen3":  # a Qwen3 trunk drops nothing
        one = dataclasses.replace(one, dropout=0.3, attention_dropout=0.2)
        params = with_key(params, KEY)
    check(one, scanned(one, remat=remat), params, params)


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in FAMILIES],
)
def test_adapters(family: str, family_bases) -> None:
    lora = LoraConfig(rank=3, alpha=6.0, dropout=0.4)
    loaded = with_new_adapters(family_bases[family], lora, seed=1)
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.3 * RNG.standard_normal(leaf.shape).astype(np.float32),
        loaded.adapters,
    )
    params = Adapted(loaded.params, noisy, KEY)
    one = loaded.encoder
    check(one, scanned(one), params, attach(params, one.lora_scale))


def test_new_parameters_are_the_same(family_bases) -> None:
    encoder = family_bases["bert"].encoder
    one, other = encoder.init(KEY), scanned(encoder).init(KEY)
    jax.tree.map(np.testing.assert_array_equal, one, other)
