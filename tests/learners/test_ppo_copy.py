"""PPO's critic `copy`: all weights of the model learn the values, whatever the policy trains."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from qrag_jax.learners.optimizers import OptimizerConfig, make_optimizer
from qrag_jax.learners.policy_state import Critic, Parts, next_stage, state_shardings
from qrag_jax.learners.ppo_config import COPY, NONE, OWN, TokenPPOConfig
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.sharding import FSDP, TENSOR, resolve, split_rules
from tests.learners.ppo_updates import (
    CRITIC_RATE,
    PLAIN,
    Learning,
    assert_learns_alike,
    assert_trees_close,
    batch_of,
)
from tests.learners.token_updates import CONFIG, adapters, model

pytestmark = pytest.mark.long

COPIED = dataclasses.replace(PLAIN, critic=COPY, value_clip=100.0)


def merged() -> Params:
    """What the policy is at first."""
    return merge(Adapted(model(), adapters()), 1.0)


def critic_of(learning: Learning) -> Critic:
    """The critic, on the host."""
    found = learning.state.critic
    assert found is not None
    return jax.device_get(found)


def value_loss(critic: Critic, batch: TokenBatch) -> jax.Array:
    """½ (V − G)², the mean over the sampled tokens; with γ = λ = 1, G is the episode's reward."""
    hidden = Qwen3(CONFIG).hidden_states(
        critic.tower, jnp.asarray(batch.tokens), jnp.asarray(batch.lengths)
    )
    row, place = np.nonzero(batch.loss_mask)
    values = hidden[row, place - 1] @ critic.weights + critic.bias
    return 0.5 * jnp.square(values - batch.rewards[row, 0]).mean()


def test_it_begins_as_the_policy_with_values_of_zero() -> None:
    learning = Learning(COPIED, adapters(), model())
    critic = critic_of(learning)
    assert_trees_close(critic.tower, merged(), atol=1e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves(critic)} == {np.dtype(np.float32)}
    batch = batch_of()
    row, _ = np.nonzero(batch.loss_mask)
    found = learning.step(batch)
    assert found["value_loss"] == pytest.approx(0.5 * np.square(batch.rewards[row]).mean())


def test_updates_have_the_gradient_of_all_its_weights() -> None:
    learning = Learning(COPIED, adapters(), model())
    # A zero head gives the tower no gradient yet.
    learning.step(batch_of())
    before, batch = critic_of(learning), batch_of(1)
    found = learning.step(batch)
    loss, gradient = jax.value_and_grad(value_loss)(before, batch)
    assert found["value_loss"] == pytest.approx(float(loss), rel=1e-4)
    after = critic_of(learning)
    moves = jax.tree.map(lambda a, b: (b - a) / CRITIC_RATE, after, before)
    assert_trees_close(moves, gradient, atol=5e-5)
    layers = flatten_dict(moves.tower["layers"])
    assert layers
    for path, leaf in layers.items():
        assert all(np.abs(each).max() > 0 for each in leaf), path
    assert np.abs(moves.tower["word_embeddings"]).max() > 0


def test_base_and_policy_are_as_beside_adapters() -> None:
    copied = Learning(COPIED, adapters(), model())
    own = Learning(dataclasses.replace(COPIED, critic=OWN), adapters(), model())
    for seed in range(2):  # of the second update the values are still of equal towers
        ours, theirs = copied.step(batch_of(seed)), own.step(batch_of(seed))
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["value_loss"] == pytest.approx(theirs["value_loss"], abs=1e-5)
    assert flatten_dict(copied.state.params).keys() == flatten_dict(adapters()).keys()
    assert_trees_close(copied.state.params, own.state.params)
    assert_trees_close(copied.placed, (model(),), atol=0)


@pytest.mark.parametrize("config", [COPIED, TokenPPOConfig(critic=COPY, minibatches=2, epochs=2)])
def test_of_a_policy_trained_whole_it_is_the_own_one(config: TokenPPOConfig) -> None:
    copied = Learning(config, model(), rate=0.05)
    own = Learning(dataclasses.replace(config, critic=OWN), model(), rate=0.05)
    for seed in range(2):
        assert copied.step(batch_of(seed)) == own.step(batch_of(seed))
    jax.tree.map(np.testing.assert_array_equal, copied.state[:5], own.state[:5])


def test_values_come_near_the_returns_while_the_policy_rests() -> None:
    """The critic alone learns before `rests_until`: it explains more and more of them."""
    learning = Learning(COPIED, adapters(), model(), rests_until=1000)
    explained = [learning.step(batch_of())["explained_variance"] for _ in range(12)]
    assert explained[0] < 0.2
    assert explained[-1] > explained[0] + 0.2
    assert_trees_close(learning.state.params, adapters(), atol=0)


def test_a_mesh_changes_no_number() -> None:
    config = TokenPPOConfig(critic=COPY, kl=0.05, minibatches=2, epochs=2, lambda_=0.9)
    mesh = make_mesh((2, 2, 2), jax.devices()[:8])
    # Rounding grows with each step, so these are small.
    one = Learning(config, adapters(), model(), rate=0.05)
    assert_learns_alike(Learning(config, adapters(), model(), mesh=mesh, rate=0.05), one)


@pytest.mark.parametrize("matrices", ["adam", "muon"])
def test_it_is_split_as_a_policy_trained_whole_is(matrices: str) -> None:
    """With its moments."""
    mesh = make_mesh((2, 2, 2), jax.devices()[:8])
    rules = resolve(((".*", "model"),), split_rules(Qwen3.SPLIT.columns, Qwen3.SPLIT.rows))
    optimizer = make_optimizer(OptimizerConfig(matrices=matrices))
    parts = Parts(optimizer, optimizer, keeps_reference=True, width=16, critic=COPY)
    beside = state_shardings(mesh, rules, parts, adapters(), model())
    whole = state_shardings(mesh, rules, parts, model())
    assert beside.critic == whole.critic
    assert beside.critic_opt_state == whole.critic_opt_state
    assert beside.critic is not None
    assert beside.critic.tower == whole.params
    spec = beside.critic.tower["layers"]["query"]["kernel"].spec
    assert {FSDP, TENSOR} <= {*spec}
    alone = Parts(optimizer, None, keeps_reference=True, width=16)
    own = state_shardings(mesh, rules, alone, adapters())
    assert (beside.params, beside.reference) == (own.params, own.reference)
    assert beside.opt_state == own.opt_state


def test_it_shares_no_memory_with_the_base_at_a_stages_start() -> None:
    """A later stage begins with what adapters have learned, and updates donate its state."""
    learning = Learning(dataclasses.replace(COPIED, kl=0.05), adapters(), model())
    before = Learning(dataclasses.replace(PLAIN, critic=NONE), adapters(), model())
    before.step(batch_of())
    taught: Any = jax.device_get(before.state.params)
    begin = jax.jit(partial(next_stage, learning.parts), out_shardings=learning.policy.shardings)
    given = learning.state._replace(params=before.state.params)
    learning.state = begin(given, *learning.placed)
    assert_trees_close(critic_of(learning).tower, merge(Adapted(model(), taught), 1.0), atol=1e-6)
    # A program of its own would copy what it returns as it is; a caller of `build` may have none.
    built = learning.parts.build(learning.state.params, learning.state.key, *learning.placed)
    for state in (learning.state, built):
        leaves = jax.tree.leaves((learning.placed, state.params, state.reference, state.critic))
        places = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len({*places}) == len(places)
    for seed in range(2):
        learning.step(batch_of(seed))
    assert_trees_close(learning.placed, (model(),), atol=0)


def test_moments_are_of_all_weights() -> None:
    parts = Parts(optax.sgd(1.0), optax.adam(1.0), keeps_reference=False, width=16, critic=COPY)
    state = jax.eval_shape(parts.build, adapters(), jax.random.key(0), model())
    of_adam: Any = state.critic_opt_state[0]
    for moment in (of_adam.mu, of_adam.nu):
        assert jax.tree.map(jnp.shape, moment.tower) == jax.tree.map(jnp.shape, model())
