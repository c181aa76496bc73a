from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.runtime.compilation import CompilationCounter, enable_persistent_cache


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
from qrag_jax.runtime.compilation import CompilationCounter, enable_persistent_cache
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
