"""PPO of a causal language model with a critic in plain torch: whole rows, padded on the right.

What follows a token of a causal model does not change it. All sums are written out episode by
episode where speed does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import log_softmax, pad
from transformers import AutoModel, AutoModelForCausalLM

from qrag_jax.learners.config import LOSS, REWARD, TokenPPOConfig
from qrag_jax.rollouts.trajectories import TokenBatch


class Given(NamedTuple):
    """What is known of N rows before the first step, all `[N, L]`; mask: what is learned from."""

    ids: torch.Tensor
    mask: torch.Tensor
    sampler: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


class TorchPpo(torch.nn.Module):
    """A policy, its reference, and a critic with a linear map that starts at zero."""

    def __init__(self, folder: Path, config: TokenPPOConfig, temperature: float) -> None:
        super().__init__()
        self.config, self.temperature = config, temperature
        exact: dict[str, Any] = {"dtype": torch.float32}
        self.policy: Any = AutoModelForCausalLM.from_pretrained(folder, **exact)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, **exact)
        self.reference.requires_grad_(False)
        self.critic: Any = AutoModel.from_pretrained(folder, **exact)
        self.head = torch.nn.Linear(self.critic.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def given(self, batch: TokenBatch) -> Given:
        """The batch, and what the networks say of it now."""
        config, ids = self.config, torch.tensor(batch.tokens.astype(np.int64))
        mask, sampler = torch.tensor(batch.loss_mask), torch.tensor(batch.sampler_log_probs)
        with torch.no_grad():
            old, reference = (self._scores(each, ids)[0] for each in (self.policy, self.reference))
            values = self._values(ids)
        rewards, advantages = torch.zeros(mask.shape), torch.zeros(mask.shape)
        if config.kl and config.kl_in == REWARD:
            rewards -= config.kl * (old - reference) * mask
        for row in mask.any(1).nonzero().flatten().tolist():
            places = mask[row].nonzero().flatten().tolist()
            rewards[row, places[-1]] += float(batch.rewards[batch.episode[row], 0])
            next_value = next_advantage = 0.0
            for place in reversed(places):
                value = float(values[row, place])
                error = float(rewards[row, place]) + config.gamma * next_value - value
                next_advantage = error + config.gamma * config.lambda_ * next_advantage
                next_value = value
                advantages[row, place] = next_advantage
        returns = (advantages + values) * mask
        if config.whiten:
            chosen = advantages[mask]
            advantages = (advantages - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8) * mask
        return Given(ids, mask, sampler, old, reference, values, advantages, returns)

    def _scores(self, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities, and entropies of what they are of; 0 for a row's first token."""
        every = log_softmax(model(ids, use_cache=False).logits[:, :-1] / self.temperature, dim=-1)
        own, entropy = every.gather(2, ids[:, 1:, None])[..., 0], -(every.exp() * every).sum(-1)
        return pad(own, (1, 0)), pad(entropy, (1, 0))

    def _values(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.critic(ids, use_cache=False).last_hidden_state
        return pad(self.head(hidden[:, :-1])[..., 0], (1, 0))

    def losses(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean losses of policy and critic, with graphs."""
        config, mask = self.config, given.mask
        new, entropy = self._scores(self.policy, given.ids)
        old = new.detach() if config.updates_per_batch == 1 else given.old
        ratio = torch.exp(new - old)
        bounded = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
        each = -torch.minimum(ratio * given.advantages, bounded * given.advantages)
        each = each * torch.clamp(torch.exp(old - given.sampler), max=config.sampler_cap).detach()
        if config.kl and config.kl_in == LOSS:
            away = given.reference - new
            each = each + config.kl * (torch.exp(away) - away - 1)
        each = each - config.entropy * entropy
        values = self._values(given.ids)
        low, high = given.values - config.value_clip, given.values + config.value_clip
        errors = torch.maximum(
            (values - given.returns) ** 2, (torch.clamp(values, low, high) - given.returns) ** 2
        )
        return each[mask].mean(), 0.5 * errors[mask].mean()

    def learned(self) -> dict[str, Any]:
        """By Hugging Face's names; the critic's behind "critic." and "head."."""
        return {
            name.removeprefix("policy."): each
            for name, each in self.named_parameters()
            if each.requires_grad
        }
