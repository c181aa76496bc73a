"""The optimizer of every system here: a global-norm clip, AdamW or Muon, warm-up and decay."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from qrag_jax.errors import Natural, Positive, Share, Weight, one_of
from qrag_jax.models.trunks.transformer import LAYERS
from qrag_jax.runtime.config_fields import internal

MATRICES, OTHERS = "matrices", "others"
_KERNEL = "kernel"


def matrices_and_others(params: Any) -> Any:
    """A tree like `params` that says of each leaf whether it is a matrix inside a layer.

    The word table, norms, biases, adapters and what stands next to the layers are others: Muon is
    for the linear maps between hidden states.
    """

    def label(path: tuple[Any, ...], _: Any) -> str:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return MATRICES if LAYERS in names and names[-1] == _KERNEL else OTHERS

    return jax.tree_util.tree_map_with_path(label, params)


def scale_by_kept_muon(beta: float = 0.95) -> optax.GradientTransformationExtraArgs:
    """Muon of leaves `[..., in, out]`, each matrix by itself.

    An update has singular values near 1, times √(out / in) where a map widens (Jordan's rule). Its
    update function takes `finite` as that of `scale_by_adam`. The momentum looks ahead as
    Nesterov's.
    """

    def last_two(params: Any) -> Any:
        return jax.tree.map(lambda leaf: MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params)

    muon = scale_by_muon(beta=beta, weight_dimension_numbers=last_two)

    def update(
        gradient: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        # Every product of the iteration is of float32 values in full: on a GPU, too.
        with jax.default_matmul_precision("float32"):
            updates, new = muon.update(gradient, state, params)
        widened = jax.tree.map(
            lambda leaf: leaf * max(1.0, leaf.shape[-1] / leaf.shape[-2]) ** 0.5, updates
        )
        return widened, keep_unless(finite, new, state)

    return optax.GradientTransformationExtraArgs(muon.init, update)


def keep_unless(condition: jax.Array | bool, new: Any, old: Any) -> Any:
    """The leaves of `new` if the condition (a scalar) holds, else those of `old`, bit for bit.

    Applied to each result separately, the choice becomes part of the loop that computes the result:
    nothing is read twice, and buffers are reused. (A choice after the whole update would need a
    second copy of all moments; `jax.lax.cond` makes a GPU wait for the host.)
    """
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def scale_by_adam(beta1: float, beta2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """As `optax.scale_by_adam`, with the same state, but its update takes a bool scalar `finite`.

    If it is False, the moments and their count do not change, and the returned updates have no
    meaning.
    """

    def update(
        gradient: Any, state: Any, params: Any = None, *, finite: Any = True, **_: Any
    ) -> tuple[Any, optax.ScaleByAdamState]:
        mu = optax.tree.update_moment(gradient, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(gradient, state.nu, beta2, 2)
        count = state.count + jnp.asarray(finite, jnp.int32)
        # Updates are of the moments that are kept: a compiler would else round them otherwise.
        mu, nu = keep_unless(finite, mu, state.mu), keep_unless(finite, nu, state.nu)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mu, beta1, count),
            optax.tree.bias_correction(nu, beta2, count),
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    init = optax.scale_by_adam(beta1, beta2, eps).init
    return optax.GradientTransformationExtraArgs(init, update)


def optimizer_step(
    params: Any,
    opt_state: optax.OptState,
    gradient: Any,
    optimizer: optax.GradientTransformation,
    finite: jax.Array,
) -> tuple[Any, optax.OptState]:
    """New parameters and moments; the old ones, bit for bit, if `finite` (a scalar) is False.

    No parameter becomes non-finite: an element whose own update overflows keeps its value.
    """
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradient, opt_state, params, finite=finite
    )
    moved = optax.apply_updates(params, updates)
    kept = jax.tree.map(lambda n, o: keep_unless(finite & jnp.isfinite(n), n, o), moved, params)
    return kept, opt_state


SCHEDULES = ("constant", "linear", "cosine", "quarter_cosine")
ADAM, MUON = METHODS = ("adam", "muon")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Section `optimizer`.

    Let s be the share of the decay that is done, and r the `final_ratio`. The schedule "cosine" is
    the usual half of a cosine, r + (1 - r)·(1 + cos πs) / 2. "quarter_cosine" is that of Q-RAG,
    r + (1 - r)·cos(πs / 2), which stays high for longer: for r = 0.1 it is 0.74 at half time, and
    "cosine" 0.55.

    Attributes:
        total_steps: optimizer steps of the run.
    """

    learning_rate: Positive = 1.5e-5  # lr_0, peak
    weight_decay: Weight = 5e-4  # decoupled, on all parameters
    beta1: Share = 0.9  # β_1
    beta2: Share = 0.98  # β_2
    eps: Positive = 1e-6  # ε
    clip_norm: Positive = 2.0  # largest global norm of the gradient
    # After warm-up: constant, linear, cosine (half of a cosine) or quarter_cosine (Q-RAG's).
    schedule: Annotated[str, one_of(SCHEDULES)] = "quarter_cosine"
    final_ratio: Share = 0.1  # last learning rate divided by the peak
    warmup_steps: Natural = 1000  # steps of the linear rise to lr_0
    # How the layers' linear maps learn: adam, as all else and as adapters do, or muon
    matrices: Annotated[str, one_of(METHODS)] = ADAM
    muon_rate: Positive = 5.0  # learning rate of what muon learns, divided by that of all else
    total_steps: int = internal(10_000)


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Optimizer step (from 0) → learning rate; never 0 before the last step."""
    peak, final = config.learning_rate, config.learning_rate * config.final_ratio
    warmup = max(config.warmup_steps, 1)
    decay = max(config.total_steps - config.warmup_steps, 1)

    def quarter_cosine(step: Any) -> jax.Array:
        # In float32 the cosine of a right angle is a little below 0.
        left = jnp.maximum(jnp.cos(0.5 * math.pi * jnp.clip(step / decay, 0.0, 1.0)), 0.0)
        return peak * (config.final_ratio + (1.0 - config.final_ratio) * left)

    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, final, decay),
        "cosine": optax.cosine_decay_schedule(peak, decay, config.final_ratio),
        "quarter_cosine": quarter_cosine,
    }[config.schedule]
    # The first step already learns: with a rate of 0 it would be lost, and α_t would be almost 0.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW on all parameters, as in the published runs; or Muon on the layers' linear maps.

    Its update takes a bool scalar `finite`. If it is False, the moments do not change, the schedule
    still advances, and the returned updates have no meaning.
    """
    schedule = learning_rate_schedule(config)

    def learning(scaled: optax.GradientTransformation, factor: float = 1.0):
        # The parts of `optax.adamw`.
        return optax.chain(
            scaled,
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(lambda step: factor * schedule(step)),
        )

    rule = learning(scale_by_adam(config.beta1, config.beta2, config.eps))
    if config.matrices == MUON:
        muon = learning(scale_by_kept_muon(), config.muon_rate)
        rule = optax.partition({MATRICES: muon, OTHERS: rule}, matrices_and_others)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
