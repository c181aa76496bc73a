"""Log-probabilities of turns by the trainer's weights, beside those of the sampler and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.scored_turns import turn_log_probs
from qrag_jax.rollouts.token_sampler import SamplingConfig
from tests.rollouts.test_device_sampler import requests, tiny


@pytest.mark.parametrize("temperature", [0.6, 0.0])
def test_they_are_those_of_the_sampler(temperature: float) -> None:
    model, params = tiny()
    sampler = DeviceSampler(model, SamplingConfig(temperature=temperature, room=48, chunk=8))
    asked = [
        request._replace(most=most)
        for request, most in zip(requests([5, 9, 1, 14], 11, 7), (3, 11, 7, 1), strict=True)
    ]
    drawn = sampler.sample(params, asked)
    turns = [(request.ids, turn.ids) for request, turn in zip(asked, drawn, strict=True)]
    assert [len(ids) for _, ids in turns] == [3, 11, 7, 1]
    at, at_one = turn_log_probs(model, params, turns, (temperature, 1.0))
    np.testing.assert_allclose(at, np.concatenate([turn.log_probs for turn in drawn]), atol=1e-5)
    assert (np.abs(at - at_one).max() > 0.05) == (temperature == 0.6)
    before, ids = turns[1]
    row = jnp.asarray(np.concatenate([before, ids])[None])
    logits = model.logits(params, row, jnp.array([row.shape[1]]))[0, len(before) - 1 : -1]
    expected = jax.nn.log_softmax(logits)[np.arange(len(ids)), ids]
    first = len(turns[0][1])
    np.testing.assert_allclose(at_one[first : first + len(ids)], expected, atol=1e-5)
