"""Counts compiled programs and their compilation time; keeps the programs between runs."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import platform
import threading
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import default_cache

# JAX reports this for every program it makes ready, also for one from the persistent cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


# What this process has compiled since the listeners were registered.
_TOTALS = {"count": 0, "seconds": 0.0, "cache_hits": 0}
_LOCK = threading.Lock()


@functools.cache
def _listen() -> None:
    """Registers the listeners, once in a process."""

    def on_duration(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILE_EVENT:
            with _LOCK:
                _TOTALS["count"] += 1
                _TOTALS["seconds"] += duration_secs

    def on_event(event: str, **_: Any) -> None:
        if event == _CACHE_HIT_EVENT:
            with _LOCK:
                _TOTALS["cache_hits"] += 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)


class CompilationCounter:
    """Counts the programs that are made ready to run from the moment the counter is made.

    A jitted function counts once per input shape, whether compiled or fetched from the persistent
    cache. So does every single operation outside of jit (`jnp.zeros`, `x + 1`): feed NumPy arrays
    where the count must be exact.
    """

    def __init__(self) -> None:
        _listen()
        self._before = dict(_TOTALS)

    @property
    def count(self) -> int:
        """Number of programs."""
        return int(_TOTALS["count"] - self._before["count"])

    @property
    def seconds(self) -> float:
        """Seconds of compiling or fetching them."""
        return _TOTALS["seconds"] - self._before["seconds"]

    @property
    def cache_hits(self) -> int:
        """Number of those that were fetched."""
        return int(_TOTALS["cache_hits"] - self._before["cache_hits"])


def enable_persistent_cache() -> Path:
    """Keeps compiled programs in a folder of this user, for later runs and starts of a run.

    It is `programs-UID` in `default_cache()`, closed to others, since it holds code that will run.
    Programs of any size are kept if they took at least 0.5 s to compile. Variables that the user
    has set in the environment (JAX_COMPILATION_CACHE_DIR,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES) take
    precedence. Returns the folder that is used.
    """
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = Path(own) if own else default_cache() / f"programs-{os.getuid()}"
    if not own:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is another user's")
            folder.chmod(0o700)
            # A home may be shared: a program for one processor may hold what another one lacks.
            folder /= _processor()
            folder.mkdir(exist_ok=True)
        except OSError as error:
            reason = error.strerror or "unknown error"
            raise InputError(
                f"compiled programs cannot be kept in {folder} ({reason}); set QRAG_CACHE or "
                "JAX_COMPILATION_CACHE_DIR to a folder of your own."
            ) from error
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        if not os.environ.get(name.upper()):
            jax.config.update(name, value)
    # JAX opens its folder at the first compilation. Without a reset it keeps an earlier folder.
    compilation_cache.reset_cache()
    return folder


def _processor() -> str:
    """A digest of the instructions that this machine's processor has."""
    features = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n")
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(features.encode()).hexdigest()[:12]
