"""Token updates beside TRL's `GRPOTrainer`, `DPOTrainer` and `SFTTrainer`, and PPO beside torch.

TRL's GRPO is given stored ids and log-probabilities by its `rollout_func`, and makes padding,
masks, advantages, sampler weights and losses of them by its own code. Both sides have the policy
that sampled, one that has moved on, and a reference.

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
- Pairs: TRL has IPO of averaged log-probabilities alone, and no temperature. One of weight 0 and
  one with a masked row are not there for TRL.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from qrag_jax.algorithms.policy_gradient import AGGREGATIONS
from qrag_jax.learners.action_loss import PerAction, Sums
from qrag_jax.learners.config import (
    RATIOS,
    SEQUENCE,
    PreferenceConfig,
    SFTConfig,
    TokenGRPOConfig,
    TokenPPOConfig,
)
from qrag_jax.learners.preference_update import PairSums, pair_episodes, pair_loss, row_log_probs
from qrag_jax.learners.state import Critic
from qrag_jax.learners.token_policy import BlockPasses
from qrag_jax.learners.token_update import action_loss, make_token_update, token_episodes
from qrag_jax.models.pretrained import LoadedLanguageModel
from qrag_jax.rollouts.token_blocks import TokenBlocks, choose_shape
from qrag_jax.rollouts.trajectories import MASKED, BatchRules, TokenTrajectory, token_batch
from tests.rollouts.token_setup import CUT_OFF, NO_WEIGHT, PAIRS, made_pairs
from tests.support.decoders import (
    EQUAL_GRADIENT,
    EQUAL_LOSS,
    TEMPERATURE,
    Size,
    by_name,
    decoder,
    given_tokens,
    policy_of,
)
from tests.support.torch_ppo import Rates, TorchPpo

STORED = Path(__file__).parent / "golden" / "token_rollouts.json"
GROUPS, MEMBERS, LONGEST, PART = 3, 4, 40, "answer"
CUT, FAILED = 2, 7  # episodes
FLAT = 2  # a group of equal rewards
MOVED, BLOCK, BETA = 0.003, 88, 0.2
CLIPS = {"token": (0.1, 0.15), "sequence": (0.02, 0.03), "cispo": (1.0, 0.15)}
WEIGHTS = (np.arange(PAIRS) != NO_WEIGHT).astype(np.float32)
KEPT = np.setdiff1d(np.arange(PAIRS), [NO_WEIGHT, CUT_OFF])


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


class Ours:
    """Our passes over the stored batch, by three sets of weights.

    The episodes have one or two calls of a tool; one was cut off, one failed, a group is flat. Some
    of the stored log-probabilities are far from the decoder's own, as those of another engine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: LoadedLanguageModel = decoder(folder, Size(vocab=260, layers=2))
        self.stored = [TokenTrajectory.from_json(each) for each in json.loads(STORED.read_text())]
        self.batch = token_batch(self.stored, BatchRules(MEMBERS, (PART,), MASKED, longest=128))
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> np.ndarray:
            noise = draw.normal(0, MOVED, leaf.shape)
            return (np.asarray(leaf) + noise).astype(np.float32)

        self.old = self.loaded.params
        self.new, self.reference = (jax.tree.map(moved, self.old) for _ in range(2))
        self.shape = choose_shape(self.batch, BLOCK, MEMBERS)
        policy = policy_of(self.loaded, config_of("grpo", "token", 0.0))
        self.log_probs = jax.jit(BlockPasses(policy, partial(action_loss, policy.config)).read)
        self._programs: dict[TokenGRPOConfig, Any] = {}

    def given(self, config: TokenGRPOConfig) -> tuple[TokenBlocks, PerAction, float]:
        """Blocks, what their tokens are learned with by the three sets of weights, the divisor."""
        policy = policy_of(self.loaded, config)
        episodes = token_episodes(policy, self.batch, self.shape)
        blocks, given, divisor = given_tokens(policy, episodes)
        old, reference = (
            np.asarray(self.log_probs(Critic(params), None, blocks))
            for params in (self.old, self.reference)
        )
        return blocks, given._replace(old=old, reference=reference), float(divisor)

    def sums(self, config: TokenGRPOConfig, blocks: TokenBlocks, given: PerAction) -> Any:
        """The gradient of the summed loss by the weights that have moved, and the sums."""
        # An aggregation is in the numbers that are given, not in the program.
        key = dataclasses.replace(config, aggregation="grpo", members=MEMBERS)
        if key not in self._programs:
            policy = policy_of(self.loaded, key)
            self._programs[key] = jax.jit(BlockPasses(policy, partial(action_loss, key)).gradient)
        learned, sums = self._programs[key](Critic(self.new), None, blocks, given)
        return learned.tower, sums

    def loss(
        self, config: TokenGRPOConfig, *, corrected: bool
    ) -> tuple[float, dict[str, np.ndarray], Sums]:
        """The loss, its gradient by Hugging Face's names, and the sums."""
        blocks, given, divisor = self.given(config)
        if not corrected:
            blocks = dataclasses.replace(blocks, sampler=given.old)
        gradient, sums = self.sums(config, blocks, given)
        named = by_name(jax.tree.map(lambda leaf: leaf / divisor, gradient))
        return float(sums.loss) / divisor, named, sums

    @cached_property
    def learned_episodes(self) -> list[int]:
        """By the facts that are known above."""
        left_out = {CUT, FAILED, *range(FLAT * MEMBERS, (FLAT + 1) * MEMBERS)}
        return [number for number in range(len(self.stored)) if number not in left_out]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ours]:
    import torch

    # Threads that wait for each other on busy cores make a small model thirty times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Ours(tmp_path_factory.mktemp("decoder"))
    torch.set_num_threads(threads)


def check_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(np.abs(each).max()) for each in theirs.values())
    assert largest > 1e-3
    for name, each in theirs.items():
        np.testing.assert_allclose(ours[name], each, atol=EQUAL_GRADIENT * largest, err_msg=name)


# ------------------------------------------------------------------------ GRPO


class Theirs:
    """TRL's trainer, by the same weights; its inputs by whether advantages are scaled."""

    def __init__(self, ours: Ours) -> None:
        from tests.support import trl

        scored = zip(ours.stored, ours.batch.scored, strict=True)
        rollouts = trl.Rollouts(
            ours.stored,
            np.flatnonzero(ours.batch.scored).tolist(),
            [each.parts[PART] if is_scored else None for each, is_scored in scored],
        )
        given = ours.loaded.tokenizer, config_of("grpo", "token", 0.0), TEMPERATURE
        self.trainer = trl.StoredTrainer(ours.folder, rollouts, *given)
        self.trainer.load(by_name(ours.old), by_name(ours.reference))
        self.inputs = {scaled: self.trainer.inputs(scaled=scaled) for scaled in (True, False)}
        self.trainer.load(by_name(ours.new))


@pytest.fixture(scope="module")
def theirs(ours: Ours) -> Theirs:
    pytest.importorskip("trl", reason="the extra test installs TRL", exc_type=ImportError)
    return Theirs(ours)


# Each aggregation with each ratio; a KL, and weights for the sampler, with some of them.
CASES = [
    (ratio, aggregation, BETA if ratio == SEQUENCE or (ratio == "token" and n % 2) else 0.0, c)
    for ratio, weighed in zip(RATIOS, ((0, 3), (1, 3), (0, 2)), strict=True)
    for n, aggregation in enumerate(AGGREGATIONS)
    for c in [n in weighed]
]


@pytest.mark.parametrize(("ratio", "aggregation", "beta", "corrected"), CASES)
def test_loss_and_gradient_of_grpo_are_those_of_trl(
    ours: Ours, theirs: Theirs, ratio: str, aggregation: str, beta: float, corrected: bool
) -> None:
    config, inputs = config_of(aggregation, ratio, beta), theirs.inputs[True]
    loss, gradient, sums = ours.loss(config, corrected=corrected)
    expected, of_theirs = theirs.trainer.gradient(inputs, config, corrected=corrected)
    assert loss == pytest.approx(expected, abs=EQUAL_LOSS)
    assert 5 < sums.departure.clipped < sums.departure.actions / 2
    metrics = theirs.trainer.trainer._metrics["train"]
    if ratio == "token":
        found = {"entropy": sums.entropy, "clip_ratio/region_mean": sums.departure.clipped}
        found |= {"kl": sums.reference_kl} if beta else {}
        name = "sampling/importance_sampling_ratio/mean"
        found |= {name: sums.correction.weights} if corrected else {}
        for name, total in found.items():
            if beta:  # without a KL ours leaves out flat groups
                mean = float(total / sums.departure.actions)
                assert mean == pytest.approx(metrics[name][-1], rel=1e-4), name
    if ratio == SEQUENCE and corrected:
        of_tokens = dataclasses.replace(config, ratio="token")
        inputs = theirs.trainer.of_tokens(inputs)
        again, of_theirs = theirs.trainer.gradient(inputs, of_tokens, corrected=True)
        assert again == pytest.approx(expected, abs=EQUAL_LOSS)
    check_alike(gradient, of_theirs)


@pytest.mark.parametrize("scaled", [False, True])
def test_advantages_are_those_of_trl(ours: Ours, theirs: Theirs, scaled: bool) -> None:
    blocks, given, _ = ours.given(config_of("grpo", "token", 0.0, scaled=scaled))
    assert (blocks.lengths > 0).any(axis=1).sum() == 2
    found = np.zeros(len(ours.stored), np.float32)
    found[blocks.episode[blocks.learned]] = np.asarray(given.advantages)[blocks.learned]
    np.testing.assert_allclose(found, theirs.inputs[scaled]["advantages"].numpy(), atol=1e-5)
    assert sorted(set(blocks.episode[blocks.learned].tolist())) == ours.learned_episodes


# ------------------------------------------------------------------------ pairs, imitation


@pytest.fixture(scope="module")
def pairs(ours: Ours) -> Any:
    """TRL's trainer of pairs: a policy that has moved away from the reference."""
    pytest.importorskip("trl", reason="the extra test installs TRL", exc_type=ImportError)
    from tests.support.trl import TrlPairs

    trainer = TrlPairs(ours.folder, ours.loaded.tokenizer)
    trainer.load(by_name(ours.new), by_name(ours.old))
    return trainer


PAIR_SHAPE = choose_shape(made_pairs(), 64, 2, whole=True)


def of_pairs(ours: Ours, config: PreferenceConfig) -> tuple[float, Any, PairSums, np.ndarray]:
    """The loss, its gradient by Hugging Face's names, the sums, and by the reference."""
    policy = policy_of(ours.loaded, config, 1.0)
    batch = made_pairs()
    reference = row_log_probs(policy)(ours.old, batch, PAIR_SHAPE)
    blocks, by_pair = pair_episodes(policy, batch, PAIR_SHAPE, reference, WEIGHTS)
    assert (blocks.lengths > 0).any(axis=1).sum() > 1
    learned, sums = jax.jit(BlockPasses(policy, partial(pair_loss, config)).gradient)(
        Critic(ours.new), None, blocks, by_pair
    )
    named = by_name(jax.tree.map(lambda leaf: leaf / sums.weight, learned.tower))
    return float(sums.loss / sums.weight), named, sums, reference


@pytest.mark.parametrize(
    "config",
    [
        PreferenceConfig("dpo", beta=0.1),
        PreferenceConfig("dpo", beta=0.4, label_smoothing=0.2),
        PreferenceConfig("dpo", beta=0.4, averaged=True),
        PreferenceConfig("ipo", beta=0.5, averaged=True),
    ],
    ids=["dpo", "dpo smoothed", "dpo averaged", "ipo averaged"],
)
def test_pairs_are_those_of_trl(ours: Ours, pairs: Any, config: PreferenceConfig) -> None:
    loss, gradient, sums, reference = of_pairs(ours, config)
    inputs = pairs.inputs(made_pairs(), KEPT)
    expected, of_theirs = pairs.gradient(inputs, config)
    # A loss near 100 has no fifth digit behind the point in float32.
    assert loss == pytest.approx(expected, abs=EQUAL_LOSS, rel=EQUAL_LOSS / 10)
    check_alike(gradient, of_theirs)
    if config.averaged or config.label_smoothing:
        return
    for member, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
        own = reference.reshape(-1, 2)[KEPT, member]
        np.testing.assert_allclose(own, inputs[name].numpy(), atol=1e-4)
    metrics = pairs.metrics()
    for name, total in {
        "rewards/accuracies": sums.right,
        "rewards/margins": config.beta * sums.margin,
        "logps/chosen": sums.winner,
        "logps/rejected": sums.loser,
    }.items():
        assert float(total / sums.pairs) == pytest.approx(metrics[name], rel=1e-4), name


def test_imitation_is_that_of_trl(ours: Ours) -> None:
    """With a tool's words among those that are imitated."""
    pytest.importorskip("trl", reason="the extra test installs TRL", exc_type=ImportError)
    from tests.support.trl import imitated

    policy = policy_of(ours.loaded, SFTConfig(), 1.0)
    episodes = token_episodes(policy, ours.batch, ours.shape)
    blocks, given, divisor = given_tokens(policy, episodes)
    passes = BlockPasses(policy, partial(action_loss, policy.config))
    learned, sums = jax.jit(passes.gradient)(Critic(ours.old), None, blocks, given)
    expected, of_theirs = imitated(ours.folder, ours.loaded.tokenizer, ours.batch)
    assert divisor == ours.batch.loss_mask.sum()
    assert float(sums.loss / divisor) == pytest.approx(expected, abs=EQUAL_LOSS)
    check_alike(by_name(jax.tree.map(lambda leaf: leaf / divisor, learned.tower)), of_theirs)


# ------------------------------------------------------------------------ PPO

RATE = 0.25


def tensors_of(state: Any) -> dict[str, np.ndarray]:
    """Of policy and critic, by the names of `TorchPpo`."""
    critic = state.critic
    assert isinstance(critic, Critic)
    tower = {f"critic.{n.removeprefix('model.')}": a for n, a in by_name(critic.tower).items()}
    head = {"head.weight": np.array(critic.weights)[None], "head.bias": np.array(critic.bias)}
    return {name: np.array(each) for name, each in (by_name(state.params) | tower | head).items()}


@pytest.mark.parametrize(
    ("config", "of_critic", "atol"),
    [
        (TokenPPOConfig(kl=0.1, kl_in="loss", whiten=False, entropy=0.01, gamma=0.99), RATE, 1e-4),
        (TokenPPOConfig(lambda_=0.9, value_clip=0.05, epochs=2, minibatches=2), 0.01, 2e-4),
    ],
    ids=["one step", "minibatches and epochs"],
)
def test_ppo_is_that_of_torch(
    ours: Ours, config: TokenPPOConfig, of_critic: float, atol: float
) -> None:
    """One step twice, so that values, ratios to the reference and returns are not zero."""
    import torch

    plain = optax.sgd(RATE), optax.sgd(of_critic)
    policy = policy_of(ours.loaded, config, optimizer=plain[0], critic=plain[1])
    update, shape = make_token_update(policy), choose_shape(ours.batch, 256, 1)
    state = policy.parts.first_state(policy.shardings, ours.old, 0)
    theirs = TorchPpo(ours.folder, config, TEMPERATURE, Rates(RATE, of_critic))
    optimizers = [
        torch.optim.SGD(each.param_groups[0]["params"], each.param_groups[0]["lr"])
        for each in (theirs.optimizer, theirs.critic_optimizer)
    ]
    half = len(ours.batch.scored) // config.minibatches
    for round_ in range(2 if config.updates_per_batch == 1 else 1):
        before, given = tensors_of(state), theirs.given(ours.batch)
        start = {n: p.detach().clone() for n, p in theirs.named_parameters()}
        losses = []
        for number in range(config.updates_per_batch):
            first = half * (number % config.minibatches)
            part = type(given)(*(each[first : first + half] for each in given))
            losses.append(theirs.gradients(part)[0])
            for optimizer in optimizers:
                optimizer.step()
        state, metrics = update(state, token_episodes(policy, ours.batch, shape))
        after = tensors_of(state)
        expected = dict(zip(("loss", "value_loss"), np.mean(losses, axis=0), strict=True))
        for name, value in expected.items():
            assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=2 * EQUAL_LOSS)
        assert float(metrics["tokens"]) == ours.batch.loss_mask.sum()
        assert (float(metrics["kl"]) != 0) == (round_ > 0)
        for name, each in theirs.named_parameters():
            if name == "lm_head.weight":  # it is the word table
                continue
            rate = of_critic if name.startswith(("critic.", "head.")) else RATE
            move = ((start[name] - each) / rate).detach().numpy()
            own = ((before[name] - after[name]) / rate).reshape(move.shape)
            # A move is a difference of weights near 1, which have 7 digits.
            near = atol * np.abs(move).max() + 1.25e-6 / rate
            np.testing.assert_allclose(own, move, atol=near, err_msg=name)
