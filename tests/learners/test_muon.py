"""Muon against a slow version in NumPy, its kept state, and which weights it is for."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.errors import InputError
from qrag_jax.learners.optimizers import (
    MATRICES,
    OTHERS,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
    matrices_and_others,
)

CONFIG = OptimizerConfig(
    learning_rate=1e-3,
    weight_decay=0.1,
    beta2=0.98,
    clip_norm=1e9,
    schedule="linear",
    warmup_steps=2,
    total_steps=10,
    matrices="muon",
    muon_rate=4.0,
)
# Two towers of three layers; one map widens, the other narrows.
SHAPES = {
    "words": (2, 7, 4),
    "layers": {
        "up": {"kernel": (2, 3, 4, 9), "bias": (2, 3, 9)},
        "down": {"kernel": (2, 3, 9, 4)},
        "norm": {"scale": (2, 3, 4)},
    },
}


def drawn(seed: int):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five steps of Newton and Schulz by Jordan's numbers, on the flat side."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_by_hand(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Updates `[in, out]` of one matrix before rates: Nesterov momentum 0.95, orthogonalised."""
    momentum, found = np.zeros(gradients[0].shape, np.float64), []
    for count, gradient in enumerate(gradients, 1):
        momentum = 0.95 * momentum + 0.05 * gradient
        ahead = 0.95 * momentum / (1 - 0.95 ** (count + 1)) + 0.05 * gradient / (1 - 0.95**count)
        wide = max(1.0, gradient.shape[1] / gradient.shape[0]) ** 0.5
        found.append(wide * orthogonalised(ahead))
    return found


def test_labels_only_linear_maps_of_layers() -> None:
    labels = matrices_and_others({"critic": drawn(0), "kernel": jnp.zeros((3, 3))})
    inside = labels["critic"]["layers"]
    assert inside["up"] == {"kernel": MATRICES, "bias": OTHERS}
    assert inside["down"]["kernel"] == MATRICES
    assert inside["norm"]["scale"] == OTHERS
    assert labels["critic"]["words"] == OTHERS
    assert labels["kernel"] == OTHERS


def test_adapters_alone_learn_as_by_adamw() -> None:
    rng = np.random.default_rng(0)
    params = {"layers": {"up": {"lora_a": rng.standard_normal((3, 4, 2)).astype(np.float32)}}}
    gradient = jax.tree.map(lambda leaf: leaf[::-1].copy(), params)
    found = []
    for config in (CONFIG, _adam()):
        optimizer = make_optimizer(config)
        found.append(optimizer.update(gradient, optimizer.init(params), params, finite=True)[0])
    np.testing.assert_array_equal(*(each["layers"]["up"]["lora_a"] for each in found))


@pytest.mark.parametrize(("field", "value"), [("matrices", "sgd"), ("muon_rate", 0.0)])
def test_bad_fields_are_named(field: str, value) -> None:
    with pytest.raises(InputError, match=rf"config\.optimizer\.{field} is"):
        dataclasses.replace(CONFIG, **{field: value})


def test_each_matrix_moves_as_by_hand_and_all_else_as_by_adamw() -> None:
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3, 4)]
    optimizer, adam = make_optimizer(CONFIG), make_optimizer(_adam())
    state, adam_state = optimizer.init(params), adam.init(params)
    update, adam_update = jax.jit(optimizer.update), jax.jit(adam.update)
    schedule = learning_rate_schedule(CONFIG)
    by_hand = {
        (name, tower, layer): muon_by_hand(
            [each["layers"][name]["kernel"][tower, layer] for each in gradients]
        )
        for name in ("up", "down")
        for tower in range(2)
        for layer in range(3)
    }
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, finite=True)
        others, adam_state = adam_update(gradient, adam_state, params, finite=True)
        rate = 4.0 * float(schedule(step))
        for (name, tower, layer), moved in by_hand.items():
            kernel = params["layers"][name]["kernel"][tower, layer]
            found = np.asarray(updates["layers"][name]["kernel"][tower, layer])
            expected = -rate * (moved[step] + 0.1 * kernel)
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
        np.testing.assert_array_equal(updates["words"], others["words"])
        np.testing.assert_array_equal(
            updates["layers"]["up"]["bias"], others["layers"]["up"]["bias"]
        )


def test_a_step_that_is_not_finite_leaves_the_momentum() -> None:
    params = drawn(0)
    optimizer = make_optimizer(CONFIG)
    update = jax.jit(optimizer.update)
    _, before = update(drawn(1), optimizer.init(params), params, finite=True)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    _, after = update(broken, before, params, finite=False)
    changed = [
        (one, two)
        for one, two in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if not np.array_equal(one, two)
    ]
    # The schedules of both advance, so that the next batch has the rate of its number.
    assert [(int(one), int(two)) for one, two in changed] == [(1, 2), (1, 2)]


def test_matrices_learn_where_gradients_are_lopsided() -> None:
    """A map whose inputs have very different sizes: Muon's step does not depend on them."""
    rng = np.random.default_rng(0)
    sizes = np.logspace(0, -2, 8)
    inputs = (rng.standard_normal((64, 8)) * sizes).astype(np.float32)
    goal = rng.standard_normal((8, 8)).astype(np.float32)

    def error(params) -> jax.Array:
        return jnp.square(inputs / sizes @ (params["layers"]["map"]["kernel"][0] - goal)).mean()

    def loss(params) -> jax.Array:
        return jnp.square(inputs @ (params["layers"]["map"]["kernel"][0] - goal)).mean()

    config = dataclasses.replace(
        CONFIG, learning_rate=0.02, weight_decay=0.0, schedule="linear", total_steps=200
    )
    optimizer = make_optimizer(config)
    params = {"layers": {"map": {"kernel": jnp.zeros((1, 8, 8))}}}
    first = float(error(params))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(200):
        params, state = step(params, state)
    assert float(error(params)) < 0.1 * first


def _adam() -> OptimizerConfig:
    return dataclasses.replace(CONFIG, matrices="adam")
