"""What XLA is asked for on a GPU; programs that are counted, and kept between processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
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


@pytest.fixture
def of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_can_use_gpus", lambda: True)


def asked(monkeypatch: pytest.MonkeyPatch, own: str, wanted: bool = True) -> tuple[str, str]:
    """XLA_FLAGS afterwards, and the sentence."""
    monkeypatch.setenv(VARIABLE, own)
    told = ask_determinism(wanted)
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
    monkeypatch.setattr(platform, "_can_use_gpus", lambda: False)
    assert asked(monkeypatch, "") == ("", "")
    assert ask_determinism(True, described=True) == ""
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
    assert platform.is_deterministic() is expected


def test_counts_a_compilation_and_not_a_second_call() -> None:
    counter = CompilationCounter()
    function = jax.jit(lambda x: x * 3.0 + 1.0)
    assert (counter.count, counter.seconds, counter.cache_hits) == (0, 0.0, 0)
    function(np.ones(4, np.float32)).block_until_ready()
    assert counter.count == 1
    assert counter.seconds > 0.0
    seconds = counter.seconds
    function(np.zeros(4, np.float32)).block_until_ready()
    assert (counter.count, counter.seconds) == (1, seconds)
    function(np.ones(5, np.float32)).block_until_ready()
    assert counter.count == 2


# The first program goes to another folder, to which JAX would keep if it were not told to forget.
CACHED = """
import json, os, sys
import jax, numpy as np
from qrag_jax.runtime.platform import CompilationCounter, enable_persistent_cache
os.environ["QRAG_CACHE"] = sys.argv[1] + "-earlier"
enable_persistent_cache()
jax.jit(lambda x: x + 1.0)(np.ones(2, np.float32)).block_until_ready()
os.environ["QRAG_CACHE"] = sys.argv[1]
folder = enable_persistent_cache()
counter = CompilationCounter()
jax.jit(lambda x: (x @ x).sum())(np.ones((8, 8), np.float32)).block_until_ready()
print(json.dumps({
    "folder": str(folder), "count": counter.count, "hits": counter.cache_hits,
    "least": jax.config.jax_persistent_cache_min_compile_time_secs,
    "size": jax.config.jax_persistent_cache_min_entry_size_bytes,
}))
"""


def run(folder: Path) -> dict:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JAX_PERS"))}
    quick = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # the user's own wish is kept
    result = subprocess.run(
        [sys.executable, "-c", CACHED, str(folder)],
        env=clean | {"JAX_PLATFORMS": "cpu"} | quick,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_a_second_process_finds_what_the_first_compiled(tmp_path: Path) -> None:
    first, second = run(tmp_path / "deep"), run(tmp_path / "deep")
    folder = Path(first["folder"])
    assert folder.parent.parent == tmp_path / "deep"  # one for this kind of processor
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert first == {"folder": str(folder), "count": 1, "hits": 0, "least": 0.0, "size": -1}
    assert second == first | {"hits": 1}
    assert len(list(folder.glob("*-cache"))) == 1


def test_a_folder_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("QRAG_CACHE", str(tmp_path))
    place = tmp_path / f"programs-{os.getuid()}"
    if os.getuid() == 0:  # what another user may write, would run as root
        place.mkdir()
        os.chown(place, 54321, -1)
    else:
        place.touch()
    with pytest.raises(InputError, match=str(place)):
        enable_persistent_cache()
