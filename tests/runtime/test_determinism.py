"""What XLA is asked for on a GPU."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import pytest

from qrag_jax.runtime import determinism
from qrag_jax.runtime.determinism import OPTIONS, VARIABLE, ask

ASKED = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"


@pytest.fixture
def of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_can_use_gpus", lambda: True)


def asked(monkeypatch: pytest.MonkeyPatch, own: str, wanted: bool = True) -> tuple[str, str]:
    """XLA_FLAGS afterwards, and the sentence."""
    monkeypatch.setenv(VARIABLE, own)
    told = ask(wanted)
    return os.environ.get(VARIABLE, ""), told


OTHER, TRITON = "--xla_force_host_platform_device_count=8", "--xla_gpu_enable_triton_gemm=true"


@pytest.mark.parametrize(
    ("own", "wanted", "flags", "says"),
    [
        ("", True, ASKED, ""),
        (f"{OTHER} ", True, f"{OTHER} {ASKED}", ""),
        (ASKED, True, ASKED, ""),  # a second call adds nothing
        (TRITON, True, f"{TRITON} --xla_gpu_deterministic_ops=true", ""),
        ("flags.txt", True, "flags.txt", "names a file"),
        ("--xla_gpu_deterministic_ops", False, "--xla_gpu_deterministic_ops", "does nothing"),
        ("", False, "", ""),
    ],
)
def test_the_users_own_flags_stay(of_gpus, monkeypatch, own, wanted, flags, says) -> None:
    found, told = asked(monkeypatch, own, wanted)
    assert found == flags
    assert says in told
    assert bool(told) == bool(says)


def test_the_opposite_wish_of_the_user_holds_and_is_told(of_gpus, monkeypatch) -> None:
    flags, told = asked(monkeypatch, "--xla_gpu_deterministic_ops=0")
    assert "deterministic_ops=true" not in flags
    assert "a resumed run may differ" in told


def test_nothing_is_asked_where_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(determinism, "_can_use_gpus", lambda: False)
    assert asked(monkeypatch, "") == ("", "")
    assert ask(True, described=True) == ""
    assert os.environ[VARIABLE] == ASKED


def test_this_jaxlib_knows_the_options() -> None:
    """XLA ends the process at an option in XLA_FLAGS that it does not know."""
    compiled = jax.jit(jnp.sin, compiler_options=OPTIONS).lower(1.0).compile()
    assert compiled(0.0) == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", False),
        (ASKED, True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_enable_triton_gemm=true", False),
        ("--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=0", False),
        ("--xla_gpu_exclude_nondeterministic_ops=true", True),
        ("no_such_file.txt", False),
    ],
)
def test_whether_xla_is_asked(monkeypatch, flags: str, expected: bool) -> None:
    monkeypatch.setenv(VARIABLE, flags)
    assert determinism.is_asked() is expected
