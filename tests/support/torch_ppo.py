"""PPO of a causal language model with a critic in plain torch, padded as usual.

Prompts are padded on the left and what follows them on the right, so that the logits of the last
places alone are computed. All sums are written out episode by episode where speed does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM

from qrag_jax.learners.config import LOSS, REWARD, TokenPPOConfig
from qrag_jax.rollouts.trajectories import TokenBatch


class Given(NamedTuple):
    """A batch as torch takes it: N episodes whose last C places follow the prompt.

    ids, seen, positions: `[N, P + C]`; mask `[N, C]`, tokens that are learned from; sampler,
    old, reference, values, advantages, returns `[N, C]`.
    """

    ids: torch.Tensor
    seen: torch.Tensor
    positions: torch.Tensor
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
        exact = {"dtype": torch.float32}
        self.policy: Any = AutoModelForCausalLM.from_pretrained(folder, **exact)
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, **exact)
        self.reference.requires_grad_(False)
        self.critic: Any = AutoModel.from_pretrained(folder, **exact)
        self.head = torch.nn.Linear(self.critic.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def given(self, batch: TokenBatch) -> Given:
        """The batch, and what is known before the first step."""
        starts = batch.log_prob_mask.argmax(axis=1)
        prompt, after = int(starts.max()), int((batch.lengths - starts).max())
        count = len(batch.tokens)
        ids, seen = np.zeros((2, count, prompt + after), np.int64)
        mask, sampler = np.zeros((count, after), bool), np.zeros((count, after), np.float32)
        for row, start in enumerate(starts):
            length = int(batch.lengths[row])
            ids[row, prompt - start : prompt - start + length] = batch.tokens[row, :length]
            seen[row, prompt - start : prompt - start + length] = 1
            mask[row, : length - start] = batch.loss_mask[row, start:length]
            sampler[row, : length - start] = batch.sampler_log_probs[row, start:length]
        positions = np.maximum(seen.cumsum(axis=1) - 1, 0)
        inputs = (torch.tensor(each) for each in (ids, seen, positions, mask, sampler))
        found = Given(*inputs, *[torch.zeros(mask.shape)] * 5)
        with torch.no_grad():
            found = found._replace(
                old=self._scores(self.policy, found)[0],
                reference=self._scores(self.reference, found)[0],
                values=self._values(found),
            )
        return self._with_advantages(found, batch)

    def _with_advantages(self, given: Given, batch: TokenBatch) -> Given:
        config, mask = self.config, given.mask
        rewards, advantages = torch.zeros(mask.shape), torch.zeros(mask.shape)
        if config.kl and config.kl_in == REWARD:
            rewards -= config.kl * (given.old - given.reference) * mask
        for row in np.flatnonzero(mask.any(1)):
            places = mask[row].nonzero().flatten().tolist()
            rewards[row, places[-1]] += float(batch.rewards[batch.episode[row], 0])
            next_value = next_advantage = 0.0
            for place in reversed(places):
                value = float(given.values[row, place])
                error = float(rewards[row, place]) + config.gamma * next_value - value
                next_advantage = error + config.gamma * config.lambda_ * next_advantage
                next_value = value
                advantages[row, place] = next_advantage
        returns = (advantages + given.values) * mask
        if config.whiten:
            chosen = advantages[mask]
            advantages = (advantages - chosen.mean()) / torch.sqrt(chosen.var() + 1e-8) * mask
        return given._replace(advantages=advantages, returns=returns)

    def _scores(self, model: Any, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies `[N, C]`."""
        after = given.mask.shape[1]
        logits = model(
            input_ids=given.ids,
            attention_mask=given.seen,
            position_ids=given.positions,
            logits_to_keep=after + 1,
            use_cache=False,
        ).logits[:, :-1]
        every = functional.log_softmax(logits / self.temperature, dim=-1)
        own = every.gather(2, given.ids[:, -after:, None])[..., 0]
        return own, -(every.exp() * every).sum(-1)

    def _values(self, given: Given) -> torch.Tensor:
        inputs = {"attention_mask": given.seen, "position_ids": given.positions}
        hidden = self.critic(given.ids, **inputs, use_cache=False).last_hidden_state
        after = given.mask.shape[1]
        return self.head(hidden[:, -after - 1 : -1])[..., 0]

    def losses(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean losses of policy and critic, with graphs."""
        config, mask = self.config, given.mask
        new, entropy = self._scores(self.policy, given)
        old = new.detach() if config.updates_per_batch == 1 else given.old
        ratio = torch.exp(new - old)
        bounded = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
        each = -torch.minimum(ratio * given.advantages, bounded * given.advantages)
        each = each * torch.clamp(torch.exp(old - given.sampler), max=config.sampler_cap).detach()
        if config.kl and config.kl_in == LOSS:
            away = given.reference - new
            each = each + config.kl * (torch.exp(away) - away - 1)
        each = each - config.entropy * entropy
        values = self._values(given)
        low, high = given.values - config.value_clip, given.values + config.value_clip
        errors = torch.maximum(
            (values - given.returns) ** 2,
            (torch.clamp(values, low, high) - given.returns) ** 2,
        )
        return each[mask].mean(), 0.5 * errors[mask].mean()

    def learned(self) -> dict[str, Any]:
        """By Hugging Face's names; the critic's behind "critic." and "head."."""
        return {
            name.removeprefix("policy."): each
            for name, each in self.named_parameters()
            if each.requires_grad
        }
