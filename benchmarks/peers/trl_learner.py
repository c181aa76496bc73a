"""TRL's GRPO update of a causal language model: its own loss, its own fused head, torch's AdamW."""

from __future__ import annotations

import collections
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from qrag_jax.learners.token_config import TokenGRPOConfig
from qrag_jax.rollouts.token_batch import TokenBatch


class TrlLearner:
    """What `GRPOTrainer._compute_loss` reads of a trainer, with a real model."""

    def __init__(
        self, folder: Path, config: TokenGRPOConfig, temperature: float, rate: float
    ) -> None:
        from trl import GRPOTrainer
        from trl.trainer.grpo_trainer import add_fused_lm_head

        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        add_fused_lm_head(self.module, temperature=temperature, outputs=("log_probs", "entropy"))
        self.loss_type, self.importance_sampling_level = config.aggregation, config.ratio
        self.beta, self.epsilon_low, self.epsilon_high = 0.0, config.clip_low, config.clip_high
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.use_vllm = self.vllm_importance_sampling_correction = True
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self.max_completion_length = config.longest
        self.current_gradient_accumulation_steps = 1
        self.args = SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1
        )
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            num_processes=1,
            is_main_process=False,  # so that TRL reports its timings to nobody
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            autocast=contextlib.nullcontext,
        )
        self._metrics: Any = collections.defaultdict(lambda: collections.defaultdict(list))
        self._own: Any = GRPOTrainer
        self.optimizer = torch.optim.AdamW(self.module.parameters(), rate, weight_decay=0.0)

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **options: Any) -> Any:
        return self._own._get_per_token_logps_and_entropies(self, *arguments, **options)

    def inputs(
        self, batch: TokenBatch, prompt: int, advantages: np.ndarray, cap: float
    ) -> dict[str, torch.Tensor]:
        """The batch as TRL takes it: prompts and completions padded, a mask of tool tokens.

        The weights of `sampler_weights` are those of log-probabilities by this model's weights.
        """
        tokens = torch.tensor(batch.tokens.astype(np.int64))
        inside = np.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None]
        mask = torch.tensor(inside.astype(np.int64))
        learned = torch.tensor(batch.loss_mask[:, prompt:].astype(np.int64))
        given = {
            "prompt_ids": tokens[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "completion_ids": tokens[:, prompt:],
            "completion_mask": mask[:, prompt:],
            "tool_mask": learned,
            "advantages": torch.tensor(advantages, dtype=torch.float32),
            "num_items_in_batch": learned.sum().float(),
        }
        with torch.no_grad():
            new, _, _ = self._get_per_token_logps_and_entropies(
                self.module, tokens, mask, tokens.shape[1] - prompt
            )
        sampler = torch.tensor(batch.sampler_log_probs[:, prompt:])
        given["importance_sampling_ratio"] = torch.clamp(torch.exp(new - sampler), max=cap)
        return given

    def loss(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss, with a graph."""
        return self._own._compute_loss(self, self.module, inputs)

    def gradient(self, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names."""
        self.optimizer.zero_grad()
        loss = self.loss(inputs)
        loss.backward()
        named = self.module.named_parameters()
        return loss.item(), {n: p.grad.numpy() for n, p in named if p.grad is not None}

    def update(self, inputs: dict[str, torch.Tensor]) -> None:
        """One step of AdamW."""
        self.optimizer.zero_grad()
        self.loss(inputs).backward()
        self.optimizer.step()
