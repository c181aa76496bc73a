"""Adam that a step without finite numbers leaves as it was (Kingma & Ba, arXiv 1412.6980)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def keep_unless(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    """The leaves of `new` where the condition (a scalar) holds, else those of `old`, bit for bit.

    Done on every result by itself it becomes part of the loop that computes it: nothing is read
    twice and buffers are reused. (Results chosen after the whole update need a second copy of all
    moments; `jax.lax.cond` has a GPU wait for the host.)
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, with its state, whose update takes `finite`, a bool scalar.

    Where it is False the moments and their count stay, and the updates mean nothing.
    """

    def update(
        gradient: Any,
        state: Any,
        params: Any | None = None,
        *,
        finite: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        mu = optax.tree.update_moment(gradient, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(gradient, state.nu, beta2, 2)
        count = state.count + jnp.asarray(finite, jnp.int32)
        mu, nu = keep_unless(finite, mu, state.mu), keep_unless(finite, nu, state.nu)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mu, beta1, count),
            optax.tree.bias_correction(nu, beta2, count),
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(
        optax.scale_by_adam(beta1, beta2, eps).init, update
    )
