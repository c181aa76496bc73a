"""Programs of the suite `gpu` with values: what they are given, and that they run."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu_query import ALGORITHMS, EPISODES, HOPS, invented_batch, state_lengths
from benchmarks.gpu_timed import QUICK, timed, with_values
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.hop_batch import HopShape


def test_only_what_is_missing_is_made() -> None:
    there = np.arange(3)
    shape = jax.ShapeDtypeStruct
    given = {
        "there": there,
        "kernel": shape((40, 300), jnp.bfloat16),
        "scale": shape((7,), jnp.float32),
        "adam": {".nu": shape((40, 300), jnp.float32)},
        "count": shape((), jnp.int32),
        "allowed": shape((4,), jnp.bool_),
        "key": shape((), jax.random.key(0).dtype),
    }
    made = with_values(given)
    assert made["there"] is there
    kernel = np.asarray(made["kernel"], np.float32)
    assert abs(kernel.mean()) < 1e-3
    assert kernel.std() == pytest.approx(0.02, rel=0.02)
    assert len(np.unique(kernel[:, 0])) > 35  # rows are not alike
    assert not np.array_equal(kernel[0], kernel[1])
    assert made["scale"].mean() == pytest.approx(1.0, abs=0.03)
    assert not made["adam"][".nu"].any()
    assert made["count"] == 0
    assert made["allowed"].all()
    assert jax.random.bits(made["key"]).shape == ()


def test_invented_episodes_search_as_often_as_they_may() -> None:
    policy = PlackettLuceConfig()
    batch = invented_batch(HopShape(HOPS, 512, 32, 2, 1), policy)
    assert batch.tokens.shape == (EPISODES, HOPS, 512)
    lengths = np.asarray(batch.lengths)
    np.testing.assert_array_equal(lengths.ravel(), state_lengths(EPISODES * HOPS, 512)[0])
    assert (lengths > 0).all()
    assert np.linalg.norm(batch.pool, axis=-1) == pytest.approx(1.0, abs=1e-5)
    assert np.unique(batch.actions[0, 0]).size == policy.passages
    assert batch.log_probs[0, 0] == pytest.approx(-policy.passages * math.log(policy.pool))


def test_a_search_is_timed() -> None:
    (row,) = timed("search", quick=True)
    assert row["value"] > 0
    assert row["unit"] == "ms"
    assert "NOT FINITE" not in row["note"]
    assert row["note"].startswith("compiled in ")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["harr", "language-model"])
def test_updates_and_sampling_are_timed(part: str) -> None:
    rows = list(timed(part, quick=True))
    assert [row["name"].split(", ")[-1] for row in rows] == [name for *_, name in QUICK[part]]
    for row in rows:
        assert row["value"] > 0
        assert "NOT FINITE" not in row["note"]
    if part == "harr":
        assert rows[0]["name"].split(", ")[-1] in ALGORITHMS
    else:
        assert rows[-1]["unit"] == "tokens/s"
