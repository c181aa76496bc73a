"""Updates of a small token policy on meshes, and the same losses by their definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from qrag_jax.learners.policy_state import Parts, PolicyState, first_state, state_shardings
from qrag_jax.learners.token_config import CISPO, SEQUENCE, SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.learners.token_update import make_token_update, token_episodes
from qrag_jax.models.trunks.qwen3 import HEAD, Qwen3, Qwen3Config
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import BlockShape
from qrag_jax.runtime.sharding import resolve, shardings_of, split_rules
from tests.rollouts.token_rows import MEMBERS, VOCAB

CONFIG = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    head_dim=8,
)
SHAPE = BlockShape(tokens=64, length=24, groups=3, members=2, sampled=44)
TEMPERATURE, RATE, WEIGHTS = 0.7, 0.5, (0.8, 0.3)
GRPO = TokenGRPOConfig(members=MEMBERS, longest=16)


def model(*, tied: bool = True) -> Params:
    """Random parameters with logits that differ."""
    params = dict(Qwen3(CONFIG).init_params(jax.random.key(0)))
    params["word_embeddings"] = 8 * params["word_embeddings"]
    if not tied:
        params[HEAD] = 0.3 * jax.random.normal(jax.random.key(1), params["word_embeddings"].shape)
    return params


@dataclasses.dataclass
class Learning:
    """A learner on a mesh, with plain gradient descent, and its state."""

    mesh: Mesh
    config: Any
    params: Params
    base: Params | None = None
    scanned: bool = False
    shape: BlockShape = SHAPE

    def __post_init__(self) -> None:
        is_grpo = isinstance(self.config, TokenGRPOConfig)
        keeps = is_grpo and self.config.beta > 0
        parts = Parts(optax.sgd(RATE), None, keeps_reference=keeps, width=CONFIG.hidden_size)
        split = Qwen3.SPLIT
        rules = resolve(((".*", "model"),), split_rules(split.columns, split.rows))
        shardings = state_shardings(self.mesh, rules, parts, self.params)
        of_base = None
        if self.base is not None:
            of_base = shardings_of(self.mesh, rules, self.base, self.base)
        self.policy = TokenPolicy(
            mesh=self.mesh,
            shardings=shardings,
            trunk=Qwen3(CONFIG, scanned=self.scanned, own_head=HEAD in (self.base or self.params)),
            vocabulary=Vocabulary(TEMPERATURE, numbers=10 * self.shape.sampled),
            config=self.config,
            weights=WEIGHTS,
            optimizer=parts.optimizer,
            schedule=optax.constant_schedule(RATE),
            base_shardings=of_base,
        )
        self.update = self.made_update()
        self.state: PolicyState = first_state(shardings, parts, self.params, 42)

    def made_update(self) -> Any:
        """The program of an update."""
        return make_token_update(self.policy)

    @property
    def placed_base(self) -> tuple[Params, ...]:
        """The base of adapters, if there is one."""
        if self.base is None:
            return ()
        return (jax.device_put(self.base, self.policy.base_shardings),)

    def step(self, batch: TokenBatch) -> dict[str, float]:
        """One update; returns its metrics."""
        return self.learn(token_episodes(self.policy, batch, self.shape))

    def learn(self, episodes: Any) -> dict[str, float]:
        """One update from episodes in blocks; returns its metrics."""
        self.state, metrics = self.update(self.state, episodes, *self.placed_base)
        return {name: float(value) for name, value in metrics.items()}


def adapters() -> Params:
    """Adapters of some kernels whose products are far from zero."""
    draw = np.random.default_rng(3)
    sizes = {"query": (16, 32), "value": (16, 16), "down": (24, 16)}
    return {
        "layers": {
            name: {
                "lora_a": draw.normal(size=(2, inner, 2)).astype(np.float32) / 4,
                "lora_b": draw.normal(size=(2, 2, outer)).astype(np.float32) / 4,
            }
            for name, (inner, outer) in sizes.items()
        }
    }


def check_moved(after: Any, before: Any, gradient: Any, *, rtol: float = 1e-5) -> None:
    """A step of plain descent by this gradient."""
    moves = jax.tree.map(lambda a, b: (np.asarray(b) - np.asarray(a)) / RATE, after, before)
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for ours, theirs in zip(jax.tree.leaves(moves), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=rtol * largest + 1e-6)


def log_probs(params: Params, batch: TokenBatch) -> jax.Array:
    """Log-probabilities `[R, L]` of each row's tokens, without packing; 0 for its first."""
    params = dict(params)
    head = params.pop(HEAD, params["word_embeddings"])
    tokens = jnp.asarray(batch.tokens)
    hidden = Qwen3(CONFIG).hidden_states(params, tokens, jnp.asarray(batch.lengths))
    logits = jnp.einsum("rld,vd->rlv", hidden, head, precision="highest") / TEMPERATURE
    every = jax.nn.log_softmax(logits)[:, :-1]
    chosen = jnp.take_along_axis(every, tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def advantages(batch: TokenBatch, *, scaled: bool) -> np.ndarray:
    """Of each episode `[N]`: its reward less the mean of its group's scored members."""
    found, totals = np.zeros(len(batch.scored)), batch.rewards @ np.array(WEIGHTS)
    for first in range(0, len(found), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        spread = totals[rows].std(ddof=1) + 1e-4 if scaled else 1.0
        found[rows] = (totals[rows] - totals[rows].mean()) / spread
    return found


def learned(batch: TokenBatch, *, flat: bool = False) -> np.ndarray:
    """The tokens `[R, L]` of scored members of groups that differ, or that are flat, too."""
    keep = np.zeros(len(batch.scored) + 1, bool)
    totals = batch.rewards @ np.array(WEIGHTS)
    for first in range(0, len(batch.scored), MEMBERS):
        rows = [n for n in range(first, first + MEMBERS) if batch.scored[n]]
        keep[rows] = flat or np.ptp(totals[rows]) > 0
    return batch.loss_mask & keep[batch.episode][:, None]


def loss(
    params: Params,
    batch: TokenBatch,
    config: TokenGRPOConfig | SFTConfig,
    old: np.ndarray | None = None,
    reference: np.ndarray | None = None,
) -> Any:
    """The mean loss, token by token, as the papers have it."""
    new = log_probs(params, batch)
    if isinstance(config, SFTConfig):
        mask = batch.loss_mask
        return -(jnp.where(mask, new, 0.0)).sum() / mask.sum()
    mask = learned(batch, flat=True)
    before = jax.lax.stop_gradient(new) if old is None else jnp.asarray(old)
    given = np.append(advantages(batch, scaled=config.scaled), 0.0)[batch.episode][:, None]
    difference = jnp.where(mask, new - before, 0.0)
    ratio = jnp.exp(difference)
    if config.ratio == SEQUENCE:
        count = np.maximum(mask.sum(axis=1, keepdims=True), 1)
        mean = difference.sum(axis=1, keepdims=True) / count
        own = difference - jax.lax.stop_gradient(difference)
        ratio = jnp.exp(jax.lax.stop_gradient(mean) + own)
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    if config.ratio == CISPO:
        each = -jax.lax.stop_gradient(bounded) * given * new
    else:
        each = -jnp.minimum(ratio * given, bounded * given)
    weights = jnp.minimum(jnp.exp(before - batch.sampler_log_probs), config.sampler_cap)
    each = each * jax.lax.stop_gradient(weights)
    if config.beta:
        away = jnp.asarray(reference) - new
        each += config.beta * (jnp.exp(away) - away - 1)
    each = jnp.where(mask, each, 0.0)
    counts = np.bincount(batch.episode, mask.sum(axis=1), len(batch.scored) + 1)[:-1]
    episodes = (counts > 0).sum()
    if config.aggregation == "grpo":
        lengths = np.maximum(np.append(counts, 0), 1)[batch.episode]
        return (each / lengths[:, None]).sum() / episodes
    divisor = episodes * config.longest if config.aggregation == "dr_grpo" else counts.sum()
    return each.sum() / divisor
