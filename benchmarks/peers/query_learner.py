"""HARR's GRPO update in PyTorch: Hugging Face's model, PEFT's adapters, AdamW, mini-batches.

It is written from the paper (arXiv 2602.03645, eq. 7 to 12) and shares no formula with ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import peft
import torch
from transformers import AutoModel

from benchmarks.encoder_cases.peer import Batch, mini_batches, model_options, pool
from qrag_jax.learners.optimizers import OptimizerConfig
from qrag_jax.learners.policy_config import GRPOConfig
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.rollouts.hop_batch import HopBatch

ROWS = 8  # of a mini-batch: the fastest on a CPU, where 32 take a fifth longer


class Searches(NamedTuple):
    """All searches of a batch, `[R, …]`: what was drawn from which pool, and its worth."""

    pool: torch.Tensor
    actions: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


class QueryLearner:
    """Adapters of a frozen model, and their optimizer.

    Args:
        folder: the model, in Hugging Face's layout.
        adapters: the first adapters, in PEFT's format.
        ours: our encoder of the same folder: its pooling.
        tau: τ.
    """

    def __init__(
        self,
        folder: Path,
        adapters: Path,
        ours: LoadedEncoder,
        config: GRPOConfig,
        optimizer: OptimizerConfig,
        tau: float,
    ) -> None:
        options = model_options(ours.model_config["model_type"])
        base = AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
        self.model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True).eval()
        self.encoder, self.config, self.tau = ours.encoder, config, tau
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.clip_norm, self.threads = optimizer.clip_norm, torch.get_num_threads()
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def gradients(self, batch: HopBatch) -> float:
        """Computes the gradients of the loss anew; returns the loss."""
        present = np.asarray(batch.lengths) > 0
        tokens, lengths = (np.asarray(each)[present] for each in (batch.tokens, batch.lengths))
        searches = self._searches(batch, present)
        self.optimizer.zero_grad()
        total = 0.0
        for own in mini_batches(tokens, lengths, ROWS, "cpu", sort=True):
            losses = self._losses(own, Searches(*(each[own.rows] for each in searches)))
            loss = (losses * searches.weights[own.rows]).sum()
            loss.backward()
            total += float(loss.detach())
        return total

    def step(self, batch: HopBatch) -> float:
        """One update; returns the loss before it."""
        loss = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self.clip_norm)
        self.optimizer.step()
        return loss

    def _searches(self, batch: HopBatch, present: np.ndarray) -> Searches:
        rewards = torch.from_numpy(np.asarray(batch.episode_rewards)[:, 0])
        groups = rewards.reshape(-1, self.config.members)
        spread = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).reshape(-1, 1)
        there = torch.from_numpy(present)
        # The mean over an episode's searches, then over the episodes.
        weights = 1.0 / (there.sum(dim=1, keepdim=True) * len(there))
        pool, actions, old = (
            torch.from_numpy(np.asarray(each)[present])
            for each in (batch.pool, batch.actions, batch.log_probs)
        )
        of_search = (each.expand(there.shape)[there] for each in (advantages, weights))
        return Searches(pool, actions.long(), old, *of_search)

    def _losses(self, own: Batch, searches: Searches) -> torch.Tensor:
        hidden = self.model(input_ids=own.tokens, attention_mask=own.mask).last_hidden_state
        queries = pool(self.encoder, hidden, own.mask, torch.zeros_like(own.rows))
        scores = torch.einsum("rd,rkd->rk", queries, searches.pool) / self.tau
        log_prob, left = torch.zeros(len(scores)), scores
        for place in searches.actions.T:  # each is drawn from the passages that are left
            chosen = torch.log_softmax(left, dim=1).gather(1, place[:, None])
            log_prob = log_prob + chosen[:, 0]
            left = left.scatter(1, place[:, None], float("-inf"))
        ratio = torch.exp(log_prob - searches.old)
        bounded = ratio.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        return -torch.minimum(ratio * searches.advantages, bounded * searches.advantages)
