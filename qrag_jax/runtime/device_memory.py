"""Bytes of memory: how many a device has free, what to do if they are too few, a process's peak."""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_MESH = "more devices along fsdp (--config.runtime.mesh)"


_ENCODER = (
    "a lower --config.encoder.block_tokens",
    "--config.encoder.remat=layers",
    "{}",
    "--config.encoder.lora.rank above 0",
    _MESH,
)
_LANGUAGE_MODEL = (
    "a lower --config.model.block_tokens",
    "--config.model.remat=layers",
    "a lower --config.sampling.rows",
    "a lower --config.sampling.room",
    "{}",
    "--config.model.lora.rank above 0",
    _MESH,
)


# config.system → what needs less, the cheapest first; the first of them change no result.
SAVING: Mapping[str, tuple[tuple[str, ...], str]] = {
    "q_rag": (
        _ENCODER,
        "a higher --config.train.accumulation, a lower --config.eval.batch_size, a lower "
        "--config.train.batch_size",
    ),
    "harr": (_ENCODER, "a lower --config.state.max_tokens, a lower --config.train.batch_size"),
    "rlvr": (_LANGUAGE_MODEL, "a lower --config.tools.turn_tokens"),
    "leret": (
        _LANGUAGE_MODEL,
        "a lower --config.preference.batch_size, a lower --config.sft.batch_size",
    ),
    "deepretrieval": (_LANGUAGE_MODEL, "a lower --config.train.batch_size"),
}


def saving(system: str | None) -> str:
    """What needs less memory, as the beginning of a sentence: "…, … or … needs less".

    Args:
        system: field `system` of the config; None: the command has no config.
    """
    if system is None or system not in SAVING:
        return "a smaller model or more devices needs less"
    (*names, last), own = SAVING[system]
    return f"{', '.join(names)} or {last} needs less".format(own)


def shortage(error: Exception, system: str | None = None) -> str | None:
    """One sentence if a program did not fit into a device's memory, None for another error.

    XLA's error has no class of its own: its message begins with the name of the status, be it of
    compiling or of running. JAX puts words before it where a host's array is copied.
    """
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in text:
        return None
    asked = re.search(r"allocat\w+ (?:of )?(\d+) ?bytes", text)
    size = f" ({shown(int(asked[1]))} more were asked for)" if asked else ""
    return f"the memory of the devices is not enough{size}; {saving(system)}."


def room(device: jax.Device, sharing: int = 1) -> int | None:
    """The bytes of a device that are free; None if the platform does not say.

    Args:
        sharing: number of devices that share a host's memory, where devices are processors.
    """
    if device.platform == "cpu":
        meminfo = Path("/proc/meminfo")
        text = meminfo.read_text() if meminfo.exists() else ""
        found = re.search(r"MemAvailable:\s+(\d+) kB", text)
        known = [int(found[1]) * 2**10] if found else []
        return min(known + cgroup_room()) // sharing if found else None
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))


def cgroup_room(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """The bytes that this process's control groups leave it, as a container limits them."""
    rooms = []
    groups = Path("/proc/self/cgroup")
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                with contextlib.suppress(OSError, ValueError):  # "max"; or there is no limit
                    most, used = (int((folder / name).read_text()) for name in names)
                    # Files that were read are dropped from memory when it is needed.
                    stat = (folder / "memory.stat").read_text()
                    files = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                    rooms.append(most - used + (int(files[1]) if files else 0))
    return rooms


def shown(count: int) -> str:
    """A number of bytes as text for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"


class FirstCalls:
    """Tells the memory of each program before its first call.

    The program is compiled for that, and the call takes the same compiled program: JAX keeps it
    with the jitted function, so nothing is compiled twice.

    Args:
        devices: those of the mesh that this process has.
        system: field `system` of the config.
        log: takes a line.
    """

    def __init__(
        self, devices: Sequence[jax.Device], system: str, log: Callable[[str], None]
    ) -> None:
        self._devices, self._system, self._log = devices, system, log
        self._seen = set[int]()

    def before(self, name: str, function: Any, arguments: Sequence[Any]) -> None:
        """Tells the memory of a jitted function if this is its first call.

        Args:
            name: what the program does.
            arguments: those of the call that follows; they are only looked at.
        """
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        needs = function.lower(*arguments).compile().memory_analysis()
        if needs is None:
            return  # this backend tells no bytes
        there = needs.argument_size_in_bytes
        more = needs.output_size_in_bytes - needs.alias_size_in_bytes + needs.temp_size_in_bytes
        line = (
            f"memory of the {name}: {shown(there + more)} per device, {shown(there)} of it there "
            f"already and {shown(more)} more"
        )
        if (free := room(self._devices[0], len(self._devices))) is not None:
            line += f"; {shown(free)} are free"
            if more > free:
                line += f", which is too little: {saving(self._system)}"
        self._log(line)


class PeakMemory:
    """The peak memory of this process since the object was made.

    On Linux the object resets the peak. Elsewhere the peak is that of the whole process so far.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def mebibytes(self) -> float:
        """The peak in MiB."""
        with contextlib.suppress(OSError):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            if found:
                return int(found[1]) / 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
