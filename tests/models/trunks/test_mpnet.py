"""MPNet: buckets of distances as in torch, their places in the scores, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.mpnet import MpnetConfig, buckets, by_pairs
from tests.models.trunks.test_published_sizes import MPNET


def test_buckets_are_those_of_torch() -> None:
    expected = MPNetEncoder.relative_position_bucket(torch.arange(-2099, 2100))
    np.testing.assert_array_equal(buckets(2100), expected.numpy())
    assert buckets(1).tolist() == [0]


def test_values_of_distances_stand_at_their_pairs() -> None:
    values = np.random.default_rng(0).normal(size=(13, 3)).astype(np.float32)
    pairs = np.asarray(by_pairs(jnp.asarray(values)))
    assert pairs.shape == (3, 7, 7)
    for query in range(7):
        for key in range(7):
            np.testing.assert_array_equal(pairs[:, query, key], values[key - query + 6])
    program = jax.jit(jax.grad(lambda v: jnp.square(by_pairs(v)).sum())).lower(values).as_text()
    assert "scatter" not in program  # whose sums would have no fixed order on a GPU


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"relative_attention_num_buckets": 64}, "relative_attention_num_buckets 64 is not comput"),
        ({"pad_token_id": 0}, "pad_token_id 0 is not computed here, only 1"),
        ({"hidden_act": "swish2"}, "hidden_act 'swish2' is not one of gelu"),
        ({"max_position_embeddings": 2}, "is 2, but the first 2 positions are unused"),
        ({"num_attention_heads": 7}, "hidden_size 768 is not a multiple of num_attention_heads 7"),
        ({"model_type": "bert"}, "model_type 'bert' is not computed here, only mpnet"),
    ],
    ids=str,
)
def test_models_that_are_not_computed(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        MpnetConfig.from_dict(MPNET | fields, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
