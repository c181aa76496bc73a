"""Token updates against TRL's `GRPOTrainer`, `DPOTrainer` and `SFTTrainer`.

TRL's GRPO is given stored ids and log-probabilities by its `rollout_func`, and makes padding,
masks, advantages, sampler weights and losses of them by its own code. Both sides have the policy
that sampled, one that has moved on, and a reference. Where TRL's definition is another one, the
test makes both alike, on TRL's side:

- An episode that was cut off: `mask_truncated_completions` takes its tokens away, as we do, but
  leaves its reward in the mean of its group. Here the reward is None, which leaves it out.
- An episode without a reward: TRL gives it an advantage of 0, but counts its tokens and computes
  their KL. Here its mask is 0.
- Divisors: "grpo" and "dr_grpo" of TRL count the rows that are masked; ours, the scored episodes.
  Here TRL's loss is multiplied by the one over the other. "cispo" of TRL has that of "dapo" only.
- TRL bounds no ratio of "cispo" below: our `clip_low` is 1.
- The KL: TRL multiplies it by the ratio unless `use_bias_correction_kl` is False (DeepSeek-V3.2,
  arXiv 2512.02556); ours is GRPO's (arXiv 2402.03300, eq. 4), so it is False here.
- The ratio of a sequence: ours is GSPO-token (arXiv 2507.18071, eq. 14), where a token has the
  gradient of its OWN log-probability; TRL's is GSPO, where it has the mean of all. Gradients are
  equal where the tokens of a row weigh alike, so without sampler weights.
- Pairs: TRL has IPO of averaged log-probabilities alone, and no temperature. One with a masked row
  is not there for TRL.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.learners.config import PreferenceConfig, SFTConfig, TokenGRPOConfig
from qrag_jax.learners.state import Critic
from qrag_jax.learners.token_policy import pair_episodes, row_log_probs, token_episodes
from qrag_jax.rollouts.trajectories import (
    MASKED,
    REWARD,
    TokenTrajectory,
    choose_shape,
    token_batch,
)
from tests.rollouts.token_setup import CUT_OFF, PAIRS, made_pairs
from tests.support import decoders
from tests.support.decoders import EQUAL_LOSS, TEMPERATURE, by_name, given_tokens, policy_of

STORED = Path(__file__).parent / "golden" / "token_rollouts.json"
MEMBERS, MOVED, BETA = 4, 0.003, 0.2
CUT, FAILED = 2, 7  # episodes
CLIPS = {"token": (0.1, 0.15), "sequence": (0.02, 0.03), "cispo": (1.0, 0.15)}
KEPT = np.setdiff1d(np.arange(PAIRS), [CUT_OFF])
PAIR_SHAPE = choose_shape(made_pairs(), 64, 2, whole=True)
Named = dict[str, np.ndarray]  # arrays by Hugging Face's names


def config_of(aggregation: str, ratio: str, beta: float, *, scaled: bool = True) -> TokenGRPOConfig:
    low, high = CLIPS[ratio]
    clips: dict[str, Any] = {"clip_low": low, "clip_high": high, "ratio": ratio}
    clips |= {"aggregation": aggregation, "scaled": scaled, "beta": beta}
    return TokenGRPOConfig(members=MEMBERS, longest=40, epochs=2, **clips)  # 2: π_old is given


class Ours:
    """Our passes over the stored batch, by three sets of weights.

    The episodes have one or two calls of a tool; one was cut off, one failed, a group is flat. Some
    of the stored log-probabilities are far from the decoder's own, as those of another engine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded = decoders.decoder(folder, decoders.Size(vocab=260, layers=2))
        self.stored = [TokenTrajectory.from_json(each) for each in json.loads(STORED.read_text())]
        self.batch = token_batch(self.stored, members=MEMBERS, truncated=MASKED)
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> np.ndarray:
            noise = draw.normal(0, MOVED, leaf.shape)
            return (np.asarray(leaf) + noise).astype(np.float32)

        self.old = self.loaded.params
        self.new, self.reference = (jax.tree.map(moved, self.old) for _ in range(2))
        self.shape = choose_shape(self.batch, 88, MEMBERS)
        policy = policy_of(self.loaded, config_of("grpo", "token", 0.0))
        self.read = jax.jit(policy.read)
        self.programs: dict[Any, Any] = {}

    def given(self, config: Any, temperature: float = TEMPERATURE) -> Any:
        """The policy, blocks, what their tokens are learned with by three weights, the divisor."""
        policy = policy_of(self.loaded, config, temperature)
        episodes = token_episodes(policy, self.batch, self.shape)
        blocks, given, divisor = given_tokens(policy, episodes)
        weights = (Critic(each) for each in (self.old, self.reference))
        old, reference = (np.asarray(self.read(each, None, blocks)) for each in weights)
        return policy, blocks, given._replace(old=old, reference=reference), float(divisor)

    def gradient(
        self, policy: Any, params: Any, given: Any, divisor: float | None = None
    ) -> tuple[float, Named, Any]:
        """The mean loss, its gradient, and the sums."""
        config = policy.config
        if isinstance(config, TokenGRPOConfig):  # these two are in what is given
            config = dataclasses.replace(config, aggregation="grpo", scaled=True)
        if config not in self.programs:
            self.programs[config] = jax.jit(policy.gradient)
        learned, sums = self.programs[config](Critic(params), None, given)
        divisor = divisor or given[1][1].sum()  # the weights of pairs
        named = by_name(jax.tree.map(lambda leaf: leaf / divisor, learned.tower))
        return float(sums.loss / divisor), named, sums


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    return Ours(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def trl() -> Any:
    pytest.importorskip("trl", reason="the extra test installs TRL", exc_type=ImportError)
    from tests.support import trl

    return trl


def check_alike(ours: tuple[float, Named], theirs: tuple[float, Named]) -> None:
    # A loss near 100 has no fifth digit behind the point in float32.
    assert ours[0] == pytest.approx(theirs[0], abs=EQUAL_LOSS, rel=EQUAL_LOSS / 10)
    assert ours[1].keys() == theirs[1].keys()
    largest = max(float(np.abs(each).max()) for each in theirs[1].values())
    assert largest > 1e-3
    for name, each in theirs[1].items():
        atol = decoders.EQUAL_GRADIENT * largest
        np.testing.assert_allclose(ours[1][name], each, atol=atol, err_msg=name)


# ------------------------------------------------------------------------ GRPO


@pytest.fixture(scope="module")
def grpo(ours: Ours, trl: Any) -> Any:
    """TRL's trainer, by the same weights, and its inputs by whether advantages are scaled."""
    scored = zip(ours.stored, ours.batch.scored, strict=True)
    rewards = [each.parts[REWARD] if is_scored else None for each, is_scored in scored]
    how = config_of("grpo", "token", 0.0), TEMPERATURE
    trainer = trl.StoredTrainer(ours.folder, ours.stored, rewards, *how)
    trl.give(trainer.model, by_name(ours.old))
    trl.give(trainer.reference, by_name(ours.reference))
    inputs = {scaled: trainer.inputs(scaled=scaled) for scaled in (True, False)}
    trl.give(trainer.model, by_name(ours.new))
    return trainer, inputs


@pytest.mark.parametrize(
    ("config", "corrected"),
    [
        (config_of("grpo", "token", 0.0), True),
        (config_of("dr_grpo", "token", BETA, scaled=False), True),
        (config_of("bnpo", "token", BETA), False),
        (config_of("dapo", "token", 0.0, scaled=False), False),
        (config_of("grpo", "sequence", BETA), False),
        (config_of("dapo", "cispo", 0.0), True),
        (config_of("dapo", "cispo", 0.0), False),
    ],
)
def test_loss_and_gradient_of_grpo_are_those_of_trl(
    ours: Ours, grpo: Any, config: TokenGRPOConfig, corrected: bool
) -> None:
    trainer, inputs = grpo
    policy, blocks, given, divisor = ours.given(config)
    assert {*blocks.episode[blocks.valid].tolist()} <= {*range(12)} - {CUT, FAILED}
    if not corrected:
        blocks = blocks._replace(sampler=given.old)
    loss, gradient, sums = ours.gradient(policy, ours.new, (blocks, given), divisor)
    check_alike(
        (loss, gradient), trainer.gradient(inputs[config.scaled], config, corrected=corrected)
    )
    clipped, actions = sums.means["clip_fraction"]
    assert 5 < clipped < actions / 2
    if config.ratio == "token" and config.beta:  # without a KL ours leaves out flat groups
        found = {"entropy": "entropy", "clip_ratio/region_mean": "clip_fraction", "kl": "kl"}
        if corrected:
            found["sampling/importance_sampling_ratio/mean"] = "sampler_weight"
        for name, own in found.items():
            expected = trainer.trainer._metrics["train"][name][-1]
            assert float(sums.metrics()[own]) == pytest.approx(expected, rel=1e-4), name


# ------------------------------------------------------------------------ pairs, imitation


@pytest.fixture(scope="module")
def pairs(ours: Ours, trl: Any) -> Any:
    """TRL's trainer of pairs: a policy that has moved away from the reference."""
    trainer = trl.TrlPairs(ours.folder)
    trl.give(trainer.model, by_name(ours.new))
    trl.give(trainer.reference, by_name(ours.old))
    return trainer


@pytest.mark.parametrize(
    "config",
    [
        PreferenceConfig("dpo", beta=0.1),
        PreferenceConfig("dpo", beta=0.4, label_smoothing=0.2),
        PreferenceConfig("ipo", beta=0.5, averaged=True),
    ],
    ids=["dpo", "dpo smoothed", "ipo averaged"],
)
def test_pairs_are_those_of_trl(ours: Ours, pairs: Any, config: PreferenceConfig) -> None:
    policy, batch = policy_of(ours.loaded, config, 1.0), made_pairs()
    reference = row_log_probs(policy)(ours.old, batch, PAIR_SHAPE)
    episodes = pair_episodes(policy, batch, PAIR_SHAPE, reference)
    blocks, given = jax.tree.map(lambda leaf: leaf[0], (episodes.blocks, episodes.pairs))
    assert (blocks.layout.lengths > 0).any(axis=1).sum() > 1
    loss, gradient, sums = ours.gradient(policy, ours.new, (blocks, given))
    inputs = pairs.inputs(batch, KEPT)
    check_alike((loss, gradient), pairs.gradient(inputs, config))
    if config.averaged or config.label_smoothing:
        return
    for member, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
        own = reference.reshape(-1, 2)[KEPT, member]
        np.testing.assert_allclose(own, inputs[name].numpy(), atol=1e-4)
    metrics, means = pairs.trainer._metrics["train"], sums.metrics()
    for name, mean in {
        "rewards/accuracies": means["accuracy"],
        "rewards/margins": config.beta * means["margin"],
        "logps/chosen": means["log_prob_winner"],
        "logps/rejected": means["log_prob_loser"],
    }.items():
        assert float(mean) == pytest.approx(metrics[name][-1], rel=1e-4), name


def test_imitation_is_that_of_trl(ours: Ours, trl: Any) -> None:
    """With a tool's words among those that are imitated."""
    policy, blocks, given, divisor = ours.given(SFTConfig(), 1.0)
    assert divisor == ours.batch.loss_mask.sum()
    loss, gradient, _ = ours.gradient(policy, ours.old, (blocks, given), divisor)
    expected = trl.imitated(ours.folder, ours.batch)
    check_alike((loss, gradient), expected)
