"""TRL's own updates of a causal language model beside ours: GRPO's loss, and DPO's of pairs."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer, GRPOTrainer
from trl.trainer.grpo_trainer import add_fused_lm_head

from qrag_jax.learners.config import IPO, PreferenceConfig, TokenGRPOConfig
from qrag_jax.rollouts.trajectories import TokenBatch

Inputs = dict[str, torch.Tensor]
# By loss and whether log-probabilities are averaged. TRL has no IPO of sums.
LOSSES = {(IPO, True): "ipo", ("dpo", False): "sigmoid", ("dpo", True): "sigmoid_norm"}
# TRL's "sigmoid" knows no label smoothing. Its "aot" does, as Mitchell has it; it sorts the margins
# of a batch, which changes nothing where the batch is one pair.
SMOOTHED = "aot"


class TrlLearner:
    """What `GRPOTrainer._compute_loss` reads of a trainer, with a real model."""

    def __init__(
        self, folder: Path, config: TokenGRPOConfig, temperature: float, rate: float
    ) -> None:
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

    def inputs(self, batch: TokenBatch, prompt: int, advantages: np.ndarray, cap: float) -> Inputs:
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

    def loss(self, inputs: Inputs) -> torch.Tensor:
        """The loss, with a graph."""
        return self._own._compute_loss(self, self.module, inputs)

    def gradient(self, inputs: Inputs) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names."""
        self.optimizer.zero_grad()
        loss = self.loss(inputs)
        loss.backward()
        named = self.module.named_parameters()
        return loss.item(), {n: p.grad.numpy() for n, p in named if p.grad is not None}

    def update(self, inputs: Inputs) -> None:
        """One step of AdamW."""
        self.optimizer.zero_grad()
        self.loss(inputs).backward()
        self.optimizer.step()


class TrlPairs:
    """A trainer with a policy and a reference of one architecture."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any
        self.model, self.reference = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)
        )
        self.trainer: Any = DPOTrainer(
            self.model,
            self.reference,
            DPOConfig(
                output_dir=str(folder / "trl"),
                gradient_checkpointing=False,
                max_length=None,
                use_cpu=True,
                bf16=False,
                report_to=[],
            ),
            # It asks for a data set; its loss is given batches of ids.
            train_dataset=Dataset.from_dict({"prompt": ["?"], "chosen": ["!"], "rejected": ["."]}),
            processing_class=tokenizer,
        )
        self.trainer.precompute_ref_logps = True
        self.model.train()

    def load(self, policy: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> None:
        """Gives policy and reference other weights, by Hugging Face's names."""
        for model, tensors in ((self.model, policy), (self.reference, reference)):
            given = {name: torch.tensor(array) for name, array in tensors.items()}
            missing, unknown = model.load_state_dict(given, strict=False)
            assert set(missing) <= {"lm_head.weight"}, missing  # it is the word table
            assert not unknown, unknown

    def inputs(self, batch: TokenBatch, pairs: Sequence[int]) -> Inputs:
        """What the loss takes of some pairs, with log-probabilities by the reference."""
        examples = []
        for pair in pairs:
            winner, loser = (
                batch.tokens[row, : batch.lengths[row]].tolist() for row in (2 * pair, 2 * pair + 1)
            )
            start = int(batch.log_prob_mask[2 * pair].argmax())
            assert winner[:start] == loser[:start]
            examples.append(
                {
                    "prompt_ids": winner[:start],
                    "chosen_ids": winner[start:],
                    "rejected_ids": loser[start:],
                }
            )
        inputs = self.trainer.data_collator.torch_call(examples)
        found = self.trainer.compute_ref_log_probs(self.reference, inputs)
        return inputs | dict(zip(("ref_chosen_logps", "ref_rejected_logps"), found, strict=True))

    def loss(self, inputs: Inputs, config: PreferenceConfig) -> torch.Tensor:
        """The mean loss, with a graph."""
        trainer, count = self.trainer, len(inputs["ref_chosen_logps"])
        trainer.beta, trainer.label_smoothing = config.beta, config.label_smoothing
        if not config.label_smoothing:
            trainer.loss_types = [LOSSES[config.loss, config.averaged]]
            return trainer._compute_loss(self.model, inputs, False)
        assert not config.averaged
        trainer.loss_types = [SMOOTHED]
        each = []
        for pair in range(count):
            one = {name: x[pair::count] for name, x in inputs.items()}
            each.append(trainer._compute_loss(self.model, one, False))
        return torch.stack(each).mean()

    def gradient(
        self, inputs: Inputs, config: PreferenceConfig
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names."""
        self.model.zero_grad()
        loss = self.loss(inputs, config)
        loss.backward()
        named = self.model.named_parameters()
        return loss.item(), {n: p.grad.numpy().copy() for n, p in named if p.grad is not None}

    def metrics(self) -> dict[str, float]:
        """Of its last loss."""
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}
