"""Says how much memory a program needs, before it runs for the first time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from qrag_jax.runtime.device_memory import room, shown
from qrag_jax.runtime.memory_fields import saving


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
        found = function.lower(*arguments).compile().memory_analysis()
        if found is None:
            return  # this backend tells no bytes
        more = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
        free = room(self._devices[0], len(self._devices))
        self._log(line(name, found.argument_size_in_bytes, more, free, self._system))


def line(name: str, there: int, more: int, free: int | None, system: str) -> str:
    """One line: the bytes that a program needs of each device, beside those that are free.

    Args:
        there: bytes of its arguments, which are on the device already.
        more: bytes that it needs besides.
        free: of the device; None: it does not say.
    """
    told = (
        f"memory of the {name}: {shown(there + more)} per device, {shown(there)} of it there "
        f"already and {shown(more)} more"
    )
    if free is None:
        return told
    told += f"; {shown(free)} are free"
    return told if more <= free else f"{told}, which is too little: {saving(system)}"
