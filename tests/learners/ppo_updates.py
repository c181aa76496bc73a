"""Updates of a small token policy by PPO, on one device or a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from qrag_jax.learners.policy_state import Parts, PolicyState, first_state, state_shardings
from qrag_jax.learners.ppo_config import NONE, TokenPPOConfig
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.sharding import resolve, shardings_of, split_rules
from tests.learners.ppo_batches import LENGTH, ppo_batch
from tests.learners.token_updates import CONFIG, TEMPERATURE
from tests.rollouts.token_rows import VOCAB

RATE, CRITIC_RATE = 0.5, 0.02
SHAPE = BlockShape(tokens=80, length=LENGTH, groups=3, members=1, sampled=64)
PLAIN = TokenPPOConfig(kl=0.0, entropy=0.0, whiten=False, sampler_cap=1e9)


def alone() -> Mesh:
    """One device."""
    return make_mesh((1, 1, 1), jax.devices()[:1])


@dataclasses.dataclass
class Learning:
    """A learner with plain gradient descent, and its state."""

    config: TokenPPOConfig
    params: Params
    base: Params | None = None
    mesh: Mesh = dataclasses.field(default_factory=alone)
    rests_until: int = 0
    rate: float = RATE

    def __post_init__(self) -> None:
        config, plain = self.config, optax.sgd(self.rate)
        self.parts = parts = Parts(
            plain,
            None if config.critic == NONE else optax.sgd(CRITIC_RATE),
            keeps_reference=config.kl > 0,
            width=CONFIG.hidden_size,
        )
        split = Qwen3.SPLIT
        rules = resolve(((".*", "model"),), split_rules(split.columns, split.rows))
        shardings = state_shardings(self.mesh, rules, parts, self.params)
        of_base = None
        if self.base is not None:
            of_base = shardings_of(self.mesh, rules, self.base, self.base)
        self.policy: TokenPolicy[TokenPPOConfig] = TokenPolicy(
            mesh=self.mesh,
            shardings=shardings,
            trunk=Qwen3(CONFIG),
            vocabulary=Vocabulary(TEMPERATURE),
            config=config,
            weights=(1.0,),
            optimizer=plain,
            critic_optimizer=parts.critic_optimizer,
            schedule=optax.constant_schedule(RATE),
            base_shardings=of_base,
            rests_until=self.rests_until,
        )
        self.update = make_ppo_update(self.policy)
        self.placed = () if self.base is None else (jax.device_put(self.base, of_base),)
        self.state: PolicyState = first_state(shardings, parts, self.params, 42)

    def step(self, batch: TokenBatch) -> dict[str, float]:
        """One update; returns its metrics."""
        episodes = ppo_episodes(self.policy, batch, SHAPE)
        self.state, metrics = self.update(self.state, episodes, *self.placed)
        return {name: float(value) for name, value in metrics.items()}


def batch_of(seed: int = 0) -> TokenBatch:
    """Episodes of random tokens and rewards."""
    return ppo_batch(seed, vocab=VOCAB)


def moved(after: Any, before: Any) -> Any:
    """The gradient of which plain descent made this step."""
    return jax.tree.map(lambda a, b: (np.asarray(b) - np.asarray(a)) / RATE, after, before)


def assert_trees_close(ours: Any, theirs: Any, atol: float = 2e-5) -> None:
    """Every array of one tree is near that of the other."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def assert_learns_alike(ours: Learning, theirs: Learning) -> None:
    """Two steps have the same metrics, and end with the same parameters and critic."""
    for seed in range(2):
        mine, other = ours.step(batch_of(seed)), theirs.step(batch_of(seed))
        for name, value in other.items():
            if name != "padding_share":
                assert mine[name] == pytest.approx(value, abs=2e-5, rel=1e-4), name
    assert_trees_close(ours.state.params, theirs.state.params)
    assert_trees_close(ours.state.critic, theirs.state.critic)
