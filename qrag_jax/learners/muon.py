"""Muon: the momentum of a matrix is orthogonalised before it is applied.

Keller Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., arXiv 2502.16982.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from qrag_jax.learners.adam import keep_unless
from qrag_jax.models.trunks.trunk import LAYERS

MATRICES, OTHERS = "matrices", "others"
_KERNEL = "kernel"


def matrices_and_others(params: Any) -> Any:
    """A tree like `params` that says of each leaf whether it is a matrix inside a layer.

    The word table, norms, biases, adapters and what stands beside the layers are others: Muon is
    for the linear maps between hidden states.
    """

    def label(path: tuple[Any, ...], _: Any) -> str:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return MATRICES if LAYERS in names and names[-1] == _KERNEL else OTHERS

    return jax.tree_util.tree_map_with_path(label, params)


def scale_by_kept_muon(beta: float = 0.95) -> optax.GradientTransformationExtraArgs:
    """Muon of leaves `[..., in, out]`, each matrix on its own, with a state of optax's.

    An update has singular values near 1, times √(out / in) where a map widens (Jordan's rule). Its
    update function takes a bool scalar `finite`: if it is False, the momentum and its count do not
    change, and the returned updates have no meaning.

    Args:
        beta: of the momentum, which looks ahead as Nesterov's.
    """
    muon = scale_by_muon(beta=beta, weight_dimension_numbers=_last_two)

    def update(
        gradient: Any,
        state: MuonState,
        params: Any | None = None,
        *,
        finite: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, MuonState]:
        # Every product of the iteration is of float32 values in full: on a GPU, too.
        with jax.default_matmul_precision("float32"):
            updates, new = muon.update(gradient, state, params)
        widened = jax.tree.map(
            lambda leaf: leaf * max(1.0, leaf.shape[-1] / leaf.shape[-2]) ** 0.5, updates
        )
        return widened, keep_unless(jnp.asarray(finite), new, state)

    return optax.GradientTransformationExtraArgs(muon.init, update)


def _last_two(params: Any) -> Any:
    return jax.tree.map(lambda leaf: MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params)
