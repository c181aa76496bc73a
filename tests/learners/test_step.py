"""The compiled step: its parts put together by hand, any split alike, and what it leaves alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from qrag_jax.learners.pqn import FusedGradient, Towers
from qrag_jax.learners.state import init_state
from qrag_jax.rollouts.chunks import Draws
from qrag_jax.runtime.compilation import CompilationCounter
from qrag_jax.runtime.mesh import shard_batch
from tests.devices import mesh_of
from tests.learners.three_steps import (
    OPTIMIZER,
    PEAK,
    SCHEDULE,
    STEPS,
    build,
    first_state,
    flat,
    three_steps,
)
from tests.rollouts.play_setup import (
    CONFIG,
    EPISODES,
    ONE_BUCKET_ACTOR,
    PQN,
    episodes,
    feedback,
    jitted_gradient,
    online,
)

CHUNKS = episodes(0).chunk_mask.sum(1)
NAMES = {
    "loss",
    "mean_q",
    "mean_target",
    "td_error",
    "entropy",
    "return",
    "fact_em",
    "grad_norm",
    "learning_rate",
    "alpha",
    "padding_share",
    "env_steps",
    "skipped",
}


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return mesh_of()


@pytest.fixture(scope="module")
def step(mesh):
    return build(mesh)


@pytest.fixture(scope="module")
def whole(mesh, step) -> dict[str, np.ndarray]:
    return three_steps(mesh, step)


def check_equal(found, expected, params_atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if "params" in name:
            np.testing.assert_allclose(found[name], value, atol=params_atol, err_msg=name)
        elif "padding_share" not in name:  # blocks are filled differently
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_training_moves_the_parameters(whole) -> None:
    start = flat({"params": online()})
    for name, value in start.items():
        moved = np.abs(whole[name] - value).max()
        # Keys' biases shift all scores of a query alike: softmax, hence the loss, ignores them.
        assert moved > 1e-3 or "'key']['bias'" in name, name
        target = np.abs(whole[name.replace("['params']", "['target_params']")] - value).max()
        assert 0 < target <= 0.3 * moved + 1e-7, name


def test_metrics(whole) -> None:
    taken = 0.0
    for number in range(STEPS):
        metrics = {name: whole[f"['metrics {number}']['{name}']"] for name in NAMES}
        assert sum(f"metrics {number}" in name for name in whole) == len(NAMES)
        for name, value in metrics.items():
            assert value.shape == (), name
            assert value.dtype == np.float32, name
            assert np.isfinite(value), name
        taken += sum(min(CONFIG.max_steps, n) for n in episodes(number).chunk_mask.sum(1))
        assert metrics["env_steps"] == taken
        rate = float(SCHEDULE(number))
        assert metrics["learning_rate"] == pytest.approx(rate)
        assert metrics["alpha"] == pytest.approx(PQN.alpha * rate / PEAK, rel=1e-5)
        assert 0 < metrics["padding_share"] < 1
        assert 0 <= metrics["fact_em"] <= 1
        assert metrics["grad_norm"] > 0


def test_one_step_is_the_update_put_together_by_hand(whole) -> None:
    batch, state = episodes(0), init_state(online(), OPTIMIZER, jax.random.key(42))
    keys = jax.random.split(jax.random.fold_in(state.key, 0), EPISODES)
    gradient_of = FusedGradient(ONE_BUCKET_ACTOR, PQN, feedback)
    draws = Draws(keys, np.float32(PQN.alpha * float(SCHEDULE(0)) / PEAK), True)
    gradient, sums = jitted_gradient(gradient_of, Towers(online(), online()), batch, draws)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(gradient)))
    transitions, present = float(sums.transitions), float(sums.episodes)
    expected = {
        "loss": sums.loss / transitions,
        "mean_q": sums.q / transitions,
        "mean_target": sums.target / transitions,
        "td_error": sums.td_error / transitions,
        "entropy": sums.entropy / transitions,
        "return": sums.reward / present,
        "fact_em": sums.solved / present,
        "grad_norm": norm / transitions,
        "padding_share": 1 - sums.real_tokens / sums.computed_tokens,
    }
    assert present == 6
    for name, value in expected.items():
        found = float(whole[f"['metrics 0']['{name}']"])
        assert found == pytest.approx(float(value), rel=1e-4, abs=1e-6), name
    # 2·learning_start environment steps act at random: the first two batches, not the third.
    counts = np.minimum(CONFIG.max_steps, episodes(0).chunk_mask.sum(1))
    expected_entropy = sum(np.log(n - t) for n, c in zip(CHUNKS, counts) for t in range(c))
    for number in (0, 1, 2):
        uniform = expected_entropy / counts.sum()
        entropy = float(whole[f"['metrics {number}']['entropy']"])
        assert (entropy == pytest.approx(uniform, rel=1e-5)) == (number < 2)


def test_micro_batches_give_the_whole_batchs_step(mesh, whole) -> None:
    check_equal(three_steps(mesh, build(mesh, accumulation=4)), whole, params_atol=1e-6)


def test_eight_devices_give_the_same_step(whole) -> None:
    mesh = mesh_of(4, 2)
    check_equal(three_steps(mesh, build(mesh)), whole, params_atol=1e-5)


def test_a_step_without_finite_numbers_learns_nothing_and_the_next_one_goes_on(mesh, step) -> None:
    state, _ = step(first_state(mesh), shard_batch(mesh, episodes(0)))
    env_steps, good = int(state.env_steps), state.params["word_embeddings"]
    # A weight that is infinite for the length of one step.
    poisoned = {**state.params, "word_embeddings": good.at[0, 5, 3].set(np.inf)}
    state = state._replace(params=poisoned)
    before = flat({name: getattr(state, name) for name in ("params", "target_params", "opt_state")})
    state, metrics = step(state, shard_batch(mesh, episodes(1)))
    assert float(metrics["skipped"]) == 1
    after = flat({name: getattr(state, name) for name in ("params", "target_params", "opt_state")})
    changed = [name for name in after if after[name].tobytes() != before[name].tobytes()]
    assert len(changed) == 1  # the schedule's count
    assert (int(before[changed[0]]), int(after[changed[0]])) == (1, 2)
    assert (int(state.step), float(metrics["learning_rate"])) == (2, float(SCHEDULE(1)))
    assert int(state.env_steps) > env_steps
    healed = state.params["word_embeddings"].at[0, 5, 3].set(0.0)
    state = state._replace(params={**state.params, "word_embeddings": healed})
    state, metrics = step(state, shard_batch(mesh, episodes(2)))
    assert float(metrics["skipped"]) == 0
    assert all(np.isfinite(float(value)) for value in metrics.values())
    assert float(metrics["learning_rate"]) == float(SCHEDULE(2))
    assert not np.array_equal(flat(state.params)["['word_embeddings']"], healed)


def test_later_steps_compile_nothing_and_transfer_nothing(mesh, step, whole) -> None:
    assert step._cache_size() == 1  # the steps of `whole`, the first included
    state, _ = step(first_state(mesh), shard_batch(mesh, episodes(0)))
    batches = [shard_batch(mesh, episodes(seed)) for seed in (1, 2)]
    jax.block_until_ready((state, batches))
    counter = CompilationCounter()
    with jax.transfer_guard("disallow"):
        for batch in batches:
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
    assert counter.count == 0
    assert int(state.step) == 3
    # The guard does guard: a batch that is still on the host is not let through.
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        jax.jit(lambda batch: batch.sample + 1)(episodes(0))


def test_the_states_buffers_are_donated(mesh, step) -> None:
    state, batch = first_state(mesh), shard_batch(mesh, episodes(0))
    new, _ = step(state, batch)
    trees = state.params, state.target_params, state.opt_state
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(trees))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((new, batch)))


def test_the_same_state_and_batch_give_the_same_numbers(mesh, step, whole) -> None:
    again = three_steps(mesh, step)
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
