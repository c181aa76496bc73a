"""TRL's own trainers beside ours: GRPO on batches and on stored rollouts, pairs, imitation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
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


class TrlLearner:
    """What `GRPOTrainer._compute_loss` reads of a trainer, with a real model."""

    def __init__(
        self, folder: Path, config: TokenGRPOConfig, temperature: float, rate: float
    ) -> None:
        self.module = loaded(folder).train()
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
        return gradient_of(self.module, self.loss(inputs))

    def update(self, inputs: Inputs) -> None:
        """One step of AdamW."""
        self.optimizer.zero_grad()
        self.loss(inputs).backward()
        self.optimizer.step()


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """What TRL is told of stored episodes.

    Attributes:
        stored: the episodes, group by group, of one segment each.
        scored: numbers of those that are.
        rewards: None: TRL leaves the episode out of its group.
    """

    stored: Sequence[TokenTrajectory]
    scored: Sequence[int]
    rewards: Sequence[float | None]

    def generated(self, prompts: Sequence[str], _: GRPOTrainer) -> dict[str, Any]:
        """A `rollout_func`: what follows the prompt is the completion, tools' words included."""
        assert len(prompts) == len(self.stored)
        found: dict[str, Any] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        }
        for number, each in enumerate(self.stored):
            (turns,) = each.segments
            ids, log_probs, mask = [], [], []
            for place, turn in enumerate(turns):
                observed = turn.observed.tolist() if place else []
                ids += [*observed, *turn.sampled.tolist()]
                log_probs += [*[0.0] * len(observed), *turn.log_probs.tolist()]
                mask += [*[0] * len(observed), *[int(number in self.scored)] * len(turn.sampled)]
            given = turns[0].observed.tolist(), ids, log_probs, mask
            for name, value in zip(found, given, strict=True):
                found[name].append(value)
        return found

    def scores(self, **_: Any) -> list[float | None]:
        """A reward function."""
        return list(self.rewards)


class StoredTrainer:
    """A trainer whose policy has generated the rollouts and has moved since."""

    def __init__(
        self,
        folder: Path,
        rollouts: Rollouts,
        tokenizer: PreTrainedTokenizerBase,
        config: TokenGRPOConfig,
        temperature: float,
    ) -> None:
        self.rollouts = rollouts
        self.model, self.reference = loaded(folder), loaded(folder)
        count = len(rollouts.stored)
        self.trainer: Any = GRPOTrainer(
            self.model,
            rollouts.scores,
            GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=count,
                num_generations=config.members,
                temperature=temperature,
                mask_truncated_completions=True,
                vllm_importance_sampling_mode="token_truncate",
                vllm_importance_sampling_clip_max=config.sampler_cap,
                use_bias_correction_kl=False,
                **HERE,
            ),
            Dataset.from_dict({"prompt": ["?"] * count}),
            processing_class=tokenizer,
            rollout_func=rollouts.generated,
        )
        add_fused_lm_head(self.reference, temperature=temperature)
        self.trainer.ref_model = self.reference
        self.trainer.current_gradient_accumulation_steps = 1
        # As if vLLM had sampled: the weights of this step are those that it has.
        self.trainer.use_vllm, self.trainer._last_loaded_step = True, 0
        self.model.train()

    def inputs(self, *, scaled: bool) -> Inputs:
        """What TRL makes of the rollouts, with the policy that it has now as the old one."""
        self.trainer.beta = 1.0  # so that it computes the reference's log-probabilities
        self.trainer.scale_rewards = "group" if scaled else "none"
        prompts = [{"prompt": "?"} for _ in self.rollouts.stored]
        return self.trainer._generate_and_score_completions(prompts)

    def gradient(
        self, inputs: Inputs, config: TokenGRPOConfig, *, corrected: bool
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The loss and its gradient by Hugging Face's names.

        Args:
            corrected: with the weights of the sampler's log-probabilities.
        """
        trainer = self.trainer
        trainer.loss_type = "cispo" if config.ratio == CISPO else config.aggregation
        trainer.importance_sampling_level = "sequence" if config.ratio == SEQUENCE else "token"
        trainer.epsilon_low, trainer.epsilon_high = config.clip_low, config.clip_high
        if config.ratio == CISPO:
            trainer.epsilon_high = 1.0 + config.clip_high  # TRL bounds the ratio itself
        trainer.beta, trainer.use_vllm = config.beta, corrected
        trainer.max_completion_length = config.longest
        self.model.zero_grad()
        parts = [
            factor * trainer._compute_loss(self.model, part)
            for part, factor in self._parts(inputs, config)
        ]
        return gradient_of(self.model, torch.stack(parts).sum())

    def _parts(self, inputs: Inputs, config: TokenGRPOConfig) -> Iterator[tuple[Inputs, float]]:
        """Batches and factors; the sum of factor × TRL's loss has OUR divisor."""
        rows, scored = len(self.rollouts.stored), len(self.rollouts.scored)
        if config.ratio == CISPO and config.aggregation == "grpo":
            for number in self.rollouts.scored:
                one = {n: x[number : number + 1] if x.ndim else x for n, x in inputs.items()}
                tokens = (one["completion_mask"] * one["tool_mask"]).sum()
                yield one | {"num_items_in_batch": tokens}, 1.0 / scored
        elif config.ratio == CISPO and config.aggregation == "dr_grpo":
            yield inputs | {"num_items_in_batch": torch.tensor(config.longest * scored)}, 1.0
        elif config.aggregation in ("grpo", "dr_grpo"):
            yield inputs, rows / scored
        else:
            yield inputs, 1.0

    def of_tokens(self, inputs: Inputs) -> Inputs:
        """Inputs whose ratio of each TOKEN is that of its sequence (GSPO-token, eq. 14)."""
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            new, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.model, ids, seen, mask.shape[1]
            )
        apart = ((new - inputs["old_per_token_logps"]) * mask).sum(-1, keepdim=True)
        mean = apart / mask.sum(-1, keepdim=True).clamp(min=1)
        return inputs | {"old_per_token_logps": new - mean}

    def load(self, policy: Tensors, reference: Tensors | None = None) -> None:
        """Gives the policy, and the reference, other weights."""
        give(self.model, policy)
        if reference is not None:
            give(self.reference, reference)


class TrlPairs:
    """A trainer with a policy and a reference of one architecture."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model: Any
        self.model, self.reference = loaded(folder), loaded(folder)
        self.trainer: Any = DPOTrainer(
            self.model,
            self.reference,
            DPOConfig(output_dir=str(folder / "trl"), max_length=None, **HERE),
            # It asks for a data set; its loss is given batches of ids.
            train_dataset=Dataset.from_dict({"prompt": ["?"], "chosen": ["!"], "rejected": ["."]}),
            processing_class=tokenizer,
        )
        self.trainer.precompute_ref_logps = True
        self.model.train()

    def load(self, policy: Tensors, reference: Tensors) -> None:
        """Gives policy and reference other weights, by Hugging Face's names."""
        give(self.model, policy)
        give(self.reference, reference)

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
        return gradient_of(self.model, self.loss(inputs, config))

    def metrics(self) -> dict[str, float]:
        """Of its last loss."""
        return {name: values[-1] for name, values in self.trainer._metrics["train"].items()}


def imitated(
    folder: Path, tokenizer: PreTrainedTokenizerBase, batch: TokenBatch
) -> tuple[float, dict[str, np.ndarray]]:
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
        processing_class=tokenizer,
    )
    model.train()
    labelled = [trainer.train_dataset[number] for number in range(len(rows))]
    return gradient_of(model, trainer.compute_loss(model, trainer.data_collator(labelled)))
