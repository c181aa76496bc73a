"""XLA's side of a run: the kind of devices, deterministic programs, kept programs, their count.

`jax.default_backend()` is not asked: a program may be compiled for devices that this process does
not have (`runtime.aot`).
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import pkgutil
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from qrag_jax.runtime.whole_files import default_cache, writing

CPU, GPU, TPU = "cpu", "gpu", "tpu"
_AMPERE = (8, 0)  # the first capability with bfloat16 and fused attention


class Platform(NamedTuple):
    """The devices of a mesh, which are all alike."""

    kind: str = CPU  # or "gpu", "tpu"
    capability: tuple[int, int] | None = None  # NVIDIA's, such as (9, 0)

    @classmethod
    def of(cls, mesh: Mesh | None = None) -> Platform:
        """The platform of a mesh; None: of this process's own devices."""
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        # AMD's GPUs name an architecture there, such as gfx942.
        match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
        return cls(device.platform, (int(match[1]), int(match[2])) if match else None)

    @property
    def on_cpu(self) -> bool:
        return self.kind == CPU

    @property
    def has_bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 are faster here than in float32.

        On a CPU it depends on the processor: see `models.compute.precision`.
        """
        return not self.on_cpu and (self.capability is None or self.capability >= _AMPERE)

    @property
    def has_fused_attention(self) -> bool:
        return self.capability is not None and self.capability >= _AMPERE


def compiler_options(mesh: Mesh, *, adapters: bool) -> dict[str, Any] | None:
    """What `jax.jit` takes as `compiler_options`.

    XLA would compute x·W and an adapter's x·A as one product of [W, A], and then copy its two
    parts: for Qwen3-0.6B that is an eighth of an update's time, as estimated for H100s.

    Args:
        adapters: the program computes low-rank adapters next to kernels, or other products of one
            factor that are faster apart.
    """
    apart = adapters and Platform.of(mesh).kind == GPU
    return {"xla_gpu_dot_merger_threshold_mb": 0} if apart else None


# ---------------------------------------------------------------------- deterministic programs

VARIABLE = "XLA_FLAGS"
_DETERMINISTIC = "xla_gpu_deterministic_ops"
OPTIONS = {
    # Scatters sort what they add, and cuDNN's gradient of attention is asked to be deterministic
    # (openxla/xla, xla/service/gpu/transforms/cudnn_custom_call_compiler.cc). Nothing is timed.
    _DETERMINISTIC: True,
    # Products that are not timed would be Triton's in tiles of 16 × 8, for want of a better rule.
    # cuBLAS has rules, and they give the same algorithm every time.
    "xla_gpu_enable_triton_gemm": False,
}
# For either XLA takes deterministic algorithms of cuDNN alone.
_EITHER = _DETERMINISTIC, "xla_gpu_exclude_nondeterministic_ops"


def ask_determinism(*, described: bool = False) -> None:
    """Adds to XLA_FLAGS what makes programs of a GPU give the same numbers in every run.

    Without it a GPU adds in the order in which its threads arrive, in scatters and in cuDNN's
    gradient of attention, and XLA chooses the algorithms of products by timing them. It is asked
    for the whole process: the first parameters, the play and the updates must all be the same.

    It must be called before JAX looks for devices: XLA reads the variable only once. What the user
    has set there stays, a file as it is. Where JAX can use no GPU nothing changes: programs of a
    CPU are deterministic anyway, and JAX would look for them in its cache under another key.

    Args:
        described: programs are compiled for GPUs that are not here (`runtime.aot`).
    """
    flags = os.environ.get(VARIABLE, "").strip()
    if flags[:1] in ("", "-") and (described or _can_use_gpus()):
        new = [f"--{name}={str(on).lower()}" for name, on in OPTIONS.items() if name not in flags]
        os.environ[VARIABLE] = " ".join(filter(None, [flags, *new]))


def is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for deterministic programs, by whomever it was set."""
    words = (word.lstrip("-").partition("=") for word in os.environ.get(VARIABLE, "").split())
    last = {name: value.lower() for name, _, value in words if name in _EITHER}
    return not {*last.values()} <= {"false", "0", "f", "no", "n"}


def _can_use_gpus() -> bool:
    """Whether JAX may find a GPU, without looking for one, which would start its backend."""
    allowed = getattr(jax.config, "jax_platforms", None)
    if allowed and not {"cuda", "gpu", "rocm"} & set(allowed.split(",")):
        return False
    spec = importlib.util.find_spec("jax_plugins")
    folders = (spec and spec.submodule_search_locations) or []
    names = [module.name for module in pkgutil.iter_modules(folders)]
    return any(name.startswith(("xla_cuda", "xla_rocm")) for name in names)


# ---------------------------------------------------------------------- compiled programs

# JAX reports this for every program it makes ready, also for one from the persistent cache.
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompilationCounter:
    """Counts the programs that are made ready to run from the moment the counter is made.

    A jitted function counts once per input shape, whether compiled or fetched from the persistent
    cache. So does every single operation outside of jit (`jnp.zeros`, `x + 1`): feed NumPy arrays
    where the count must be exact. `cache_hits` are those that were fetched, `seconds` those of
    compiling and fetching.
    """

    def __init__(self) -> None:
        self.count, self.seconds, self.cache_hits = 0, 0.0, 0

        def on_duration(event: str, duration_secs: float, **_: Any) -> None:
            if event == _COMPILE_EVENT:
                self.count += 1
                self.seconds += duration_secs

        def on_event(event: str, **_: Any) -> None:
            self.cache_hits += event == _CACHE_HIT_EVENT

        jax.monitoring.register_event_duration_secs_listener(on_duration)
        jax.monitoring.register_event_listener(on_event)


def enable_persistent_cache() -> Path:
    """Keeps compiled programs in a folder of this user, for later runs and starts of a run.

    It is `programs-UID` in `default_cache()`, closed to others, since it holds code that will run.
    Programs of any size are kept if they took at least 0.5 s to compile. Variables that the user
    has set in the environment (JAX_COMPILATION_CACHE_DIR,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES) take
    precedence. Returns the folder that is used.
    """
    path = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = Path(path) if path else default_cache() / f"programs-{os.getuid()}"
    if not path:
        with writing(folder, "QRAG_CACHE or JAX_COMPILATION_CACHE_DIR"):
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EPERM, "it is another user's")
            folder.chmod(0o700)
            # A home may be shared: a program for one processor may hold what another one lacks.
            lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").split("\n")
            has = next((line for line in lines if line.startswith(("flags", "Features"))), "")
            features = platform.machine() + has
            folder /= hashlib.sha256(features.encode()).hexdigest()[:12]
            folder.mkdir(exist_ok=True)
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
