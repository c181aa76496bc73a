"""Learning rates by hand; AdamW with its clip, and Muon of each matrix, against optax."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qrag_jax.learners.optimizers import (
    SCHEDULES,
    OptimizerConfig,
    learning_rate_schedule,
    make_optimizer,
)

CONFIG = OptimizerConfig(2e-3, weight_decay=0.1, warmup_steps=4, total_steps=20)
# The share of the way from the peak to its end, over the share of the time.
LEFT = {
    "constant": lambda over: 1.0,
    "linear": lambda over: 1.0 - over,
    "cosine": lambda over: 0.5 * (1 + math.cos(math.pi * over)),
    "quarter_cosine": lambda over: math.cos(0.5 * math.pi * over),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name: str) -> None:
    """A warm-up that rises by equal steps from the first one on, then a decay to the end's rate."""
    for warmup, final in itertools.product((0, 1, 4, 19), (0.1, 0.0)):
        how = {"schedule": name, "warmup_steps": warmup, "final_ratio": final}
        schedule = learning_rate_schedule(dataclasses.replace(CONFIG, **how))
        found = np.asarray(jax.vmap(schedule)(jnp.arange(23)))
        for step in range(23):
            over = min(max(step - warmup, 0) / (20 - warmup), 1.0)
            end = 1.0 if name == "constant" else final
            expected = 2e-3 * (end + (1 - end) * LEFT[name](over))
            if step < warmup:
                expected = 2e-3 * (step + 1) / warmup
            assert found[step] == pytest.approx(expected, rel=1e-5, abs=1e-9)
        assert (found[:20] > 0).all()  # no step is lost to a rate of zero
    for warmup in (20, 30):  # as long as the run, and longer
        config = dataclasses.replace(CONFIG, warmup_steps=warmup, final_ratio=0.0)
        assert min(float(learning_rate_schedule(config)(step)) for step in (0, 19)) > 0


def test_equals_optax_adamw_bit_for_bit_and_has_its_state() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
    settings = {"b1": CONFIG.beta1, "b2": CONFIG.beta2, "eps": CONFIG.eps}
    plain = optax.chain(
        optax.clip_by_global_norm(CONFIG.clip_norm),
        optax.adamw(learning_rate_schedule(CONFIG), weight_decay=CONFIG.weight_decay, **settings),
    )
    ours = make_optimizer(CONFIG)
    state, expected = ours.init(params), plain.init(params)
    update, plain_update = jax.jit(ours.update), jax.jit(plain.update)
    for _ in range(4):
        gradient = {"w": rng.standard_normal((5, 3)).astype(np.float32)}
        found, state = update(gradient, state, params, finite=True)
        wanted, expected = plain_update(gradient, expected, params)
        # Checkpoints name every part of it.
        assert jax.tree.structure(state) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, (found, state), (wanted, expected))


# ------------------------------------------------------------------------ Muon

MUON = dataclasses.replace(
    CONFIG, clip_norm=1e9, total_steps=10, warmup_steps=2, matrices="muon", muon_rate=4.0
)
ADAM = dataclasses.replace(MUON, matrices="adam")
# Two towers of three layers; one map widens, the other narrows.
SHAPES = {
    "words": (2, 7, 4),
    "kernel": (3, 3),  # beside the layers
    "layers": {
        "up": {"kernel": (2, 3, 4, 9), "bias": (2, 3, 9), "lora_a": (2, 3, 4, 2)},
        "down": {"kernel": (2, 3, 9, 4)},
        "norm": {"scale": (2, 3, 4)},
    },
}


def drawn(seed: int):
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))


def test_each_matrix_moves_as_alone_by_muon_and_all_else_as_by_adamw() -> None:
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3, 4)]
    optimizer, adam = make_optimizer(MUON), make_optimizer(ADAM)
    state, adam_state = optimizer.init(params), adam.init(params)
    update, adam_update = jax.jit(optimizer.update), jax.jit(adam.update)
    muon, alone = optax.contrib.scale_by_muon(), {}
    muon_update = jax.jit(muon.update)
    for step, gradient in enumerate(gradients):
        updates, state = update(gradient, state, params, finite=True)
        others, adam_state = adam_update(gradient, adam_state, params, finite=True)
        rate = 4.0 * float(learning_rate_schedule(MUON)(step))
        for name, (tower, layer) in ((n, at) for n in ("up", "down") for at in np.ndindex(2, 3)):
            kernel = params["layers"][name]["kernel"][tower, layer]
            of = (name, tower, layer)
            own = gradient["layers"][name]["kernel"][tower, layer]
            moved, alone[of] = muon_update(own, alone.get(of) or muon.init(own))
            wider = max(1.0, own.shape[1] / own.shape[0]) ** 0.5  # Jordan's rule
            expected = -rate * (wider * np.asarray(moved) + 0.1 * kernel)
            found = np.asarray(updates["layers"][name]["kernel"][tower, layer])
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
        for both in (updates, others):
            del both["layers"]["up"]["kernel"], both["layers"]["down"]
        jax.tree.map(np.testing.assert_array_equal, updates, others)
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    _, after = update(broken, state, params, finite=False)
    changed = [
        (int(one), int(two))
        for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True)
        if not np.array_equal(one, two)
    ]
    # The schedules of both advance, so that the next batch has the rate of its number.
    assert changed == [(4, 5), (4, 5)]
