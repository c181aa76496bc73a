"""Losses and gradients of a token policy beside TRL's `GRPOTrainer`, on stored rollouts.

TRL's trainer is given the stored ids and log-probabilities by its `rollout_func`, and makes
padding, masks, advantages, sampler weights and losses of them by its own code. Both sides then have
the policy that sampled, a policy that has moved on, and a reference.

Where TRL's definition is another one, the test makes both alike, on TRL's side:

- An episode that was cut off: `mask_truncated_completions` takes its tokens away, as we do, but
  leaves its reward in the mean of its group. Here the reward is None, which leaves it out.
- An episode without a reward: TRL gives it an advantage of 0, but counts its tokens and computes
  their KL. Here its mask is 0.
- A group of equal rewards: as before; we leave it out before anything is computed.
- Divisors: "grpo" and "dr_grpo" of TRL count the rows that are masked; ours, the episodes that are
  learned from. Here TRL's loss is multiplied by the one over the other.
- "cispo" of TRL has the divisor of "dapo" only. For "dr_grpo" it is given as `num_items_in_batch`;
  for "grpo", TRL's loss is computed row by row. TRL bounds no ratio below: our `clip_low` is 1.
- The KL: TRL multiplies it by the ratio unless `use_bias_correction_kl` is False (DeepSeek-V3.2,
  arXiv 2512.02556); ours is GRPO's (arXiv 2402.03300, eq. 4), so it is False here.
- The ratio of a sequence: ours is GSPO-token (arXiv 2507.18071, eq. 14), where a token has the
  gradient of its OWN log-probability; TRL's is GSPO, where it has the mean of all. Losses are equal
  always; gradients where the tokens of a row weigh alike, so without sampler weights. With these,
  TRL's loss of tokens is given the old log-probabilities that make its ratios those of eq. 14.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks.tokens import EQUAL_GRADIENT, EQUAL_LOSS, TEMPERATURE, decoder, policy_of
from qrag_jax.algorithms.policy_gradient import AGGREGATIONS
from qrag_jax.learners.token_config import RATIOS, SEQUENCE, TokenGRPOConfig
from qrag_jax.learners.token_policy import Sums, TokenPasses
from qrag_jax.learners.token_update import given_tokens, token_episodes
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape
from tests.learners import stored_rollouts
from tests.learners.stored_rollouts import LONGEST, MEMBERS, PART, SIZE

MOVED, BLOCK = 0.003, 96
CLIPS = {"token": (0.1, 0.15), "sequence": (0.02, 0.03), "cispo": (1.0, 0.15)}


def config_of(aggregation: str, ratio: str, beta: float, *, scaled: bool = True) -> TokenGRPOConfig:
    low, high = CLIPS[ratio]
    return TokenGRPOConfig(
        members=MEMBERS,
        clip_low=low,
        clip_high=high,
        beta=beta,
        aggregation=aggregation,
        ratio=ratio,
        scaled=scaled,
        epochs=2,  # so that π_old is given
        longest=LONGEST,
    )


def tensors(params: Any) -> dict[str, np.ndarray]:
    """By Hugging Face's names."""
    return tensors_from_params(table_of("qwen3"), jax.tree.map(np.asarray, params))


class Ours:
    """Our passes over the batch, by three sets of weights."""

    def __init__(self, loaded: LoadedLanguageModel, batch: TokenBatch) -> None:
        self.loaded, self.batch = loaded, batch
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> np.ndarray:
            noise = draw.normal(0, MOVED, leaf.shape)
            return (np.asarray(leaf) + noise).astype(np.float32)

        self.old: Params = loaded.params
        self.new, self.reference = (jax.tree.map(moved, self.old) for _ in range(2))
        self.shape = choose_shape(batch, BLOCK, MEMBERS)
        policy, _ = policy_of(loaded, config_of("grpo", "token", 0.1))
        self.blocks = token_episodes(policy, batch, self.shape).blocks
        log_probs = jax.jit(TokenPasses(policy).log_probs)
        self.log_probs = {
            name: np.asarray(log_probs(getattr(self, name), None, self.blocks))
            for name in ("old", "new", "reference")
        }
        self._programs: dict[TokenGRPOConfig, Any] = {}

    def sums(
        self, config: TokenGRPOConfig, *, corrected: bool
    ) -> tuple[float, dict[str, np.ndarray], Sums]:
        """The loss, its gradient by Hugging Face's names, and the sums."""
        policy, _ = policy_of(self.loaded, config)
        episodes = token_episodes(policy, self.batch, self.shape)
        given, divisor, _ = given_tokens(policy, episodes)
        given = given._replace(old=self.log_probs["old"], reference=self.log_probs["reference"])
        blocks = episodes.blocks
        if not corrected:
            blocks = blocks._replace(sampler=self.log_probs["old"])
        # An aggregation is in the numbers that are given, not in the program.
        key = dataclasses.replace(config, aggregation="grpo")
        program = self._programs.setdefault(key, jax.jit(TokenPasses(policy).gradient))
        gradient, sums = program(self.new, None, blocks, given)
        named = tensors(jax.tree.map(lambda leaf: leaf / divisor, gradient))
        return float(sums.loss / divisor), named, sums


class Both:
    """Both sides, by the same weights."""

    def __init__(self, folder: Path) -> None:
        trl_trainer = pytest.importorskip(
            "tests.learners.trl_trainer", reason="the extra test installs TRL", exc_type=ImportError
        )
        self.loaded = decoder(folder, SIZE)
        self.stored = stored_rollouts.trajectories()
        self.batch = stored_rollouts.batch_of(self.stored)
        self.ours = Ours(self.loaded, self.batch)
        self.learned = stored_rollouts.learned_episodes(self.stored)
        scored = zip(self.stored, self.batch.scored, strict=True)
        rewards = [each.parts[PART] if is_scored else None for each, is_scored in scored]
        rollouts = trl_trainer.Rollouts(self.stored, self.learned, rewards)
        config = config_of("grpo", "token", 0.0)
        self.theirs = trl_trainer.StoredTrainer(
            folder, rollouts, self.loaded.tokenizer, config, TEMPERATURE
        )
        self.theirs.load(tensors(self.ours.old), tensors(self.ours.reference))
        self.inputs = {scaled: self.theirs.inputs(scaled=scaled) for scaled in (True, False)}
        self.theirs.load(tensors(self.ours.new))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    import torch

    # Threads that wait for each other on busy cores make a small model thirty times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Both(tmp_path_factory.mktemp("decoder"))
    torch.set_num_threads(threads)


def check_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(np.abs(each).max()) for each in theirs.values())
    assert largest > 1e-3
    for name, each in theirs.items():
        np.testing.assert_allclose(ours[name], each, atol=EQUAL_GRADIENT * largest, err_msg=name)


@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_loss_and_gradient_are_those_of_trl(
    both: Both, ratio: str, aggregation: str, beta: float, corrected: bool
) -> None:
    config = config_of(aggregation, ratio, beta)
    loss, gradient, _ = both.ours.sums(config, corrected=corrected)
    inputs = both.inputs[True]
    expected, theirs = both.theirs.gradient(inputs, config, corrected=corrected)
    assert loss == pytest.approx(expected, abs=EQUAL_LOSS)
    if ratio == SEQUENCE and corrected:
        of_tokens = dataclasses.replace(config, ratio="token")
        inputs = both.theirs.of_tokens(inputs)
        again, theirs = both.theirs.gradient(inputs, of_tokens, corrected=True)
        assert again == pytest.approx(expected, abs=EQUAL_LOSS)
    check_alike(gradient, theirs)
