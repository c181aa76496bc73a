"""Targets, gradients and sums of every way to learn, against plain formulas and a whole loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.deferred import ScoredGradient
from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.models.compute.dropout import TokenDropout, with_key
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor, Draws, Trajectory
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from tests import reference
from tests.episodes_maker import tower, towers
from tests.learners.whole_loss import (
    ADAPTED,
    QWEN3,
    adapters,
    by_hand,
    embed,
    rows_of,
    trunk_dropout,
    whole_loss,
)
from tests.rollouts.play_setup import (
    ACTOR,
    ALPHA,
    CONFIG,
    ENCODER,
    EPISODES,
    ONE_BUCKET,
    ONE_BUCKET_ACTOR,
    PLAN,
    PQN,
    episodes,
    feedback,
    jitted_gradient,
    jitted_rollout,
    online,
    target,
    unique_tokens,
)

BATCH = episodes()
DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), ALPHA)
DROPOUT = jax.random.key(3)
# Longer rows than the other encoder's: those of a prefix of two tokens.
ONE_WIDE_BUCKET = BlockShapes(
    Blocks((144,), (9,), (8.0,)), Blocks((80,), (24,), (12.0,)), Blocks((80,), (24,), (12.0,))
)
WIDE = PLAN._replace(
    states=PLAN.states._replace(tokens=(48,), lengths=(10, 24)),
    gradients=PLAN.gradients._replace(tokens=(30, 50), lengths=(9, 24)),
)


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    played = jitted_rollout(ACTOR, (online(), target()), BATCH, DRAWS)
    return jax.tree.map(np.asarray, played)


@pytest.fixture(scope="module")
def found() -> tuple:
    gradient = FusedGradient(ONE_BUCKET_ACTOR, PQN, feedback)
    return jitted_gradient(gradient, Towers(online(), target()), BATCH, DRAWS)


def targets_by_loop(trajectory: Trajectory, rewards: np.ndarray) -> np.ndarray:
    """λ-returns of each episode's own steps, nothing bootstrapped after its end."""
    result = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        steps = int(trajectory.valid[b].sum())
        if steps:
            assert trajectory.done[b, steps - 1]
            discounts = np.array([PQN.gamma] * (steps - 1) + [0.0])
            next_values = np.array([*trajectory.values[b, 1:steps], 123.0])
            result[b, :steps] = reference.lambda_returns(
                rewards[b, :steps], discounts, next_values, PQN.lambda_
            )
    return result


@pytest.fixture(scope="module")
def rewards(trajectory) -> np.ndarray:
    return np.asarray(feedback(BATCH, trajectory))


def test_targets(trajectory, rewards) -> None:
    result = np.asarray(PQN.targets(trajectory, rewards))
    assert rewards[trajectory.valid].any()
    expected = targets_by_loop(trajectory, rewards)
    np.testing.assert_allclose(result[trajectory.valid], expected[trajectory.valid], atol=1e-5)


class Case(NamedTuple):
    """One way to learn, and how the plain loss embeds rows."""

    actor: Actor
    online: Any
    target: Any
    embed_tower: Callable[[Any, int, tuple], jax.Array]
    dropout_key: jax.Array | None = None  # of the step
    sides: tuple | None = None  # what plays, where it is more than `online` and `target`
    later: Any = None  # parameters that learn from the episodes that `online` played


def whole_towers(encoder: TextEncoder, shapes: BlockShapes, **more: Any) -> Case:
    config = dataclasses.replace(CONFIG, **more.pop("config", {}))

    def embed_tower(params: Any, number: int, rows: tuple) -> jax.Array:
        return embed(encoder, jax.tree.map(lambda leaf: leaf[number], params), rows)

    params = towers(encoder, 0), towers(encoder, 1)
    return Case(Actor(encoder, shapes, config), *params, embed_tower, **more)


def on_a_base(name: str, rate: float = 0.0) -> Case:
    """Adapters; with a rate their inputs are dropped."""
    encoder = TextEncoder(**(vars(ADAPTED[name]) | {"lora_dropout": rate}))
    base = jax.tree.map(jnp.asarray, tower(encoder, 0))
    online, target = (Adapted(base, adapters(name, seed)) for seed in (0, 1))
    actor = Actor(encoder, ONE_WIDE_BUCKET, CONFIG)
    if not rate:

        def merged(params: Any, number: int, rows: tuple) -> jax.Array:
            return embed(encoder, by_hand(base, params, number), rows)

        return Case(actor, online, target, merged)
    keyed = online._replace(dropout_key=jax.random.split(DROPOUT, 2))

    def dropped(params: Any, number: int, rows: tuple) -> jax.Array:
        one = encoder.tower(keyed._replace(adapters=params), number)
        return embed(encoder, one, rows, partial(TokenDropout, rate=rate))

    return Case(actor, online, target, dropped, DROPOUT, (keyed, target))


def trunk_drops() -> Case:
    """Both towers drop: online and target ones, each by masks of its own."""
    encoder = TextEncoder(**(vars(ENCODER) | {"dropout": 0.2, "attention_dropout": 0.3}))
    of_online, of_target = jax.random.split(DROPOUT, (2, 2))

    def embed_tower(params: Any, number: int, rows: tuple) -> jax.Array:
        masks = trunk_dropout(encoder, of_online[number])
        return embed(encoder, encoder.tower(params, number), rows, masks)

    online, target = towers(encoder, 0), towers(encoder, 1)
    sides = with_key(online, of_online), with_key(target, of_target)
    actor = Actor(encoder, ONE_BUCKET, CONFIG)
    return Case(actor, online, target, embed_tower, DROPOUT, sides)


CASES: dict[str, Callable[[], Case]] = {
    "bert": lambda: whole_towers(ENCODER, ONE_BUCKET),
    "positions and STOP": lambda: whole_towers(
        ENCODER, PLAN, config={"positions": "relative", "stop_action": True}
    ),
    "qwen3": lambda: whole_towers(QWEN3, WIDE),
    "adapters of bert": lambda: on_a_base("bert"),
    "adapters of qwen3": lambda: on_a_base("qwen3"),
    "adapters that drop": lambda: on_a_base("bert", 0.4),
    "a trunk that drops": trunk_drops,
    "other weights than those that played": lambda: whole_towers(
        ENCODER, ONE_BUCKET, later=towers(ENCODER, 2)
    ),
}
SLOW = ("qwen3", "adapters of qwen3", "adapters that drop", "a trunk that drops")


def learned(value: Any) -> Any:
    """What is learned: whole towers, or adapters alone."""
    return value.adapters if isinstance(value, Adapted) else value


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CASES],
)
def test_gradient_is_that_of_the_whole_loss(name: str) -> None:
    case = CASES[name]()
    stop = case.actor.config.stop_action
    batch = jax.tree.map(np.asarray, with_stop(BATCH)) if stop else BATCH
    played = jitted_rollout(case.actor, case.sides or (case.online, case.target), batch, DRAWS)
    played = jax.tree.map(np.asarray, played)
    rewards = np.asarray(feedback(batch, played))
    goals = targets_by_loop(played, rewards)[played.valid].astype(np.float32)
    rows = rows_of(case.actor.encoder, case.actor.config, batch, played)
    if stop:
        assert (played.actions[played.valid] == BATCH.chunk_mask.shape[1]).any()
        assert rows.positions.any()

    later = case.online if case.later is None else case.later
    loss = jax.jit(jax.value_and_grad(whole_loss(rows, goals, case.embed_tower), has_aux=True))
    (expected_loss, embedded), expected = loss(learned(later))
    if case.later is None:  # what was acted on are these very embeddings
        for name, own in zip(("state", "chunk"), embedded, strict=True):
            acted_on = getattr(played, f"{name}_embeddings")[played.valid]
            np.testing.assert_allclose(own, acted_on, atol=1e-5)
        learns, experience = FusedGradient(case.actor, PQN, feedback), BATCH
    else:
        steps = Played(played.actions, played.valid, played.entropy)
        experience = ScoredEpisodes(BATCH, steps, rewards, played.valid)
        learns = ScoredGradient(case.actor, PQN)
    both = Towers(later, case.target)
    gradient, sums = jitted_gradient(learns, both, experience, DRAWS, case.dropout_key)

    assert float(sums.loss) == pytest.approx(float(expected_loss), rel=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    norms = {
        jax.tree_util.keystr(path): float(optax.tree.norm(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(expected)
    }
    largest = max(norms.values())
    assert largest > 1e-2
    # Everything is reached. Keys' biases shift all scores of a query alike, which softmax ignores.
    reached = [norm for name, norm in norms.items() if not name.endswith("['key']['bias']")]
    assert min(reached) > 1e-4 * largest
    for leaf, plain in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert float(optax.tree.norm(leaf - plain)) < 2e-5 * largest


def test_sums(trajectory, rewards, found) -> None:
    sums = found[1]
    valid = trajectory.valid
    goals = targets_by_loop(trajectory, rewards)[valid]
    taken = [set(trajectory.actions[b][valid[b]].tolist()) for b in range(EPISODES)]
    facts = [set(np.flatnonzero(BATCH.support[b])) for b in range(EPISODES)]
    solved = sum(bool(f) and f <= t for f, t in zip(facts, taken))
    assert 0 < solved < BATCH.chunk_mask.any(1).sum()
    expected = {
        "transitions": valid.sum(),
        "episodes": BATCH.chunk_mask.any(1).sum(),
        "q": trajectory.q[valid].sum(),
        "target": goals.sum(),
        "td_error": np.abs(trajectory.q[valid] - goals).sum(),
        "entropy": trajectory.entropy[valid].sum(),
        "reward": rewards.sum(),
        "solved": solved,
    }
    for name, value in expected.items():
        assert float(getattr(sums, name)) == pytest.approx(float(value), rel=1e-4), name
    rows = unique_tokens(trajectory.state_tokens, trajectory.state_lengths)
    rows += unique_tokens(trajectory.chunk_tokens, trajectory.chunk_lengths)
    assert float(sums.real_tokens) == float(trajectory.tokens.real) + rows
    assert float(sums.computed_tokens) > float(sums.real_tokens)


def test_targets_that_are_the_online_towers_are_not_encoded_again() -> None:
    """With τ = 1 they are the same weights; dropout gives them masks of their own."""
    params = towers(ENCODER, 0)
    both = Towers(params, params)

    def learned_with(tau: float, dropout_key: jax.Array | None = None) -> tuple[Any, Any]:
        config = dataclasses.replace(PQN, tau=tau)
        learns = FusedGradient(ONE_BUCKET_ACTOR, config, feedback)
        return jitted_gradient(learns, both, BATCH, DRAWS, dropout_key)

    (once, sums), (twice, sums_of_two) = learned_with(1.0), learned_with(0.5)
    for leaf, other in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)
    for name in ("loss", "q", "target", "transitions"):
        assert getattr(sums, name) == pytest.approx(float(getattr(sums_of_two, name)), rel=1e-6)
    alone = jitted_rollout(ONE_BUCKET_ACTOR, (params,), BATCH, DRAWS).tokens.real
    assert float(sums_of_two.real_tokens - sums.real_tokens) == float(alone) > 0
    keyed, keyed_twice = (learned_with(tau, DROPOUT)[1] for tau in (1.0, 0.5))
    assert float(keyed.real_tokens) == float(keyed_twice.real_tokens)
