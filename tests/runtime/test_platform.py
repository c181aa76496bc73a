"""What XLA is asked for on a GPU; programs that are counted, and kept between processes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime import platform
from qrag_jax.runtime.platform import (
    OPTIONS,
    VARIABLE,
    CompilationCounter,
    ask_determinism,
    enable_persistent_cache,
)

ASKED = "--xla_gpu_deterministic_ops=true --xla_gpu_enable_triton_gemm=false"
OTHER, TRITON = "--xla_force_host_platform_device_count=8", "--xla_gpu_enable_triton_gemm=true"


def test_the_users_own_flags_stay_and_nothing_is_asked_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before, after in (
        (f"{OTHER} ", f"{OTHER} {ASKED}"),
        (ASKED, ASKED),  # a second call adds nothing
        (TRITON, f"{TRITON} --xla_gpu_deterministic_ops=true"),
    ):
        monkeypatch.setattr(platform, "_can_use_gpus", lambda: True)
        monkeypatch.setenv(VARIABLE, before)
        ask_determinism()
        assert os.environ[VARIABLE] == after
    monkeypatch.setattr(platform, "_can_use_gpus", lambda: False)
    monkeypatch.setenv(VARIABLE, "")
    for described, flags in ((False, ""), (True, ASKED)):
        ask_determinism(described=described)
        assert os.environ[VARIABLE] == flags


def test_this_jaxlib_knows_the_options() -> None:
    """XLA ends the process at an option in XLA_FLAGS that it does not know."""
    compiled = jax.jit(jnp.sin, compiler_options=OPTIONS).lower(1.0).compile()
    assert compiled(0.0) == 0


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder that a user's caches are in; JAX has its settings back afterwards."""
    names = ("min_compile_time_secs", "min_entry_size_bytes")
    for name in (
        "JAX_COMPILATION_CACHE_DIR",
        *(f"JAX_PERSISTENT_CACHE_{n.upper()}" for n in names),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QRAG_CACHE", str(tmp_path))
    settings = [f"jax_persistent_cache_{name}" for name in names]
    before = {name: getattr(jax.config, name) for name in settings}
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_for_later_processes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder that was named last."""

    def use() -> None:
        jax.jit(lambda x: (x @ x).sum())(np.ones((8, 8), np.float32)).block_until_ready()

    enable_persistent_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # as JAX reads it
    jax.jit(lambda x: x + 1.0)(np.ones(2, np.float32)).block_until_ready()
    monkeypatch.setenv("QRAG_CACHE", str(cache / "deep"))
    folder, counter = enable_persistent_cache(), CompilationCounter()
    assert folder.parent.parent == cache / "deep"  # one for this kind of processor
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    for hits in (0, 1):
        use()
        assert (counter.count, counter.cache_hits) == (1 + hits, hits)
        assert len(list(folder.glob("*-cache"))) == 1


def test_a_folder_that_cannot_be_used_is_named(cache: Path) -> None:
    place = cache / f"programs-{os.getuid()}"
    if os.getuid() == 0:  # what another user may write, would run as root
        place.mkdir()
        os.chown(place, 54321, -1)
    else:
        place.touch()
    with pytest.raises(InputError, match=str(place)):
        enable_persistent_cache()
