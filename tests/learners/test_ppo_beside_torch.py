"""PPO's losses, advantages and gradients of a small decoder beside plain torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from qrag_jax.learners.policy_state import Critic, Parts, first_state, state_shardings
from qrag_jax.learners.ppo_config import TokenPPOConfig
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, table_of
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.runtime.mesh import make_mesh
from tests.learners.ppo_batches import ppo_batch
from tests.support.decoders import EQUAL_GRADIENT, EQUAL_LOSS, TEMPERATURE, Size, decoder
from tests.support.torch_ppo import Rates, TorchPpo

pytestmark = pytest.mark.long

RATE = 0.25
SIZE = Size(vocab=300, layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder")
    decoder(path, SIZE)
    return path


class Ours:
    """An update by plain descent, whose moves are gradients."""

    def __init__(self, loaded: LoadedLanguageModel, config: TokenPPOConfig) -> None:
        self.mesh = make_mesh((1, 1, 1), jax.devices()[:1])
        plain = optax.sgd(RATE)
        width = loaded.model.trunk.config.hidden_size
        parts = Parts(plain, plain, keeps_reference=True, width=width)
        self.policy: TokenPolicy[TokenPPOConfig] = TokenPolicy(
            mesh=self.mesh,
            shardings=state_shardings(self.mesh, loaded.partition_rules, parts, loaded.params),
            trunk=loaded.model.trunk,
            vocabulary=Vocabulary(TEMPERATURE),
            config=config,
            weights=(1.0,),
            optimizer=plain,
            critic_optimizer=plain,
            schedule=optax.constant_schedule(RATE),
        )
        self.update = make_ppo_update(self.policy)
        self.state = first_state(self.policy.shardings, parts, loaded.params, 0)

    def step(self, batch: TokenBatch) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Metrics, and the moves by Hugging Face's names."""
        before = self._tensors()
        shape = choose_shape(batch, 256, 1)
        self.state, metrics = self.update(self.state, ppo_episodes(self.policy, batch, shape))
        after = self._tensors()
        moves = {name: (before[name] - after[name]) / RATE for name in before}
        return {name: float(each) for name, each in metrics.items()}, moves

    def _tensors(self) -> dict[str, np.ndarray]:
        table, critic = table_of("qwen3"), self.state.critic
        assert isinstance(critic, Critic)
        host: Any = jax.tree.map(np.array, (self.state.params, critic.tower))
        of_policy, of_critic = (tensors_from_params(table, each) for each in host)
        tower = {f"critic.{name.removeprefix('model.')}": each for name, each in of_critic.items()}
        head = {"head.weight": np.array(critic.weights)[None], "head.bias": np.array(critic.bias)}
        return of_policy | tower | {name: each.copy() for name, each in head.items()}


CONFIGS = {
    "kl in the reward": TokenPPOConfig(kl=0.1, lambda_=0.95, gamma=0.99, entropy=0.01),
    "kl in the loss": TokenPPOConfig(kl=0.1, kl_in="loss", whiten=False, entropy=0.0),
    "deepretrieval": TokenPPOConfig(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_are_torchs(name: str, folder: Path) -> None:
    """Twice, so that values, ratios to the reference and returns are not zero."""
    from qrag_jax.models.pretrained_lm import load_language_model

    config = CONFIGS[name]
    ours = Ours(load_language_model(folder), config)
    theirs = TorchPpo(folder, config, TEMPERATURE, Rates(RATE, RATE))
    for optimizer in ("optimizer", "critic_optimizer"):
        groups = getattr(theirs, optimizer).param_groups[0]["params"]
        setattr(theirs, optimizer, _descent(groups))
    for seed in range(2):
        batch = ppo_batch(seed, vocab=SIZE.vocab)
        losses, gradients = theirs.gradients(theirs.given(batch))
        metrics, moves = ours.step(batch)
        assert metrics["loss"] == pytest.approx(losses[0], abs=EQUAL_LOSS)
        assert metrics["value_loss"] == pytest.approx(losses[1], rel=EQUAL_LOSS, abs=EQUAL_LOSS)
        assert metrics["tokens"] == batch.loss_mask.sum()
        of_critic = [each for each in gradients if each.startswith(("critic.", "head."))]
        of_policy = [each for each in gradients if each not in of_critic]
        for names in (of_policy, of_critic):
            largest = max(np.abs(gradients[each]).max() for each in names)
            assert largest > 1e-4
            for each in names:
                apart = np.abs(moves[each].reshape(gradients[each].shape) - gradients[each]).max()
                # A move is a difference of weights near 1, which have 7 digits.
                assert apart <= EQUAL_GRADIENT * largest + 2e-6, each
        theirs.optimizer.step()
        theirs.critic_optimizer.step()
        assert (metrics["kl"] != 0) == (seed > 0)


def _descent(parameters: Any) -> Any:
    import torch

    return torch.optim.SGD(parameters, RATE)


def test_minibatches_and_epochs_go_the_same_way(folder: Path) -> None:
    """Two passes over two minibatches, with everything frozen before the first of four steps."""
    from qrag_jax.models.pretrained_lm import load_language_model

    config = TokenPPOConfig(epochs=2, minibatches=2, kl=0.05, lambda_=0.9, value_clip=0.05)
    ours = Ours(load_language_model(folder), config)
    theirs = TorchPpo(folder, config, TEMPERATURE, Rates(RATE, RATE))
    for optimizer in ("optimizer", "critic_optimizer"):
        groups = getattr(theirs, optimizer).param_groups[0]["params"]
        setattr(theirs, optimizer, _descent(groups))
    batch = ppo_batch(3, vocab=SIZE.vocab)
    given = theirs.given(batch)
    before = {n: p.detach().numpy().copy() for n, p in theirs.policy.named_parameters()}
    critic_before = {n: p.detach().numpy().copy() for n, p in theirs.critic.named_parameters()}
    half = len(batch.scored) // 2
    for _ in range(config.epochs):
        for rows in (slice(0, half), slice(half, None)):
            theirs.gradients(type(given)(*(each[rows] for each in given)))
            theirs.optimizer.step()
            theirs.critic_optimizer.step()
    _, moves = ours.step(batch)
    for name, each in theirs.policy.named_parameters():
        if name == "lm_head.weight":
            continue
        move = (before[name] - each.detach().numpy()) / RATE
        np.testing.assert_allclose(moves[name], move, atol=2e-4 * np.abs(move).max() + 5e-6)
    for name, each in theirs.critic.named_parameters():
        move = (critic_before[name] - each.detach().numpy()) / RATE
        own = moves[f"critic.{name}"]
        np.testing.assert_allclose(own, move, atol=2e-4 * np.abs(move).max() + 5e-6)


def test_a_batch_that_minibatches_do_not_divide_is_refused(folder: Path) -> None:
    from qrag_jax.models.pretrained_lm import load_language_model

    ours = Ours(load_language_model(folder), dataclasses.replace(TokenPPOConfig(), minibatches=5))
    batch = ppo_batch(0, vocab=SIZE.vocab)
    with pytest.raises(ValueError, match="no 5 equal minibatches"):
        ppo_episodes(ours.policy, batch, choose_shape(batch, 256, 1))
