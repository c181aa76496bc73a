"""Compares gradients leaf by leaf."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def check_gradients(found: Any, expected: Any) -> None:
    """Every leaf is within 1e-4 of the largest entry of its own, or of a thousandth of them all."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert largest > 0
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
    ):
        scale = max(np.abs(wanted).max(), 1e-3 * largest)
        np.testing.assert_allclose(got, wanted, atol=1e-4 * scale, err_msg=str(path))
