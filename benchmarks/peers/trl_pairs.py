"""TRL's `DPOTrainer` on pairs of token rows: its own collator and loss, torch's AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer

from qrag_jax.learners.preference_config import IPO, PreferenceConfig
from qrag_jax.rollouts.token_batch import TokenBatch

Inputs = dict[str, torch.Tensor]
# By loss and whether log-probabilities are averaged. TRL has no IPO of sums.
LOSSES = {(IPO, True): "ipo", ("dpo", False): "sigmoid", ("dpo", True): "sigmoid_norm"}
# TRL's "sigmoid" knows no label smoothing. Its "aot" does, as Mitchell has it; it sorts the margins
# of a batch, which changes nothing where the batch is one pair.
SMOOTHED = "aot"


class TrlPairs:
    """A trainer with a policy and a reference of one architecture."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, rate: float) -> None:
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
        self.optimizer = torch.optim.AdamW(self.model.parameters(), rate, weight_decay=0.0)

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

    def update(self, inputs: Inputs, config: PreferenceConfig) -> None:
        """One step of AdamW."""
        self.optimizer.zero_grad()
        self.loss(inputs, config).backward()
        self.optimizer.step()

    def metrics(self) -> dict[str, float]:
        """Of its last loss."""
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}
