"""Losses and gradients of a token policy beside TRL's `GRPOTrainer`, on stored rollouts.

TRL's trainer is given the stored ids and log-probabilities by its `rollout_func`, and makes
padding, masks, advantages, sampler weights and losses of them by its own code. Both sides then have
the policy that sampled, a policy that has moved on, and a reference.

Where TRL's definition is another one, the test makes both alike, on TRL's side:

- An episode that was cut off: `mask_truncated_completions` takes its tokens away, as we do, but
  leaves its reward in the mean of its group. Here the reward is None, which leaves it out.
- An episode without a reward: TRL gives it an advantage of 0, but counts its tokens and computes
  their KL. Here its mask is 0.
- Divisors: "grpo" and "dr_grpo" of TRL count the rows that are masked; ours, the scored episodes.
  Here TRL's loss is multiplied by the one over the other.
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

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS
from qrag_jax.learners.token_config import RATIOS, SEQUENCE, TokenGRPOConfig
from qrag_jax.learners.token_losses import PerToken, Sums
from qrag_jax.learners.token_policy import TokenPasses
from qrag_jax.learners.token_update import given_tokens, token_episodes
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import TokenBlocks, choose_shape
from tests.learners import stored_rollouts
from tests.learners.stored_rollouts import LONGEST, MEMBERS, PART, PROMPTS, SIZE
from tests.support.decoders import EQUAL_GRADIENT, EQUAL_LOSS, TEMPERATURE, decoder, policy_of

MOVED, BLOCK, BETA = 0.003, 88, 0.2
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
    """Our passes over the stored batch, by three sets of weights."""

    def __init__(self, loaded: LoadedLanguageModel) -> None:
        self.loaded, self.stored = loaded, stored_rollouts.trajectories()
        self.batch = stored_rollouts.batch_of(self.stored)
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> np.ndarray:
            noise = draw.normal(0, MOVED, leaf.shape)
            return (np.asarray(leaf) + noise).astype(np.float32)

        self.old: Params = loaded.params
        self.new, self.reference = (jax.tree.map(moved, self.old) for _ in range(2))
        self.shape = choose_shape(self.batch, BLOCK, MEMBERS)
        policy, _ = policy_of(loaded, config_of("grpo", "token", 0.0))
        self.log_probs = jax.jit(TokenPasses(policy).log_probs)
        self._given: dict[tuple[str, int, bool, bool], tuple[TokenBlocks, PerToken, float]] = {}
        self._programs: dict[TokenGRPOConfig, Any] = {}

    def given(
        self, config: TokenGRPOConfig, batch: TokenBatch | None = None
    ) -> tuple[TokenBlocks, PerToken, float]:
        """Blocks, what their tokens are learned with by the three sets of weights, the divisor."""
        if batch is not None:
            return self._of_batch(config, batch)
        # All that it depends on.
        key = config.aggregation, config.members, config.scaled, config.beta > 0
        if key not in self._given:
            self._given[key] = self._of_batch(config, self.batch)
        return self._given[key]

    def _of_batch(
        self, config: TokenGRPOConfig, batch: TokenBatch
    ) -> tuple[TokenBlocks, PerToken, float]:
        policy, _ = policy_of(self.loaded, config)
        episodes = token_episodes(policy, batch, self.shape)
        given, divisor, _ = given_tokens(policy, episodes)
        old, reference = (
            np.asarray(self.log_probs(params, None, episodes.blocks))
            for params in (self.old, self.reference)
        )
        return episodes.blocks, given._replace(old=old, reference=reference), float(divisor)

    def sums(
        self, config: TokenGRPOConfig, blocks: TokenBlocks, given: PerToken
    ) -> tuple[Params, Sums]:
        """The gradient of the summed loss by the weights that have moved, and the sums."""
        # An aggregation is in the numbers that are given, not in the program.
        key = dataclasses.replace(config, aggregation="grpo", members=MEMBERS)
        if key not in self._programs:
            policy, _ = policy_of(self.loaded, key)
            self._programs[key] = jax.jit(TokenPasses(policy).gradient)
        return self._programs[key](self.new, None, blocks, given)

    def loss(
        self, config: TokenGRPOConfig, *, corrected: bool
    ) -> tuple[float, dict[str, np.ndarray], Sums]:
        """The loss, its gradient by Hugging Face's names, and the sums."""
        blocks, given, divisor = self.given(config)
        if not corrected:
            blocks = blocks._replace(sampler=given.old)
        gradient, sums = self.sums(config, blocks, given)
        named = tensors(jax.tree.map(lambda leaf: leaf / divisor, gradient))
        return float(sums.loss) / divisor, named, sums


class Theirs:
    """TRL's trainer, by the same weights.

    Attributes:
        inputs: of its loss, by whether advantages are scaled.
    """

    def __init__(self, folder: Path, ours: Ours) -> None:
        module = pytest.importorskip(
            "tests.learners.trl_trainer", reason="the extra test installs TRL", exc_type=ImportError
        )
        scored = zip(ours.stored, ours.batch.scored, strict=True)
        rollouts = module.Rollouts(
            ours.stored,
            np.flatnonzero(ours.batch.scored).tolist(),
            [each.parts[PART] if is_scored else None for each, is_scored in scored],
        )
        config = config_of("grpo", "token", 0.0)
        tokenizer = ours.loaded.tokenizer
        self.trainer = module.StoredTrainer(folder, rollouts, tokenizer, config, TEMPERATURE)
        self.trainer.load(tensors(ours.old), tensors(ours.reference))
        self.inputs = {scaled: self.trainer.inputs(scaled=scaled) for scaled in (True, False)}
        self.trainer.load(tensors(ours.new))

    def metrics(self) -> dict[str, float]:
        """Of its last loss."""
        logged = self.trainer.trainer._metrics["train"]
        return {name: values[-1] for name, values in logged.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoder")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Ours:
    return Ours(decoder(folder, SIZE))


@pytest.fixture(scope="module")
def theirs(folder: Path, ours: Ours) -> Iterator[Theirs]:
    import torch

    # Threads that wait for each other on busy cores make a small model thirty times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Theirs(folder, ours)
    torch.set_num_threads(threads)


def check_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(np.abs(each).max()) for each in theirs.values())
    assert largest > 1e-3
    for name, each in theirs.items():
        np.testing.assert_allclose(ours[name], each, atol=EQUAL_GRADIENT * largest, err_msg=name)


@pytest.mark.parametrize("corrected", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_loss_and_gradient_are_those_of_trl(
    ours: Ours, theirs: Theirs, ratio: str, aggregation: str, beta: float, corrected: bool
) -> None:
    config, inputs = config_of(aggregation, ratio, beta), theirs.inputs[True]
    loss, gradient, _ = ours.loss(config, corrected=corrected)
    expected, of_theirs = theirs.trainer.gradient(inputs, config, corrected=corrected)
    assert loss == pytest.approx(expected, abs=EQUAL_LOSS)
    if ratio == SEQUENCE and corrected:
        of_tokens = dataclasses.replace(config, ratio="token")
        inputs = theirs.trainer.of_tokens(inputs)
        again, of_theirs = theirs.trainer.gradient(inputs, of_tokens, corrected=True)
        assert again == pytest.approx(expected, abs=EQUAL_LOSS)
    check_alike(gradient, of_theirs)


@pytest.mark.parametrize("scaled", [False, True])
def test_advantages_are_those_of_trl(ours: Ours, theirs: Theirs, scaled: bool) -> None:
    blocks, given, _ = ours.given(config_of("grpo", "token", 0.0, scaled=scaled))
    found = np.zeros(len(ours.stored), np.float32)
    found[blocks.episode[blocks.learned]] = np.asarray(given.advantages)[blocks.learned]
    np.testing.assert_allclose(found, theirs.inputs[scaled]["advantages"].numpy(), atol=1e-5)
    learned = stored_rollouts.learned_episodes(ours.stored)
    assert sorted(set(blocks.episode[blocks.learned].tolist())) == learned


def test_metrics_are_those_of_trl(ours: Ours, theirs: Theirs) -> None:
    config = config_of("dapo", "token", BETA)
    _, _, sums = ours.loss(config, corrected=True)
    theirs.trainer.gradient(theirs.inputs[True], config, corrected=True)
    expected, tokens = theirs.metrics(), sums.departure.actions
    found = {
        "entropy": sums.entropy,
        "kl": sums.reference_kl,
        "clip_ratio/region_mean": sums.departure.clipped,
        "sampling/importance_sampling_ratio/mean": sums.correction.weights,
    }
    for name, total in found.items():
        assert float(total / tokens) == pytest.approx(expected[name], rel=1e-4), name


def test_what_is_stored(ours: Ours) -> None:
    """The clip, the bound of the sampler's weights and several blocks are compared, too."""
    assert len({int(np.argmax(row)) for row in ours.batch.log_prob_mask}) == len(PROMPTS)
    assert {len(turns) for each in ours.stored for turns in each.segments} == {2, 3}
    assert ours.batch.scored.sum() == len(ours.stored) - 2
    blocks, given, _ = ours.given(config_of("grpo", "token", 0.0))
    assert (blocks.lengths > 0).any(axis=1).sum() == 2
    assert (given.old - blocks.sampler)[blocks.learned].max() > np.log(2)
    for ratio in RATIOS:
        _, _, sums = ours.loss(config_of("grpo", ratio, 0.0), corrected=True)
        assert 5 < sums.departure.clipped < sums.departure.actions / 2


def test_clipped_tokens_are_those_of_clipped_sequences(ours: Ours) -> None:
    config = config_of("grpo", SEQUENCE, 0.0)
    blocks, given, _ = ours.given(config)
    apart = np.asarray(ours.log_probs(ours.new, None, blocks)) - given.old
    clipped = 0
    for episode in stored_rollouts.learned_episodes(ours.stored):
        own = blocks.learned & (blocks.episode == episode)
        ratio, advantage = np.exp(apart[own].mean()), np.asarray(given.advantages)[own][0]
        is_out = ratio > 1 + config.clip_high if advantage > 0 else ratio < 1 - config.clip_low
        clipped += int(is_out) * int(own.sum())
    _, sums = ours.sums(config, blocks, given)
    assert sums.departure.clipped == clipped > 0


@pytest.mark.parametrize(
    ("aggregation", "beta", "expected"),
    [
        ("grpo", 0.0, 0.01414014),
        ("bnpo", 0.0, -0.02545224),
        ("dapo", BETA, -0.02545224 + 0.06137056),
        ("dr_grpo", 0.0, -0.00795382),
        ("dr_grpo", BETA, -0.00795382 + 0.01917830),
    ],
)
def test_two_members_by_hand(ours: Ours, aggregation: str, beta: float, expected: float) -> None:
    """G = 2, each token's ratio 1.2, of which 1.15 is the most, and weight 3, of which 2 is.

    The stored episodes by twos: of each pair that differs the first has the reward 0 and the second
    1, so advantages are ∓0.5 / (√0.5 + 1e-4) = ∓0.7070068, a token's losses 2 · 1.2 · 0.7070068 =
    1.6968163 and −2 · 1.15 · 0.7070068 = −1.6261156. The first ones have 11 and 13 tokens, the
    second 14 and 13; the 10 scored episodes have 125. The KL with π_ref/π = 2 is 2 − 1 − log 2 =
    0.3068528.
    """
    config = dataclasses.replace(config_of(aggregation, "token", beta), members=2)
    blocks, given, divisor = ours.given(config)
    new = np.asarray(ours.log_probs(ours.new, None, blocks))
    old = new - np.log(np.float32(1.2))
    given = given._replace(old=old, reference=new + np.log(np.float32(2)))
    _, sums = ours.sums(config, blocks._replace(sampler=old - np.log(np.float32(3))), given)
    assert float(sums.loss) / divisor == pytest.approx(expected, abs=1e-5)
    assert (sums.departure.actions, sums.departure.clipped) == (125 if beta else 51, 27)


def test_a_tools_words_have_no_sampler(ours: Ours) -> None:
    config = config_of("dapo", "token", 0.0)
    blocks, given, _ = ours.given(config)
    other = np.where(ours.batch.log_prob_mask, ours.batch.sampler_log_probs, np.nan)
    batch = ours.batch._replace(sampler_log_probs=other.astype(np.float32))
    changed, given_again, _ = ours.given(config, batch)
    expected, found = ours.sums(config, blocks, given), ours.sums(config, changed, given_again)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_tools_word_is_seen_by_what_is_sampled_after_it(ours: Ours) -> None:
    config, episode = config_of("dapo", "token", 0.0), 1
    mask = ours.batch.log_prob_mask[episode]
    place = int(np.flatnonzero(mask[:-1] & ~mask[1:])[0]) + 1  # after the first call of a tool
    tokens = ours.batch.tokens.copy()
    tokens[episode, place] += 1
    old = [
        (blocks, given.old)
        for blocks, given, _ in (
            ours.given(config),
            ours.given(config, ours.batch._replace(tokens=tokens)),
        )
    ]
    own = [each[blocks.valid & (blocks.episode == episode)] for blocks, each in old]
    before = mask[:place].sum()
    assert 0 < before < len(own[0])
    np.testing.assert_allclose(own[1][:before], own[0][:before], atol=1e-6)
    assert (np.abs(own[1] - own[0])[before:] > 1e-4).all()
    others = [each[blocks.valid & (blocks.episode != episode)] for blocks, each in old]
    np.testing.assert_allclose(others[1], others[0], atol=1e-6)
