"""XLA's options for programs with adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from qrag_jax.runtime.platform import compiler_options


@pytest.mark.parametrize(("kind", "adapters"), [("gpu", True), ("gpu", False), ("tpu", True)])
def test_products_stay_apart_on_gpus_with_adapters(kind: str, adapters: bool) -> None:
    device = SimpleNamespace(platform=kind)
    mesh = cast(Any, SimpleNamespace(devices=np.array([device])))
    expected = {"xla_gpu_dot_merger_threshold_mb": 0} if kind == "gpu" and adapters else None
    assert compiler_options(mesh, adapters=adapters) == expected


def test_a_cpu_has_none() -> None:
    assert compiler_options(Mesh(np.array(jax.devices()[:1]), ("data",)), adapters=True) is None
