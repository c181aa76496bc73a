"""What XLA is asked for on a GPU."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from qrag_jax.runtime import determinism
from qrag_jax.runtime.determinism import OPTIONS, VARIABLE, ask

ASKED = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"


@pytest.fixture
def of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "_can_use_gpus", lambda: True)


def asked(monkeypatch: pytest.MonkeyPatch, own: str | None, wanted: bool = True) -> tuple[str, str]:
    """XLA_FLAGS afterwards, and the sentence."""
    monkeypatch.setenv(VARIABLE, own or "")
    if own is None:
        monkeypatch.delenv(VARIABLE)
    told = ask(wanted)
    return os.environ.get(VARIABLE, ""), told


def test_the_users_own_flags_stay(of_gpus, monkeypatch) -> None:
    assert asked(monkeypatch, None) == (ASKED, "")
    other = "--xla_force_host_platform_device_count=8"
    assert asked(monkeypatch, f"{other} ") == (f"{other} {ASKED}", "")
    assert asked(monkeypatch, ASKED) == (ASKED, "")  # a second call adds nothing
    own = "--xla_gpu_enable_triton_gemm=true"
    assert asked(monkeypatch, own) == (f"{own} --xla_gpu_deterministic_ops=true", "")


def test_the_opposite_wish_of_the_user_holds_and_is_told(of_gpus, monkeypatch) -> None:
    flags, told = asked(monkeypatch, "--xla_gpu_deterministic_ops=0")
    assert "deterministic_ops=true" not in flags
    assert "a resumed run may differ" in told
    flags, told = asked(monkeypatch, "flags.txt")
    assert flags == "flags.txt"
    assert f"names a file, flags.txt: add {ASKED} to it" in told
    flags, told = asked(monkeypatch, "--xla_gpu_deterministic_ops", wanted=False)
    assert flags == "--xla_gpu_deterministic_ops"
    assert "config.runtime.deterministic=False does nothing" in told


def test_nothing_is_asked_where_it_is_not_wanted_or_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(determinism, "_can_use_gpus", lambda: False)
    assert asked(monkeypatch, None) == ("", "")
    assert ask(True, described=True) == ""
    assert os.environ[VARIABLE] == ASKED
    monkeypatch.setattr(determinism, "_can_use_gpus", lambda: True)
    assert asked(monkeypatch, None, wanted=False) == ("", "")


@pytest.mark.parametrize(
    ("platforms", "found"), [(None, True), ("", True), ("cuda,cpu", True), ("cpu", False)]
)
def test_a_plugin_for_gpus_is_found_without_starting_it(
    monkeypatch, tmp_path: Path, platforms: str | None, found: bool
) -> None:
    settings = types.SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr(determinism, "jax", types.SimpleNamespace(config=settings))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    plugin = tmp_path / "jax_plugins" / "xla_cuda99" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text("raise SystemExit")
    assert determinism._can_use_gpus() == found


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


def test_whether_xla_is_asked_in_a_file(monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "flags.txt"
    file.write_text(f"--xla_cpu_enable_fast_math=false\n{ASKED}\n")
    monkeypatch.setenv(VARIABLE, str(file))
    assert determinism.is_asked()
