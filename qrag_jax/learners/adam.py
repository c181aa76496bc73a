"""Adam whose state does not change in a step that is not finite (Kingma & Ba, arXiv 1412.6980)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def keep_unless(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    """The leaves of `new` if the condition (a scalar) holds, else those of `old`, bit for bit.

    Applied to each result separately, the choice becomes part of the loop that computes the result:
    nothing is read twice, and buffers are reused. (A choice after the whole update would need a
    second copy of all moments; `jax.lax.cond` makes a GPU wait for the host.)
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """As `optax.scale_by_adam`, with the same state, but its update takes a bool scalar `finite`.

    If `finite` is False, the moments and their count do not change, and the returned updates have
    no meaning.
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
