"""TRL's own trainers against ours: GRPO on batches and on stored rollouts, pairs, imitation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.grpo_trainer import add_fused_lm_head

from qrag_jax.learners.config import CISPO, IPO, SEQUENCE, PreferenceConfig, TokenGRPOConfig
from qrag_jax.rollouts.trajectories import TokenBatch, TokenTrajectory

Tensors = Mapping[str, np.ndarray]  # weights by Hugging Face's names
Inputs = dict[str, torch.Tensor]
HERE = {"gradient_checkpointing": False, "use_cpu": True, "bf16": False, "report_to": []}
# By loss and whether log-probabilities are averaged. TRL has no IPO of sums.
LOSSES = {(IPO, True): "ipo", ("dpo", False): "sigmoid", ("dpo", True): "sigmoid_norm"}
# TRL's "sigmoid" knows no label smoothing. Its "aot" does, as Mitchell has it; it sorts the margins
# of a batch, which changes nothing where the batch is one pair.
SMOOTHED = "aot"


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def gradient_of(model: Any, loss: torch.Tensor) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and its gradient by Hugging Face's names."""
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {n: p.grad.numpy().copy() for n, p in named if p.grad is not None}


def give(model: Any, tensors: Tensors) -> None:
    """Gives a model other weights."""
    given = {name: torch.tensor(array) for name, array in tensors.items()}
    missing, unknown = model.load_state_dict(given, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # it is the word table
    assert not unknown, unknown


def grpo_trainer(
    folder: Path, config: TokenGRPOConfig, temperature: float, prompts: int = 1, **functions: Any
) -> Any:
    """TRL's trainer of the model of a folder, as if vLLM sampled with the weights that it has."""
    trainer: Any = GRPOTrainer(
        loaded(folder),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=max(prompts, config.members),
            num_generations=config.members,
            temperature=temperature,
            mask_truncated_completions=True,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=config.sampler_cap,
            use_bias_correction_kl=False,
            **HERE,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["?"] * prompts}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **functions,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.model.train()
    return trainer


def compute_as(trainer: Any, config: TokenGRPOConfig) -> None:
    """Sets what TRL's loss is to be."""
    trainer.loss_type = "cispo" if config.ratio == CISPO else config.aggregation
    trainer.importance_sampling_level = "sequence" if config.ratio == SEQUENCE else "token"
    trainer.epsilon_low, trainer.epsilon_high = config.clip_low, config.clip_high
    if config.ratio == CISPO:
        trainer.epsilon_high = 1.0 + config.clip_high  # TRL bounds the ratio itself
    trainer.beta, trainer.max_completion_length = config.beta, config.longest


class TrlLearner:
    """Learns from batches by TRL's loss and AdamW."""

    def __init__(
        self, folder: Path, config: TokenGRPOConfig, temperature: float, rate: float
    ) -> None:
        self.trainer = grpo_trainer(folder, config, temperature, reward_funcs=lambda **_: [])
        compute_as(self.trainer, config)
        self.module = self.trainer.model
        self.optimizer = torch.optim.AdamW(self.module.parameters(), rate, weight_decay=0.0)

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
            new, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.module, tokens, mask, tokens.shape[1] - prompt
            )
        sampler = torch.tensor(batch.sampler_log_probs[:, prompt:])
        given["importance_sampling_ratio"] = torch.clamp(torch.exp(new - sampler), max=cap)
        return given

    def gradient(self, inputs: Inputs) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names."""
        self.optimizer.zero_grad()
        return gradient_of(self.module, self.trainer._compute_loss(self.module, inputs))

    def update(self, inputs: Inputs) -> None:
        """One step of AdamW."""
        self.optimizer.zero_grad()
        self.trainer._compute_loss(self.module, inputs).backward()
        self.optimizer.step()


class StoredTrainer:
    """A trainer whose policy has generated stored episodes and has moved since.

    Args:
        stored: the episodes, group by group, of one segment each.
        rewards: None: TRL leaves the episode out of its group.
    """

    def __init__(
        self,
        folder: Path,
        stored: Sequence[TokenTrajectory],
        rewards: Sequence[float | None],
        config: TokenGRPOConfig,
        temperature: float,
    ) -> None:
        self.stored, self.rewards, self.reference = stored, rewards, loaded(folder)
        functions: dict[str, Any] = {"rollout_func": self._generated}
        functions["reward_funcs"] = lambda **_: [*rewards]
        self.trainer = grpo_trainer(folder, config, temperature, len(stored), **functions)
        self.model = self.trainer.model
        add_fused_lm_head(self.reference, temperature=temperature)
        self.trainer.ref_model = self.reference

    def _generated(self, prompts: Sequence[str], _: GRPOTrainer) -> dict[str, Any]:
        """A `rollout_func`: what follows the prompt is the completion, tools' words included."""
        assert len(prompts) == len(self.stored)
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        found: dict[str, Any] = {name: [] for name in names}
        for each, reward in zip(self.stored, self.rewards, strict=True):
            (turns,) = each.segments
            ids, log_probs, mask = [], [], []
            for place, turn in enumerate(turns):
                observed = turn.observed.tolist() if place else []
                ids += [*observed, *turn.sampled.tolist()]
                log_probs += [*[0.0] * len(observed), *turn.log_probs.tolist()]
                mask += [*[0] * len(observed), *[int(reward is not None)] * len(turn.sampled)]
            given = turns[0].observed.tolist(), ids, log_probs, mask
            for name, value in zip(names, given, strict=True):
                found[name].append(value)
        return found

    def inputs(self, *, scaled: bool) -> Inputs:
        """What TRL makes of the rollouts, with the policy that it has now as the old one."""
        self.trainer.beta = 1.0  # so that it computes the reference's log-probabilities
        self.trainer.scale_rewards = "group" if scaled else "none"
        prompts = [{"prompt": "?"} for _ in self.stored]
        return self.trainer._generate_and_score_completions(prompts)

    def gradient(
        self, inputs: Inputs, config: TokenGRPOConfig, *, corrected: bool
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names.

        Args:
            corrected: with the weights of the sampler's log-probabilities.
        """
        trainer = self.trainer
        compute_as(trainer, config)
        trainer.use_vllm = corrected
        self.model.zero_grad()
        loss, factor = trainer._compute_loss(self.model, inputs), 1.0
        if config.aggregation in ("grpo", "dr_grpo"):  # by OUR divisor
            factor = len(self.stored) / sum(reward is not None for reward in self.rewards)
        return gradient_of(self.model, factor * loss)


class TrlPairs:
    """A trainer with a policy and a reference of one architecture."""

    def __init__(self, folder: Path) -> None:
        self.model: Any
        self.model, self.reference = loaded(folder), loaded(folder)
        self.trainer: Any = DPOTrainer(
            self.model,
            self.reference,
            DPOConfig(output_dir=str(folder / "trl"), max_length=None, **HERE),
            # It asks for a data set; its loss is given batches of ids.
            train_dataset=Dataset.from_dict({"prompt": ["?"], "chosen": ["!"], "rejected": ["."]}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        self.trainer.precompute_ref_logps = True
        self.model.train()

    def inputs(self, batch: TokenBatch, pairs: Sequence[int]) -> Inputs:
        """What the loss takes of some pairs, with log-probabilities by the reference."""
        examples = []
        for row in (2 * pair for pair in pairs):
            start = int(batch.log_prob_mask[row].argmax())
            winner, loser = (batch.tokens[n, : batch.lengths[n]].tolist() for n in (row, row + 1))
            assert winner[:start] == loser[:start]
            ids = {"prompt": winner[:start], "chosen": winner[start:], "rejected": loser[start:]}
            examples.append({f"{name}_ids": each for name, each in ids.items()})
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
        return gradient_of(self.model, self.loss(inputs, config))


def imitated(folder: Path, batch: TokenBatch) -> tuple[float, dict[str, np.ndarray]]:
    """`SFTTrainer`'s loss of the rows that train, by its own labels and collator."""
    model = loaded(folder)
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
            output_dir=str(folder / "sft"), completion_only_loss=True, max_length=None, **HERE
        ),
        train_dataset=Dataset.from_dict(examples),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    model.train()
    labelled = [trainer.train_dataset[number] for number in range(len(rows))]
    return gradient_of(model, trainer.compute_loss(model, trainer.data_collator(labelled)))
