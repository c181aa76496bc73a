"""GRPO's loss against TRL's own, on the same log-probabilities."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.algorithms.policy_gradient import (
    AGGREGATIONS,
    Clip,
    aggregation,
    clipped,
    clipped_weight,
    kl_k3,
    of_sequence,
    weighted_sum,
)

EPISODES, LONGEST, BETA = 6, 5, 0.04
CLIP = Clip(0.2, 0.3)


class Trainer:
    """What `GRPOTrainer._compute_loss` reads of a trainer; the policy's log-probs are given."""

    def __init__(self, log_prob: torch.Tensor, loss: str, level: str) -> None:
        self.loss_type, self.importance_sampling_level, self.beta = loss, level, BETA
        self.epsilon_low, self.epsilon_high = CLIP
        if loss == "cispo":
            self.epsilon_high = 1.0 + CLIP.high  # TRL bounds the ratio itself
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.use_vllm = self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.max_completion_length = LONGEST
        self.args = SimpleNamespace(delta=None, use_bias_correction_kl=False)
        self.model = SimpleNamespace(training=False)
        self.accelerator = SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        self._metrics: Any = {"eval": collections.defaultdict(list)}
        self._log_prob = log_prob

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        return self._log_prob, torch.zeros_like(self._log_prob), None


@pytest.mark.parametrize(
    ("loss", "level"),
    [*((name, "token") for name in AGGREGATIONS), ("cispo", "token"), ("grpo", "sequence")],
)
def test_loss_and_gradient_are_those_of_trl(loss: str, level: str) -> None:
    trl = pytest.importorskip("trl", reason="the extra test installs it")
    rng = np.random.default_rng(0)
    shape = EPISODES, LONGEST
    new = rng.normal(-2, 0.5, shape).astype(np.float32)
    old, reference = (new + rng.normal(0, 0.3, (2, *shape))).astype(np.float32)
    advantages = rng.normal(size=(EPISODES, 1)).astype(np.float32)
    valid = np.arange(LONGEST) < rng.integers(1, LONGEST + 1, EPISODES)[:, None]

    theirs = torch.tensor(new, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": torch.tensor(valid).long(),
        "advantages": torch.tensor(advantages[:, 0]),
        "old_per_token_logps": torch.tensor(old),
        "ref_per_token_logps": torch.tensor(reference),
        "num_items_in_batch": torch.tensor(float(valid.sum())),
    }
    expected = trl.GRPOTrainer._compute_loss(Trainer(theirs, loss, level), None, inputs)
    expected.backward()
    assert theirs.grad is not None

    def ours(log_prob: jax.Array) -> jax.Array:
        if loss == "cispo":
            each = clipped_weight(log_prob, old, advantages, Clip(1.0, CLIP.high))
        elif level == "sequence":
            each = clipped(of_sequence(log_prob, old, valid), old, advantages, CLIP)
        else:
            each = clipped(log_prob, old, advantages, CLIP)
        each += BETA * kl_k3(log_prob, reference)
        weights = aggregation("bnpo" if loss == "cispo" else loss, valid, LONGEST)
        return weighted_sum(each, weights.each) / weights.divisor

    found, gradient = jax.value_and_grad(ours)(jnp.asarray(new))
    assert float(found) == pytest.approx(expected.item(), abs=1e-5)
    np.testing.assert_allclose(gradient, theirs.grad, atol=1e-5)
