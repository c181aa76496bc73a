"""Encoders whose parameters lie in parts on several devices, against one device with all of them.

Rows are dealt out anew, layers are gathered one by one (`fsdp`) or computed in parts (`tensor`):
embeddings and gradients stay the same, with dropout and adapters too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from qrag_jax.learners import placement
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.dropout import with_key
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import (
    CotangentsOf,
    TokenRows,
    embed_and_pull_back,
    embed_rows,
    pull_back,
)
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import LoadedEncoder, with_new_adapters
from qrag_jax.runtime import sharding
from qrag_jax.runtime.sharding import BATCH_AXES, specs_of
from tests.devices import mesh_of
from tests.models.gradients import check_gradients

pytestmark = pytest.mark.long

KEY = jax.random.key(5)
RNG = np.random.default_rng(0)
COUNT = 24  # rows; some are absent, some equal, and all devices have rows of other lengths
TOKENS = RNG.integers(6, 40, (COUNT, 9)).astype(np.int32)
LENGTHS = RNG.integers(0, 10, COUNT).astype(np.int32)
TOKENS[5], LENGTHS[5] = TOKENS[20], LENGTHS[20]
TOKENS[11], LENGTHS[11] = TOKENS[20], LENGTHS[20]
ROWS = TokenRows(TOKENS, LENGTHS)
BLOCKS = Blocks((12, 20), (5, 9), (4.0, 8.0))
MESHES = {"fsdp": (1, 4, 1), "tensor": (1, 1, 2), "both": (1, 2, 2), "all": (2, 2, 2)}


class Found:
    """What embedding and both kinds of gradients give, as NumPy."""

    def __init__(self, results: tuple) -> None:
        (self.embedded, self.count), self.gradient, self.of_own = jax.tree.map(np.asarray, results)


def compute(
    encoder: TextEncoder, played: Any, params: Any, rows: TokenRows, weights: jax.Array
) -> tuple:
    """Embeddings, the gradient for given cotangents, and one for cotangents w·embedding²."""
    cotangents = weights[:, None] * jnp.cos(jnp.arange(encoder.width, dtype=jnp.float32))[None]
    of = CotangentsOf(lambda embedded, w: w[:, None] * jnp.square(embedded), weights)
    gradient, _ = pull_back(encoder, BLOCKS, params, rows, cotangents)
    of_own, embedded, _ = embed_and_pull_back(encoder, BLOCKS, params, rows, of)
    return embed_rows(encoder, BLOCKS, played, rows), gradient, (of_own, embedded)


def alone(encoder: TextEncoder, played: Any, params: Any) -> Found:
    weights = jnp.asarray(np.linspace(-1, 2, COUNT, dtype=np.float32))
    return Found(jax.jit(compute, static_argnums=0)(encoder, played, params, ROWS, weights))


def in_parts(
    encoder: TextEncoder, shape: tuple[int, int, int], params: Any, specs: Any, play: Any
) -> Found:
    """The same on a mesh, where `params` lie as `specs` say."""
    mesh = mesh_of(*shape)
    on_mesh, by_row = encoder.on(mesh), PartitionSpec(BATCH_AXES)

    def on_device(params: Any, rows: TokenRows, weights: jax.Array) -> tuple:
        (embedded, count), gradient, (of_own, again) = compute(
            on_mesh, play(params), params, rows, weights
        )
        own = specs.adapters if isinstance(specs, Adapted) else specs
        own = {name: spec for name, spec in own.items() if name in gradient}
        total = [sharding.sum_over_data(tree, own) for tree in (gradient, of_own)]
        count = jax.lax.psum(count, BATCH_AXES)
        return (embedded, count), total[0], (total[1], again)

    own = specs.adapters if isinstance(specs, Adapted) else specs
    own = {name: spec for name, spec in own.items() if name != "dropout_key"}
    out = ((by_row, PartitionSpec()), own, (own, by_row))
    program = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs, by_row, by_row), out_specs=out, check_vma=False
    )

    def put(leaf: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    weights = np.linspace(-1, 2, COUNT, dtype=np.float32)
    return Found(jax.jit(program)(jax.tree.map(put, params, specs), ROWS, weights))


def check(found: Found, expected: Found) -> None:
    assert np.abs(expected.embedded).max() > 0.05
    np.testing.assert_allclose(found.embedded, expected.embedded, atol=1e-5)
    assert found.count.real <= expected.count.computed
    check_gradients(found.gradient, expected.gradient)
    check_gradients(found.of_own[0], expected.of_own[0])
    np.testing.assert_allclose(found.of_own[1], expected.of_own[1], atol=1e-5)


@pytest.fixture(autouse=True)
def all_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "LEAST_SPLIT", 1)


@pytest.fixture(scope="module")
def expected() -> dict[Any, Found]:
    """What one device gives, by the case."""
    return {}


def cases(*quick: tuple[str, str, bool]) -> pytest.MarkDecorator:
    """Those of the whole grid that are named here; the others are for `make test-slow`."""
    grid = [(family, mesh) for family in ("bert", "qwen3") for mesh in MESHES]
    grid += [(family, "fsdp") for family in ("new", "xlm-roberta", "modernbert", "nomic_bert")]
    grid += [("mpnet", "both")]
    every = [(*case, ahead) for case in grid for ahead in (False, True)]
    marks = [[] if case in quick else [pytest.mark.slow] for case in every]
    return pytest.mark.parametrize(
        ("family", "mesh", "ahead"),
        [pytest.param(*case, marks=mark) for case, mark in zip(every, marks, strict=True)],
    )


def as_placed(encoder: TextEncoder, ahead: bool) -> TextEncoder:
    """Layers that are gathered one ahead (`prefetch`), or in their products."""
    if not ahead:
        return encoder
    module = encoder.module.clone(scanned=True, remat="layers")
    return dataclasses.replace(encoder, module=module)


@cases(("bert", "both", True), ("mpnet", "both", True))
def test_whole_encoders(family: str, mesh: str, ahead: bool, family_bases, expected) -> None:
    loaded: LoadedEncoder = family_bases[family]
    encoder, params = loaded.encoder, loaded.params
    shape = MESHES[mesh]
    shardings = placement.base_shardings(mesh_of(*shape), loaded.partition_rules, params)
    specs = specs_of(shardings)
    split = [spec for spec in jax.tree.leaves(specs) if spec != PartitionSpec()]
    assert len(split) > 6
    if family != "qwen3":  # whose trunk drops nothing
        encoder = dataclasses.replace(encoder, dropout=0.3, attention_dropout=0.2)
        params, specs = with_key(params, KEY), with_key(specs, PartitionSpec())
    if family not in expected:
        expected[family] = alone(encoder, params, params)
    found = in_parts(as_placed(encoder, ahead), shape, params, specs, lambda params: params)
    check(found, expected[family])


@cases(("qwen3", "both", False))
def test_adapters(family: str, mesh: str, ahead: bool, family_bases, expected) -> None:
    lora = LoraConfig(rank=4, alpha=6.0, dropout=0.4)
    loaded = with_new_adapters(family_bases[family], lora, seed=1)
    rng = np.random.default_rng(2)
    noisy = jax.tree.map(
        lambda leaf: leaf + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32),
        loaded.adapters,
    )
    encoder, shape = loaded.encoder, MESHES[mesh]
    params = Adapted(loaded.params, noisy, KEY)
    rules = loaded.partition_rules
    base, adapters = (
        specs_of(placement.base_shardings(mesh_of(*shape), rules, tree))
        for tree in (loaded.params, noisy)
    )
    specs = Adapted(base, adapters, PartitionSpec())

    def play(params: Adapted) -> Any:
        return attach(params, encoder.lora_scale)

    if (family, lora) not in expected:
        expected[family, lora] = alone(encoder, play(params), params)
    found = in_parts(as_placed(encoder, ahead), shape, params, specs, play)
    check(found, expected[family, lora])
