"""How a learner's functions become programs on the mesh, and what every update ends with.

A learner gives the gradients of a summed loss. All else is here: they are divided, checked and
applied, targets and critic follow, steps are counted, and the jitted program gets the state's
buffers to write into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners.optimizers import keep_unless, optimizer_step
from qrag_jax.learners.state import Critic, Parts, TrainState
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.heads.embedding import Params
from qrag_jax.runtime.platform import compiler_options

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[TrainState, Metrics]]  # (state, episodes), then a base if any
REPLICATED = PartitionSpec()
Tree = TypeVar("Tree")


class Step(NamedTuple):
    """What one optimizer step tells; scalars, or `[steps]`.

    norm, critic_norm: of the gradients before clipping.
    finite: whether loss and gradients were; else nothing was learned.
    """

    norm: jax.Array
    critic_norm: jax.Array
    finite: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """A policy and how it learns; the kinds of policies add what they compute with.

    Attributes:
        shardings: where the training state lives (`Parts.shardings`).
        parts: what the state is made of; its optimizers.
        schedule: optimizer step → learning rate.
        base_shardings: where the frozen base of adapters lives; None if all weights are trained.
    """

    mesh: Mesh
    shardings: TrainState
    parts: Parts
    schedule: optax.Schedule
    base_shardings: Params | None = None

    def on_mesh(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of an array that is split so."""
        return NamedSharding(self.mesh, spec)

    def program(
        self, function: Callable[..., Any], placed: tuple[Any, ...], out: Any, *donated: int
    ) -> Callable[..., Any]:
        """The jitted function, which takes a base as its last argument if there is one.

        Args:
            placed: shardings of all other arguments.
            out: shardings of what it returns.
            donated: numbers of the arguments whose buffers it may write into.
        """
        base = self.base_shardings
        return jax.jit(
            function,
            donate_argnums=donated,
            in_shardings=placed if base is None else (*placed, base),
            out_shardings=out,
            compiler_options=compiler_options(self.mesh, adapters=base is not None),
        )

    def update(self, function: Callable[..., Any], episodes: Any) -> Update:
        """The program `(state, episodes) → (state, metrics)`; the state's buffers are donated.

        With adapters it is `(state, episodes, base)`; the base is neither changed nor donated.

        Args:
            episodes: shardings of what is learned from.
        """
        out = self.shardings, self.on_mesh(REPLICATED)
        return self.program(function, (self.shardings, episodes), out, 0)

    def learn(
        self,
        state: TrainState,
        gradients: tuple[Params, Critic | None],
        loss: jax.Array,
        divisor: jax.Array,
        *,
        tau: float = 0.0,
        awake: jax.Array | bool = True,
    ) -> tuple[TrainState, Step]:
        """One optimizer step on the mean loss, then `target ← (1-τ)·target + τ·online`.

        If the loss or a gradient's norm is not finite, nothing is learned: parameters, critic,
        targets and moments stay the same, bit for bit; the schedules still advance. The counts of
        the state are the old ones (`counted`).

        Args:
            gradients: of the summed loss.
            divisor: of the sums, at least 1.
            awake: else the policy learns nothing either.
        """
        of_policy, of_critic = jax.tree.map(lambda leaf: leaf / divisor, gradients)
        norm, critic_norm = optax.tree.norm(of_policy), jnp.zeros((), jnp.float32)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if of_critic is not None:
            critic_norm = optax.tree.norm(of_critic)
            finite &= jnp.isfinite(critic_norm)
        params, opt_state = optimizer_step(
            state.params, state.opt_state, of_policy, self.parts.optimizer, finite & awake
        )
        state = state._replace(params=params, opt_state=opt_state)
        if of_critic is not None:
            assert self.parts.critic_optimizer is not None
            critic, critic_opt_state = optimizer_step(
                state.critic, state.critic_opt_state, of_critic, self.parts.critic_optimizer, finite
            )
            state = state._replace(critic=critic, critic_opt_state=critic_opt_state)
        if state.target_params is not None:
            moved = optax.incremental_update(params, state.target_params, tau)
            state = state._replace(target_params=keep_unless(finite, moved, state.target_params))
        return state, Step(norm, critic_norm, finite)


def in_steps(
    step: Callable[[TrainState, Any], tuple[TrainState, Tree]], state: TrainState, parts: Any
) -> tuple[TrainState, Tree]:
    """Optimizer steps by parts of a batch, one after the other, and what they tell, `[steps]`.

    Args:
        step: `(state, part)` → the state and what it tells.
        parts: on axis 0; None: there is one step, which gets None.
    """
    if parts is not None:
        return jax.lax.scan(step, state, parts)
    state, result = step(state, None)
    return state, jax.tree.map(lambda leaf: leaf[None], result)


def step_metrics(step: Step, rate: jax.Array, tokens: TokenCount) -> Metrics:
    """What every update tells, whatever it learns.

    Args:
        step: of all its steps.
        rate: the learning rate of the first.
        tokens: of all its steps.
    """
    return {
        "grad_norm": step.norm.mean(),
        "skipped": 1.0 - step.finite.astype(jnp.float32).min(),
        "learning_rate": rate,
        "padding_share": 1.0 - tokens.real.sum() / jnp.maximum(tokens.computed.sum(), 1.0),
    }


def counted(state: TrainState, actions: jax.Array, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """The state after an update from so many actions, and the metrics with their sum."""
    env_steps = state.env_steps + actions.astype(jnp.int32)
    state = state._replace(step=state.step + 1, env_steps=env_steps)
    return state, metrics | {"env_steps": env_steps.astype(jnp.float32)}


# ------------------------------------------------------------------------ sums

_LARGEST = "largest"  # fields of this name are maxima, all others of sums are sums


def added(one: Tree, other: Tree) -> Tree:
    """The sums of two parts of a batch, as one."""

    def total(path: tuple[Any, ...], one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.maximum(one, other) if _is_largest(path) else one + other

    return jax.tree_util.tree_map_with_path(total, one, other)


def over_axis(sums: Tree) -> Tree:
    """The sums of parts of a batch, `[parts, …]`, as one."""

    def total(path: tuple[Any, ...], parts: jax.Array) -> jax.Array:
        return parts.max(axis=0) if _is_largest(path) else parts.sum(axis=0)

    return jax.tree_util.tree_map_with_path(total, sums)


def _is_largest(path: tuple[Any, ...]) -> bool:
    return getattr(path[-1], "name", "") == _LARGEST
