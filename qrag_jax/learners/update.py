"""How a learner's functions become programs on the mesh, and what every update ends with.

A learner gives the gradients of a summed loss. All else is here: they are divided, checked and
applied, targets and critic follow, steps are counted, and the jitted program gets the state's
buffers to write into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.learners.optimizers import keep_unless, optimizer_step
from qrag_jax.learners.placement import base_shardings, both, of_one_tower, place, shapes_on
from qrag_jax.learners.state import Critic, Parts, TrainState
from qrag_jax.models.compute.ragged import TokenCount
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import Loaded
from qrag_jax.runtime.platform import compiler_options

Metrics = dict[str, jax.Array]
Update = Callable[..., tuple[TrainState, Metrics]]  # (state, episodes), then a base if any
REPLICATED = PartitionSpec()
Tree = TypeVar("Tree")


class Sums(NamedTuple):
    """Totals of a batch or of a part of it; those of parts are `added` to those of the whole."""

    loss: jax.Array  # what the gradient is of
    tokens: TokenCount  # that were computed
    # by the name of a metric, its sum and the number that it is a mean over
    means: dict[str, tuple[jax.Array, jax.Array]]
    largest: dict[str, jax.Array]  # by the name of a metric, its highest value

    def metrics(self) -> Metrics:
        """The means, 0 where they are over nothing, and the highest values."""
        means = {
            name: total / jnp.where(number > 0, number, 1.0)
            for name, (total, number) in self.means.items()
        }
        return means | self.largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """A policy and how it learns; the kinds of policies add what they compute with."""

    mesh: Mesh
    shardings: TrainState  # where the training state lives (`Parts.shardings`)
    parts: Parts  # what the state is made of; its optimizers
    schedule: optax.Schedule  # optimizer step → learning rate
    # where the frozen base of adapters lives; None if all weights are trained
    base_shardings: Params | None = None
    config: Any = None  # constants of the algorithm

    @classmethod
    def of(cls, mesh: Mesh, loaded: Loaded, parts: Parts, **further: Any) -> Self:
        """The learner that starts from a loaded model; `further` are the other fields."""
        rules = loaded.trunk.partition_rules()
        return cls(
            mesh=mesh,
            shardings=parts.shardings(mesh, rules, loaded.trained),
            parts=parts,
            base_shardings=base_shardings(mesh, rules, loaded.base),
            **further,
        )

    def on_mesh(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of an array that is split so."""
        return NamedSharding(self.mesh, spec)

    def first_state(self, tower: Params, seed: int, second: Params | None = None) -> TrainState:
        """The first state on the mesh; no device ever holds more than its part of an array.

        The towers are as `placement.both_towers` takes them.
        """

        def build(*towers: Params) -> TrainState:
            params = both(*towers) if self.parts.has_targets else towers[0]
            return self.parts.build(params, jax.random.key(seed))

        of_params = self.shardings.params
        one = of_one_tower(of_params) if self.parts.has_targets else of_params
        towers = [place(each, one) for each in (tower, second) if each is not None]
        return jax.jit(build, out_shardings=self.shardings)(*towers)

    def placed_base(self, stored: Params, *, placed: bool = True) -> tuple[Params, ...]:
        """The frozen base of adapters on the mesh, or its shapes; () if all weights are trained."""
        if self.base_shardings is None:
            return ()
        return ((place if placed else shapes_on)(stored, self.base_shardings),)

    @cached_property
    def next_stage(self) -> Callable[[TrainState], TrainState]:
        """Makes the state with which a later stage of training begins: its moments are zero.

        A KL is to the parameters of its start; targets and a critic begin as the policy is then.
        """

        def build(state: TrainState) -> TrainState:
            begun = self.parts.build(state.params, state.key)
            return begun._replace(step=state.step, env_steps=state.env_steps)

        return jax.jit(build, out_shardings=self.shardings)

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
        Metrics are float32 scalars. `episodes` are shardings of what is learned from.
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
    ) -> tuple[TrainState, Metrics]:
        """One optimizer step on the mean loss, then `target ← (1-τ)·target + τ·online`.

        If the loss or a gradient's norm is not finite, nothing is learned: parameters, critic,
        targets and moments stay the same, bit for bit; the schedules still advance. The counts of
        the state are the old ones (`counted`).

        Args:
            gradients: of the summed loss.
            divisor: of the gradients' sums, above 0.
            awake: else the policy learns nothing either.

        Returns:
            The state, and `skipped` and the norms of the gradients before clipping.
        """
        of_policy, of_critic = jax.tree.map(lambda leaf: leaf / divisor, gradients)
        metrics = {"grad_norm": optax.tree.norm(of_policy)}
        if of_critic is not None:
            metrics["critic_grad_norm"] = optax.tree.norm(of_critic)
        finite = jnp.isfinite(jnp.stack([loss, *metrics.values()])).all()
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
        return state, metrics | {"skipped": 1.0 - finite.astype(jnp.float32)}


def padding_share(tokens: TokenCount) -> Metrics:
    """The share of the computed tokens that carry no text; the counts may be of several steps."""
    share = 1.0 - tokens.real.sum() / jnp.maximum(tokens.computed.sum(), 1.0)
    return {"padding_share": share}


def counted(state: TrainState, actions: jax.Array, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """The state after an update from so many actions, and the metrics with their sum."""
    env_steps = state.env_steps + actions.astype(jnp.int32)
    state = state._replace(step=state.step + 1, env_steps=env_steps)
    return state, metrics | {"env_steps": env_steps.astype(jnp.float32)}


# ------------------------------------------------------------------------ sums


def added(one: Tree, other: Tree) -> Tree:
    """The sums of two parts of a batch, as one."""
    return _totals(jnp.add, jnp.maximum, one, other)


def over_axis(sums: Tree) -> Tree:
    """The sums of parts of a batch, `[parts, …]`, as one."""
    return _totals(partial(jnp.sum, axis=0), partial(jnp.max, axis=0), sums)


def _totals(add: Callable[..., Any], highest: Callable[..., Any], *trees: Tree) -> Tree:
    def total(path: tuple[Any, ...], *leaves: jax.Array) -> jax.Array:
        is_largest = any(getattr(key, "name", "") == "largest" for key in path)
        return (highest if is_largest else add)(*leaves)

    return jax.tree_util.tree_map_with_path(total, *trees)
