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

FULL, HALF = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def test_names() -> None:
    assert precision("float32") == Precision(FULL, FULL)
    on_cpu = jax.default_backend() == "cpu"
    assert precision("bfloat16") == Precision(FULL if on_cpu else HALF, HALF)
    with pytest.raises(InputError, match=r"config.encoder.dtype is 'half'; use one of auto, "):
        precision("half")


@pytest.mark.parametrize(
    ("flags", "products"), [("sse4_2 amx_bf16 amx_tile", HALF), ("avx2 avx512_bf16", FULL)]
)
def test_auto_on_cpu_asks_for_a_matrix_unit(flags, products, tmp_path: Path, monkeypatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: fpu {flags}\n")
    real = module._has_matrix_unit
    monkeypatch.setattr(module, "_has_matrix_unit", lambda: real(cpuinfo))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert precision("auto") == Precision(FULL, products)
    assert not real(tmp_path / "absent")


def test_attention_with_bfloat16_products_of_float32_activations() -> None:
    rng = np.random.default_rng(0)
    *qkv, cotangent = (jnp.asarray(x, jnp.float32) for x in rng.standard_normal((4, 3, 9, 2, 8)))
    lengths = jnp.array([9, 1, 5], jnp.int32)

    def attend(products):
        return jax.vjp(lambda *x: padded_attention(*x, lengths, products=products), *qkv)

    (result, pull), (exact, exact_pull) = attend(HALF), attend(FULL)
    assert result.dtype == FULL
    np.testing.assert_allclose(result, exact, atol=0.03)
    assert not np.array_equal(result, exact)
    for found, expected in zip(pull(cotangent), exact_pull(cotangent), strict=True):
        assert found.dtype == FULL
        np.testing.assert_allclose(found, expected, atol=0.03 * float(jnp.abs(expected).max()))
