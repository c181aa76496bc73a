"""TRL's `SFTTrainer` on rows of token ids: its own data set's labels, collator and loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from qrag_jax.rollouts.token_batch import TokenBatch


def imitated(
    folder: Path, tokenizer: PreTrainedTokenizerBase, batch: TokenBatch
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of the rows that train, and its gradient by Hugging Face's names."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [row for row in range(len(batch.lengths)) if batch.loss_mask[row].any()]
    examples = {
        name: [array[row, : batch.lengths[row]].tolist() for row in rows]
        for name, array in (
            ("input_ids", batch.tokens),
            ("completion_mask", batch.loss_mask.astype(int)),
        )
    }
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(folder / "trl"),
            completion_only_loss=True,
            gradient_checkpointing=False,
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict(examples),
        processing_class=tokenizer,
    )
    model.train()
    labelled = [trainer.train_dataset[number] for number in range(len(rows))]
    loss = trainer.compute_loss(model, trainer.data_collator(labelled))
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {n: p.grad.numpy().copy() for n, p in named if p.grad is not None}
