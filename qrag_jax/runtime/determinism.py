"""Asks XLA for programs that give the same numbers in every run on the same GPUs.

Without it a GPU adds in the order in which its threads arrive, in scatters and in cuDNN's gradient
of attention, and XLA chooses the algorithms of products by timing them, for every cache again.

JAX gives XLA's options by program (`compiler_options` of `jax.jit`) or for the whole process
(XLA_FLAGS). It is the process here: the first parameters, the play and the updates of a run must
all be the same again.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
from collections.abc import Collection
from pathlib import Path

import jax

VARIABLE = "XLA_FLAGS"
DETERMINISTIC = "xla_gpu_deterministic_ops"
OPTIONS = {
    # Scatters sort what they add, and cuDNN's gradient of attention is told to be deterministic
    # (openxla/xla, xla/service/gpu/transforms/cudnn_custom_call_compiler.cc). Nothing is timed.
    DETERMINISTIC: True,
    # Products that are not timed would be Triton's in tiles of 16 × 8, for want of a better rule.
    # cuBLAS has rules, and they give the same algorithm every time.
    "xla_gpu_enable_triton_gemm": False,
}
# For either XLA takes deterministic algorithms of cuDNN alone.
_EITHER = DETERMINISTIC, "xla_gpu_exclude_nondeterministic_ops"
_GPUS = {"cuda", "gpu", "rocm"}
_PLUGINS = ("xla_cuda", "xla_rocm")
_OFF = {"false", "0", "f", "no", "n"}


def ask(deterministic: bool, *, described: bool = False) -> str:
    """Adds to XLA_FLAGS what makes the programs of this process deterministic on a GPU.

    It must be called before JAX looks for devices: XLA reads the variable only once. What the user
    has set there stays. Where JAX can use no GPU nothing changes: programs of a CPU are
    deterministic as they are, and JAX would look for them in its cache under another key.

    Args:
        deterministic: the wish, `config.runtime.deterministic`; False changes nothing.
        described: programs are compiled for GPUs that are not here (`runtime.targets`).

    Returns:
        A sentence for the user if XLA_FLAGS says otherwise, else "".
    """
    if not (described or _can_use_gpus()):
        return ""
    own = os.environ.get(VARIABLE, "").strip()
    known = _options(own)
    if not deterministic:
        asked = f"{VARIABLE} asks for deterministic programs, so config.runtime.deterministic=False"
        return f"{asked} does nothing" if known.get(DETERMINISTIC) else ""
    differs = "a resumed run may differ from one that was never stopped"
    missing = [f"--{name}={str(on).lower()}" for name, on in OPTIONS.items() if name not in known]
    if own and not own.startswith("-"):
        return f"{VARIABLE} names a file, {own}: add {' '.join(missing)} to it, else {differs}"
    os.environ[VARIABLE] = " ".join(filter(None, [own, *missing]))
    if not known.get(DETERMINISTIC, True):
        return (
            f"{VARIABLE} says --{DETERMINISTIC}=false, so config.runtime.deterministic does "
            f"nothing: {differs}"
        )
    return ""


def is_asked() -> bool:
    """Whether XLA_FLAGS asks for deterministic programs, by whomever it was set."""
    own = os.environ.get(VARIABLE, "").strip()
    if own and not own.startswith("-"):
        try:
            own = Path(own).read_text()
        except (OSError, UnicodeDecodeError):
            return False  # XLA itself will tell
    return any(_options(own, _EITHER).values())


def _can_use_gpus() -> bool:
    """Whether JAX may find a GPU, told without looking for one, which would start its backend."""
    allowed = getattr(jax.config, "jax_platforms", None)
    if allowed and not _GPUS & set(allowed.split(",")):
        return False
    found = importlib.util.find_spec("jax_plugins")
    folders = found.submodule_search_locations if found else None
    return any(name.startswith(_PLUGINS) for _, name, _ in pkgutil.iter_modules(folders or []))


def _options(flags: str, options: Collection[str] = OPTIONS) -> dict[str, bool]:
    """Which of these options the flags set, and to what; the last word of an option holds."""
    words = (word.lstrip("-").partition("=") for word in flags.split())
    return {name: value.lower() not in _OFF for name, _, value in words if name in options}
