"""Wrong constants of every algorithm are refused by the names of their fields."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.config import (
    NONE,
    PPOConfig,
    PreferenceConfig,
    SearchGRPOConfig,
    TokenGRPOConfig,
    TokenPPOConfig,
)
from qrag_jax.learners.optimizers import OptimizerConfig

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "named", "fields"),
    [
        (SearchGRPOConfig, "grpo.members", {"members": 1}),
        (SearchGRPOConfig, "grpo.beta", {"beta": -0.1}),
        (SearchGRPOConfig, "grpo.aggregation", {"aggregation": "mean"}),
        (SearchGRPOConfig, "grpo.entropy", {"entropy": INF}),
        (SearchGRPOConfig, "grpo.minibatches", {"minibatches": 0}),
        (TokenGRPOConfig, "grpo.members", {"members": 1}),
        (TokenGRPOConfig, "grpo.ratio", {"ratio": "both"}),
        (TokenGRPOConfig, "grpo.learned", {"learned": "none"}),
        (TokenGRPOConfig, "grpo.clip_low", {"clip_low": -0.1}),
        (TokenGRPOConfig, "grpo.longest", {"longest": 0}),
        (TokenGRPOConfig, "grpo.sampler_cap", {"sampler_cap": 0.5}),
        (PPOConfig, "ppo.lambda_", {"lambda_": 1.5}),
        (PPOConfig, "ppo.critic_learning_rate", {"critic_learning_rate": 0.0}),
        (TokenPPOConfig, "ppo.gamma", {"gamma": 1.5}),
        (TokenPPOConfig, "ppo.minibatches", {"minibatches": 0}),
        (TokenPPOConfig, "ppo.kl_in", {"kl_in": "both"}),
        (TokenPPOConfig, "ppo.kl", {"kl": -0.1}),
        (TokenPPOConfig, "ppo.critic_warmup", {"critic": NONE, "critic_warmup": 2}),
        (TokenPPOConfig, "ppo.sampler_cap", {"sampler_cap": 0.5}),
        (PreferenceConfig, "preference.loss", {"loss": "kto"}),
        (PreferenceConfig, "preference.beta", {"beta": NAN}),
        (PreferenceConfig, "preference.beta", {"beta": 0.0}),
        (PreferenceConfig, "preference.label_smoothing", {"label_smoothing": 0.1}),
        (OptimizerConfig, "optimizer.matrices", {"matrices": "sgd"}),
        (OptimizerConfig, "optimizer.muon_rate", {"muon_rate": 0.0}),
        (OptimizerConfig, "optimizer.schedule", {"schedule": "step"}),
    ],
)
def test_wrong_constants_are_named(kind: type, named: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"config\.{named} "):
        kind(**fields)
