"""Bytes of a device's memory: how many are free, for people, and what to do if they are too few."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import jax

from qrag_jax.runtime.memory_fields import saving

EXHAUSTED = "RESOURCE_EXHAUSTED"


def shortage(error: Exception, system: str | None = None) -> str | None:
    """One sentence if a program did not fit into a device's memory, None for another error.

    XLA's error has no class of its own: its message begins with the name of the status, be it of
    compiling or of running. JAX puts words before it where a host's array is copied.

    Args:
        system: field `system` of the config, of which the sentence names fields; None: there is no
            config.
    """
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or EXHAUSTED not in text:
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
