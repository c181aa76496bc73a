"""What the names of config.encoder.dtype stand for, and that bfloat16 changes little."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.compute import precision as module
from qrag_jax.models.compute.attention import padded_attention
from qrag_jax.models.compute.precision import Precision, precision
from qrag_jax.runtime.platform import Platform

FULL, HALF = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def test_names() -> None:
    cpu, tpu = Platform("cpu"), Platform("tpu")
    hopper, volta = Platform("gpu", (9, 0)), Platform("gpu", (7, 0))
    assert precision("float32", cpu) == Precision(FULL, FULL, "products")
    assert precision("bfloat16", cpu) == Precision(FULL, HALF, "products")
    assert (
        precision("auto", hopper) == precision("bfloat16", hopper) == Precision(HALF, HALF, "fused")
    )
    assert precision("float32", hopper) == Precision(FULL, FULL, "library")
    assert precision("auto", volta) == Precision(FULL, FULL, "library")
    assert precision("auto", tpu) == Precision(HALF, HALF, "library")
    as_gpus_do = precision("bfloat16", cpu, "bfloat16")
    assert as_gpus_do == Precision(HALF, HALF, "products")
    assert precision("auto", hopper, "float32") == Precision(FULL, HALF, "library")
    assert precision("bfloat16", hopper, "bfloat16") == precision("auto", hopper)
    with pytest.raises(InputError, match=r"activations is bfloat16, but products are in float32"):
        precision("float32", hopper, "bfloat16")
    with pytest.raises(InputError, match=r"config.encoder.activations is 'half'; use one of auto"):
        precision("auto", cpu, "half")
    with pytest.raises(
        InputError, match=r"GPUs have from compute capability 8\.0 on, and this one"
    ):
        precision("bfloat16", volta)
    with pytest.raises(InputError, match=r"config.encoder.dtype is 'half'; use one of auto, "):
        precision("half", cpu)


@pytest.mark.parametrize(
    ("flags", "products"), [("sse4_2 amx_bf16 amx_tile", HALF), ("avx2 avx512_bf16", FULL)]
)
def test_auto_on_cpu_asks_for_a_matrix_unit(flags, products, tmp_path: Path, monkeypatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: fpu {flags}\n")
    real = module._has_matrix_unit
    monkeypatch.setattr(module, "_has_matrix_unit", lambda: real(cpuinfo))
    assert precision("auto", Platform("cpu")) == Precision(FULL, products)
    assert not real(tmp_path / "absent")


def test_attention_with_bfloat16_products_of_float32_activations() -> None:
    rng = np.random.default_rng(0)
    *qkv, cotangent = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((4, 3, 9, 2, 8)))
    lengths = jnp.array([9, 1, 5], jnp.int32)

    def attend(products):
        return jax.vjp(
            lambda *x: padded_attention(*x, lengths, precision=Precision(products=products)), *qkv
        )

    (result, pull), (exact, exact_pull) = attend(HALF), attend(FULL)
    assert result.dtype == FULL
    np.testing.assert_allclose(result, exact, atol=0.03)
    assert not np.array_equal(result, exact)
    for found, expected in zip(pull(cotangent), exact_pull(cotangent), strict=True):
        assert found.dtype == FULL
        np.testing.assert_allclose(found, expected, atol=0.03 * float(jnp.abs(expected).max()))
