"""Losses and gradients of pairs, and of imitation, beside TRL's `DPOTrainer` and `SFTTrainer`.

Both sides have one model, a reference that is another one, and the same pairs; a pair of weight 0
and one with a masked row are not there for TRL. TRL's mean over a batch is ours with equal weights.

TRL has IPO of averaged log-probabilities alone; that of sums is in `test_preference_update`. Its
label smoothing is compared pair by pair, see `tests.support.trl`. TRL has no temperature.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.learners.preference_config import PreferenceConfig
from qrag_jax.learners.preference_update import PairLoss, PairSums, pair_episodes, row_log_probs
from qrag_jax.learners.token_config import SFTConfig
from qrag_jax.learners.token_policy import BlockPasses, TokenPasses
from qrag_jax.learners.token_update import given_tokens, token_episodes
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, table_of
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_blocks import choose_shape
from tests.learners.pair_updates import kept, made_weights
from tests.rollouts.pair_rows import made_pairs
from tests.support.decoders import EQUAL_GRADIENT, EQUAL_LOSS, Size, decoder, policy_of

MOVED, BLOCK = 0.003, 64
WEIGHTS = np.sign(made_weights())  # 1, and 0 for the pair of weight 0


def tensors(params: Any) -> dict[str, np.ndarray]:
    """By Hugging Face's names."""
    return tensors_from_params(table_of("qwen3"), jax.tree.map(np.asarray, params))


class Ours:
    """Our passes over the pairs, by weights that are not those of the reference."""

    def __init__(self, loaded: LoadedLanguageModel) -> None:
        self.loaded, self.batch = loaded, made_pairs()
        draw = np.random.default_rng(0)

        def moved(leaf: Any) -> np.ndarray:
            noise = draw.normal(0, MOVED, leaf.shape)
            return (np.asarray(leaf) + noise).astype(np.float32)

        self.reference: Params = loaded.params
        self.params: Params = jax.tree.map(moved, self.reference)
        self.shape = choose_shape(self.batch, BLOCK, 2, whole=True)

    def of_reference(self, config: PreferenceConfig) -> np.ndarray:
        """Log-probabilities of the episodes by the reference."""
        policy, _ = policy_of(self.loaded, config, 1.0)
        return row_log_probs(policy)(self.reference, self.batch, self.shape)

    def loss(self, config: PreferenceConfig) -> tuple[float, dict[str, np.ndarray], PairSums]:
        """The loss, its gradient by Hugging Face's names, and the sums."""
        policy, _ = policy_of(self.loaded, config, 1.0)
        reference = self.of_reference(config)
        blocks, pairs = pair_episodes(policy, self.batch, self.shape, reference, WEIGHTS)
        assert (blocks.lengths > 0).any(axis=1).sum() > 1
        passes = BlockPasses(policy, PairLoss(config))
        gradient, sums = jax.jit(passes.gradient)(self.params, None, blocks, pairs)
        named = tensors(jax.tree.map(lambda leaf: leaf / sums.weight, gradient))
        return float(sums.loss / sums.weight), named, sums


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoder")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Ours:
    return Ours(decoder(folder, Size(vocab=260, layers=2)))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    # Threads that wait for each other on busy cores make a small model thirty times slower.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def theirs(folder: Path, ours: Ours, one_thread: None) -> Any:
    module = pytest.importorskip(
        "tests.support.trl", reason="the extra test installs TRL", exc_type=ImportError
    )
    trainer = module.TrlPairs(folder, ours.loaded.tokenizer, 0.0)
    trainer.load(tensors(ours.params), tensors(ours.reference))
    return trainer


def check_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(np.abs(each).max()) for each in theirs.values())
    assert largest > 1e-3
    for name, each in theirs.items():
        np.testing.assert_allclose(ours[name], each, atol=EQUAL_GRADIENT * largest, err_msg=name)


@pytest.mark.parametrize(
    "config",
    [
        PreferenceConfig("dpo", beta=0.1),
        PreferenceConfig("dpo", beta=0.4, label_smoothing=0.2),
        PreferenceConfig("dpo", beta=0.4, averaged=True),
        PreferenceConfig("ipo", beta=0.05, averaged=True),
        PreferenceConfig("ipo", beta=0.5, averaged=True),
    ],
    ids=["dpo", "dpo smoothed", "dpo averaged", "ipo averaged", "ipo averaged, larger beta"],
)
def test_loss_and_gradient_of_pairs_are_those_of_trl(
    ours: Ours, theirs: Any, config: PreferenceConfig
) -> None:
    loss, gradient, _ = ours.loss(config)
    inputs = theirs.inputs(ours.batch, kept())
    expected, of_theirs = theirs.gradient(inputs, config)
    # A loss near 100 has no fifth digit behind the point in float32.
    assert loss == pytest.approx(expected, abs=EQUAL_LOSS, rel=EQUAL_LOSS / 10)
    check_alike(gradient, of_theirs)


def test_reference_and_metrics_are_those_of_trl(ours: Ours, theirs: Any) -> None:
    config = PreferenceConfig("dpo", beta=0.1)
    inputs, found = theirs.inputs(ours.batch, kept()), ours.of_reference(config).reshape(-1, 2)
    for member, name in enumerate(("ref_chosen_logps", "ref_rejected_logps")):
        np.testing.assert_allclose(found[kept(), member], inputs[name].numpy(), atol=1e-4)
    theirs.gradient(inputs, config)
    expected, (_, _, sums) = theirs.metrics(), ours.loss(config)
    for name, total in {
        "rewards/accuracies": sums.right,
        "rewards/margins": config.beta * sums.margin,
        "logps/chosen": sums.winner,
        "logps/rejected": sums.loser,
    }.items():
        assert float(total / sums.pairs) == pytest.approx(expected[name], rel=1e-4), name


def test_imitation_is_that_of_trl(folder: Path, ours: Ours, one_thread: None) -> None:
    module = pytest.importorskip(
        "tests.learners.trl_imitation", reason="the extra test installs TRL", exc_type=ImportError
    )
    policy, _ = policy_of(ours.loaded, SFTConfig(), 1.0)
    # A tool's words among those that are imitated.
    mask = ours.batch.loss_mask.copy()
    mask[0, int(mask[0].argmax()) + 1] = False
    batch = ours.batch._replace(loss_mask=mask)
    episodes = token_episodes(policy, batch, ours.shape)
    given, divisor, _ = given_tokens(policy, episodes)
    passes = TokenPasses(policy)
    gradient, sums = jax.jit(passes.gradient)(ours.reference, None, episodes.blocks, given)
    expected, of_theirs = module.imitated(folder, ours.loaded.tokenizer, batch)
    assert divisor == mask.sum()
    assert float(sums.loss / divisor) == pytest.approx(expected, abs=EQUAL_LOSS)
    check_alike(tensors(jax.tree.map(lambda leaf: leaf / divisor, gradient)), of_theirs)
