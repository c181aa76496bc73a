"""Layers scanned, computed again, or in parts on several devices: with dropout and with adapters.

Without either, every family: `tests.conformance.test_encoders`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners import placement
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.dropout import with_key
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import with_new_adapters
from qrag_jax.runtime import mesh as meshes
from tests.devices import mesh_of
from tests.support.parity import check_gradients, on_mesh, vectors_and_gradient_apart

KEY = jax.random.key(5)
RNG = np.random.default_rng(0)
COUNT = 24  # rows; some are absent, some equal, and all devices have rows of other lengths
TOKENS = RNG.integers(6, 40, (COUNT, 9)).astype(np.int32)
LENGTHS = RNG.integers(0, 10, COUNT).astype(np.int32)
TOKENS[[5, 11]], LENGTHS[[5, 11]] = TOKENS[20], LENGTHS[20]
ROWS = TokenRows(TOKENS, LENGTHS)
BLOCKS = Blocks((20,), (9,), (5.0,))


@pytest.fixture(scope="module", params=["dropout", "adapters"])
def alone(request, family_bases) -> tuple[Any, TextEncoder, Any, np.ndarray, Any]:
    """An encoder and its parameters, cotangents, and what one device computes layer by layer."""
    if request.param == "dropout":
        loaded = family_bases["bert"]
        encoder = dataclasses.replace(loaded.encoder, dropout=0.3, attention_dropout=0.2)
        params: Any = with_key(loaded.params, KEY)
    else:
        lora = LoraConfig(rank=4, alpha=6.0, dropout=0.4)
        loaded = with_new_adapters(family_bases["qwen3"], lora, seed=1)
        noise = np.random.default_rng(2)
        adapters = jax.tree.map(
            lambda leaf: leaf + 0.3 * noise.standard_normal(leaf.shape).astype(np.float32),
            loaded.adapters,
        )
        encoder, params = loaded.encoder, Adapted(loaded.params, adapters, KEY)
    cotangents = np.random.default_rng(3).normal(size=(COUNT, encoder.width)).astype(np.float32)
    expected = vectors_and_gradient_apart(encoder, BLOCKS, params, ROWS, cotangents)
    assert np.abs(expected[0]).max() > 0.05
    return loaded, encoder, params, cotangents, jax.tree.map(np.asarray, expected)


def check(found: tuple[Any, Any], expected: tuple[np.ndarray, Any]) -> None:
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    check_gradients(jax.tree.map(np.asarray, found[1]), expected[1])


def test_scanned_layers_compute_the_same(alone) -> None:
    _, encoder, params, cotangents, expected = alone
    other = dataclasses.replace(encoder, module=encoder.module.clone(scanned=True, remat="dots"))
    check(vectors_and_gradient_apart(other, BLOCKS, params, ROWS, cotangents), expected)


def test_parts_on_eight_devices_compute_the_same(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meshes, "LEAST_SPLIT", 1)
    loaded, encoder, params, cotangents, expected = alone
    mesh, rules = mesh_of(2, 2, 2), loaded.partition_rules

    whole = NamedSharding(mesh, PartitionSpec())

    def shardings(tree: Any) -> Any:
        return placement.base_shardings(mesh, rules, tree)

    if isinstance(params, Adapted):
        placed: Any = Adapted(shardings(params.base), shardings(params.adapters), whole)
    else:
        placed = with_key(shardings(loaded.params), whole)
    assert sum(not each.is_fully_replicated for each in jax.tree.leaves(placed)) > 6
    found = on_mesh(mesh, encoder, BLOCKS, params, placed, ROWS, cotangents, apart=True)
    check(found, expected)


def test_new_parameters_are_the_same(family_bases) -> None:
    encoder = family_bases["bert"].encoder
    scanned = dataclasses.replace(encoder, module=encoder.module.clone(scanned=True))
    one, two, other = encoder.init(KEY), scanned.init(KEY), encoder.init(jax.random.key(6))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    kernels = (params["layers"]["query"]["kernel"] for params in (one, other))
    assert not np.array_equal(*kernels)
