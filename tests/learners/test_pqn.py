"""Targets, gradients and sums of PQN, against plain formulas and a whole loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.config import ImitateConfig
from qrag_jax.learners.two_towers import (
    ImitationGradient,
    PQNGradient,
    Towers,
    make_play_step,
    make_update,
)
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.embedding import TextEncoder
from qrag_jax.rollouts.chunks import Actor, Draws, Trajectory
from qrag_jax.rollouts.experience import Played, ScoredEpisodes
from qrag_jax.runtime.mesh import replicate, shard_batch
from tests import reference
from tests.episodes_maker import tower, towers
from tests.learners import whole_loss as slow
from tests.learners.updates import ALONE, assert_close, fused_update, tower_adapters, two_towers
from tests.rollouts import play_setup
from tests.rollouts.play_setup import CONFIG, ENCODER, EPISODES, PQN, feedback, jitted_gradient

BATCH = play_setup.episodes()
DRAWS = Draws(jax.random.split(jax.random.key(7), EPISODES), play_setup.ALPHA)
OF_ONLINE, OF_TARGET = jax.random.split(jax.random.key(3), (2, 2))  # keys of dropout
# Longer rows than the other encoder's: those of a prefix of two tokens.
WIDE = BlockShapes(
    Blocks((144,), (9,), (8.0,)), Blocks((80,), (24,), (12.0,)), Blocks((80,), (24,), (12.0,))
)


def targets_by_loop(trajectory: Trajectory, rewards: np.ndarray) -> np.ndarray:
    """λ-returns of each episode's own steps, nothing bootstrapped after its end."""
    result = np.zeros(rewards.shape)
    for b in range(len(rewards)):
        steps = int(trajectory.valid[b].sum())
        if steps:
            discounts = np.array([PQN.gamma] * (steps - 1) + [0.0])
            next_values = np.array([*trajectory.values[b, 1:steps], 123.0])
            result[b, :steps] = reference.lambda_returns(
                rewards[b, :steps], discounts, next_values, PQN.lambda_
            )
    return result


class Case(NamedTuple):
    """One way to learn, and how the plain loss embeds rows."""

    actor: Actor
    online: Any
    target: Any
    embed_tower: Callable[[Any, int, tuple], jax.Array]
    dropout: tuple = (None, None)  # keys of the online and of the target towers
    later: Any = None  # parameters that learn from the episodes that `online` played


def whole_towers(
    encoder: TextEncoder, shapes: Any = play_setup.ONE_BUCKET, later: Any = None, **env: Any
) -> Case:
    """A trunk that drops has masks of its own in every online and target tower."""
    online, target, drops = towers(encoder, 0), towers(encoder, 1), encoder.dropout > 0

    def embed_tower(params: Any, number: int, rows: tuple) -> jax.Array:
        masks = slow.masks_of(encoder, OF_ONLINE[number]) if drops else None
        return slow.embed(encoder, encoder.tower(params, number), rows, masks)

    actor = Actor(encoder, shapes, dataclasses.replace(CONFIG, **env))
    dropout = (OF_ONLINE, OF_TARGET) if drops else (None, None)
    return Case(actor, online, target, embed_tower, dropout, later)


def adapters_drop() -> Case:
    """Inputs of the online adapters; those of the target ones do not."""
    encoder = dataclasses.replace(slow.ADAPTED, lora_dropout=0.4)
    base = jax.tree.map(jnp.asarray, tower(encoder, 0))
    online, target = (Adapted(base, slow.adapters(seed)) for seed in (0, 1))

    def dropped(params: Any, number: int, rows: tuple) -> jax.Array:
        one = encoder.tower(Adapted(base, params), number)
        return slow.embed(encoder, one, rows, slow.masks_of(encoder, OF_ONLINE[number]))

    actor = Actor(encoder, play_setup.ONE_BUCKET, CONFIG)
    return Case(actor, online, target, dropped, (OF_ONLINE, None))


def same_targets() -> Case:
    """With τ = 1 the targets are the online towers, and not encoded again."""
    case = whole_towers(ENCODER, play_setup.PLAN, positions="relative", stop_action=True)
    return case._replace(target=case.online)


CASES: dict[str, Callable[[], Case]] = {
    "positions, STOP and the same targets": same_targets,
    "adapters that drop": adapters_drop,
    "a trunk that drops": lambda: whole_towers(
        dataclasses.replace(ENCODER, dropout=0.2, attention_dropout=0.3)
    ),
    "a prefix, and other weights than those that played": lambda: whole_towers(
        slow.QWEN3, WIDE, towers(slow.QWEN3, 2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_is_that_of_the_whole_loss(name: str) -> None:
    """Every row is written out one token at a time and nothing is packed: see `whole_loss`."""
    case = CASES[name]()
    stop = case.actor.config.stop_action
    batch = jax.tree.map(np.asarray, with_stop(BATCH)) if stop else BATCH
    draws = DRAWS._replace(dropout=case.dropout)
    played = play_setup.jitted_rollout(case.actor, (case.online, case.target), batch, draws)
    whole = played = jax.tree.map(np.asarray, played)
    if case.later is not None:  # some episodes are cut, and end at their first step
        places = np.arange(EPISODES)[:, None], np.arange(CONFIG.max_steps)
        played = played._replace(valid=whole.valid & ((places[0] % 3 > 0) | (places[1] == 0)))
        assert 0 < played.valid.sum() < whole.valid.sum()
    rewards = np.where(played.valid, feedback(batch, played), 0)
    goals = targets_by_loop(played, rewards)[played.valid].astype(np.float32)
    rows = slow.rows_of(case.actor.encoder, case.actor.config, batch, played)
    if stop:
        assert (played.actions[played.valid] == BATCH.chunk_mask.shape[1]).any()
        assert rows.positions.any()
    loss = jax.jit(jax.value_and_grad(slow.whole_loss(rows, goals, case.embed_tower), has_aux=True))
    trained = case.online.adapters if isinstance(case.online, Adapted) else case.online
    (expected_loss, embedded), expected = loss(trained)
    for name, own in zip(("state", "chunk"), embedded, strict=True):  # those that were acted on
        acted_on = getattr(played, f"{name}_embeddings")[played.valid]
        np.testing.assert_allclose(own, acted_on, atol=1e-5)
    config = dataclasses.replace(PQN, tau=1.0) if case.target is case.online else PQN
    learner, learns, experience = case.online, PQNGradient(case.actor, config, feedback), BATCH
    if case.later is not None:
        (expected_loss, _), expected = loss(case.later)
        steps = Played(whole.actions, whole.valid, whole.entropy)
        experience = ScoredEpisodes(BATCH, steps, rewards, played.valid)
        learner, learns = case.later, PQNGradient(case.actor, PQN)
    both = Towers(learner, case.target)
    gradient, sums = jitted_gradient(learns, both, experience, draws)

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


def test_a_training_step_drops_where_the_encoder_does() -> None:
    one, programs = tower(ENCODER, 0), []
    for encoder in (ENCODER, dataclasses.replace(ENCODER, dropout=0.2)):
        both = two_towers(ALONE, one, Actor(encoder, play_setup.ONE_BUCKET, CONFIG))
        step: Any = fused_update(both)
        batch = shard_batch(both.mesh, BATCH)
        programs.append(step.lower(both.first_state(one, 42), batch).as_text())
    assert programs[0] != programs[1]


@pytest.mark.parametrize("now", [True, False])
def test_imitation_is_added_by_its_weight(now: bool) -> None:
    """Where the update plays, and where it learns from what was played before."""
    actor, both = play_setup.ONE_BUCKET_ACTOR, Towers(towers(ENCODER, 0), towers(ENCODER, 1))
    imitate, of_play = ImitateConfig(temperature=0.3, pqn_weight=0.5), feedback if now else None
    imitation = ImitationGradient(actor, imitate, 0.1)
    played = play_setup.jitted_rollout(actor, both, BATCH, DRAWS)
    steps = Played(played.actions, played.valid, played.entropy)
    scored = ScoredEpisodes(BATCH, steps, feedback(BATCH, played), played.valid)
    experience: Any = BATCH if now else scored
    gradient, sums = jitted_gradient(
        PQNGradient(actor, PQN, of_play, imitation), both, experience, DRAWS
    )
    parts = [
        jitted_gradient(PQNGradient(actor, PQN, of_play), both, experience, DRAWS),
        jitted_gradient(imitation, both, BATCH, DRAWS),
    ]
    expected = jax.tree.map(lambda one, more: one + 0.5 * more, *(part[0] for part in parts))
    assert_close(gradient, expected)
    losses = [float(part[1].loss) for part in parts]
    assert float(sums.loss) == pytest.approx(losses[0] + 0.5 * losses[1], rel=1e-5)
    assert float(sums.means["loss"][0]) == pytest.approx(losses[0], rel=1e-5)


# ------------------------------------------------------------------------ rewards from outside


def at_the_end(batch: Any, trajectory: Any) -> jax.Array:
    """A reward that depends on all that was taken and in which order, at the last step."""
    number = 1.0 + jnp.arange(trajectory.actions.shape[1])[None]
    worth = 0.1 + (trajectory.actions % 7) * number / 20
    valid = jnp.asarray(trajectory.valid)
    last = valid & ~jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    return jnp.where(last, (worth * valid).sum(axis=1, keepdims=True), 0.0)


def test_playing_now_and_learning_later_is_the_fused_step_at_no_lag() -> None:
    """With all that a play draws: positions, STOP, dropout, random acting at first; in parts."""
    config = dataclasses.replace(CONFIG, positions="random", stop_action=True)
    encoder = dataclasses.replace(slow.ADAPTED, lora_dropout=0.4)
    actor, one = Actor(encoder, play_setup.ONE_BUCKET, config), tower_adapters(0)
    base = tower(ENCODER, 0)
    fused = two_towers(ALONE, one, actor, base=base)
    split = two_towers((1, 2, 1), one, actor, base=base, accumulation=2)
    step, play = fused_update(fused, at_the_end), make_play_step(split)
    learn = make_update(split, PQNGradient(split.actor, split.config))
    on_one, on_two = fused.placed_base(base), split.placed_base(base)
    state, other = fused.first_state(one, 42), split.first_state(one, 42)
    for number in range(3):
        state, expected = step(state, shard_batch(fused.mesh, play_setup.episodes(number)), *on_one)
        batch = shard_batch(split.mesh, play_setup.episodes(number))
        played = play(other, batch, replicate(split.mesh, np.int32(number)), *on_two)
        reward = np.asarray(at_the_end(None, jax.device_get(played)))
        given = shard_batch(split.mesh, (reward, np.asarray(played.valid)))
        other, metrics = learn(other, ScoredEpisodes(batch, played, *given), *on_two)
        assert float(metrics.pop("unscored_share")) == 0.0
        assert metrics.keys() == expected.keys()
        for name in metrics.keys() - {"padding_share"}:
            assert float(metrics[name]) == pytest.approx(float(expected[name]), rel=2e-4, abs=1e-6)
    for name in ("params", "target_params"):
        assert_close(*(jax.device_get(getattr(each, name)) for each in (other, state)))
