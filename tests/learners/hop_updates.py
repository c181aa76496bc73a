"""Updates of a small query encoder: batches, learners on meshes, and the loss by its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.policy_state import (
    Parts,
    PolicyState,
    first_state,
    state_shardings,
)
from qrag_jax.learners.query_encoder import QueryEncoder
from qrag_jax.learners.query_update import make_update
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.policies.plackett_luce import PlackettLuceConfig, log_prob, pool_logits
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.rollouts.hop_batch import HopBatch, HopShape, Rewarded, hop_batch
from qrag_jax.rollouts.pool_search import Drawn
from qrag_jax.runtime.mesh import shard_batch
from tests.episodes_maker import FIRST_WORD, VOCAB, tiny_encoder

POLICY = PlackettLuceConfig(tau=0.5, pool=5, passages=2)
ENCODER = dataclasses.replace(tiny_encoder(), scale=1.0, normalise=True)
SHAPE = HopShape(hops=3, tokens=12, width=ENCODER.width, episode_rewards=1, hop_rewards=1)
BLOCKS = Blocks((48,), (12,), (8.0,))
WEIGHTS = ((0.8,), (0.5,))
RATE = 0.3


def episodes(count: int, seed: int = 0) -> list[Rewarded]:
    """Played episodes of 1 to 3 searches, some of them without rewards."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        searches = []
        for _ in range(rng.integers(1, SHAPE.hops + 1)):
            places = POLICY.pool - int(rng.integers(0, 2))  # some pools are not full
            pool = np.where(np.arange(POLICY.pool) < places, 7, NONE)
            vectors = rng.normal(size=(POLICY.pool, SHAPE.width)).astype(np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            row = rng.integers(FIRST_WORD, VOCAB, rng.integers(3, 13)).astype(np.int32)
            actions = rng.permutation(places)[: POLICY.passages].astype(np.int32)
            vectors[places:] = 0
            drawn = Drawn(row, pool, vectors, actions, float(rng.normal(-2.5, 0.1)), 0.0, (), False)
            searches.append(drawn)
        scored = number % 5 != 3
        hops = [[float(each)] for each in rng.random(len(searches)).astype(np.float32)]
        made.append(Rewarded(searches, [float(rng.random())] if scored else None, hops))
    return made


def batch(count: int = 8, seed: int = 0) -> HopBatch:
    return hop_batch(episodes(count, seed), SHAPE, POLICY)


@dataclasses.dataclass
class Learning:
    """A learner on a mesh, with plain gradient descent, and its state."""

    mesh: Mesh
    tower: Params
    config: GRPOConfig | PPOConfig
    encoder: TextEncoder = ENCODER
    base: Params | None = None
    is_fresh: bool = True
    keeps_reference: bool = False
    rules: Any = ()

    def __post_init__(self) -> None:
        of_critic = optax.sgd(RATE) if isinstance(self.config, PPOConfig) else None
        self.parts = Parts(optax.sgd(RATE), of_critic, self.keeps_reference, self.encoder.width)
        shardings = state_shardings(self.mesh, self.rules, self.parts, self.tower)
        self.learner = QueryEncoder(
            mesh=self.mesh,
            shardings=shardings,
            encoder=self.encoder,
            blocks=BLOCKS,
            config=self.config,
            tau=POLICY.tau,
            weights=WEIGHTS,
            optimizer=self.parts.optimizer,
            critic_optimizer=of_critic,
            schedule=optax.constant_schedule(RATE),
            base_shardings=None if self.base is None else _whole(self.mesh, self.base),
            is_fresh=self.is_fresh,
        )
        self.update = make_update(self.learner)
        self.state: PolicyState = first_state(shardings, self.parts, self.tower, 42)

    def step(self, given: HopBatch) -> dict[str, float]:
        """One update; returns its metrics."""
        base = (
            () if self.base is None else (jax.device_put(self.base, self.learner.base_shardings),)
        )
        self.state, metrics = self.update(self.state, shard_batch(self.mesh, given), *base)
        return {name: float(value) for name, value in metrics.items()}


def _whole(mesh: Mesh, tree: Params) -> Any:
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.tree.map(lambda _: everywhere, tree)


def embedded(params: Params, given: HopBatch) -> jax.Array:
    """The embeddings `[N, T, D]` without packing."""
    tokens = given.tokens.reshape(-1, given.tokens.shape[-1])
    vectors = ENCODER.embed(params, tokens, given.lengths.reshape(-1))
    return vectors.reshape(*given.lengths.shape, -1)


def log_probs(params: Params, given: HopBatch) -> jax.Array:
    """Log-probabilities `[N, T]` of the draws."""
    vectors = embedded(params, given)
    logits = pool_logits(vectors, jnp.asarray(given.pool), jnp.asarray(given.present), POLICY.tau)
    return log_prob(logits, jnp.asarray(given.actions))
