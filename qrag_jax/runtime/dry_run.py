"""Lists the programs of a run and the memory they need, without running them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from qrag_jax.runtime.aot import (
    SHARE_OF_PEAK,
    Devices,
    Loops,
    Target,
    least_seconds,
    product_flops,
    saving,
    shown,
)

# Of a device's memory, for programs; the rest is for the runtime and the gaps between buffers.
MEMORY_SHARE = 0.92


class Program(NamedTuple):
    """A jitted function and the shapes that it is called with."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    loops: Callable[[], Loops] = dict  # the course of its loops over blocks, for its FLOPs


def program_lines(
    programs: Sequence[Program], described: Devices | None = None, system: str | None = None
) -> Iterator[str]:
    """Compiles each program, and gives lines of text: its memory, and FLOPs where peaks are known.

    Args:
        described: the devices that they are compiled for; None: those of this process.
        system: field `system` of the config, of which a line may name fields; None: of none.
    """
    largest = 0
    devices = jax.devices() if described is None else described.devices
    kind = devices[0].device_kind
    for name, function, arguments, loops in programs:
        before = time.monotonic()
        compiled = function.lower(*arguments).compile()
        found = compiled.memory_analysis()
        seconds = time.monotonic() - before
        if found is None:
            yield f"  {name}: compiled in {seconds:.1f} s; this backend tells no bytes"
            continue
        arguments_bytes = found.argument_size_in_bytes
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        total = arguments_bytes + results + found.temp_size_in_bytes
        largest = max(largest, total)
        yield (
            f"  {name}: {shown(total)} per device ({shown(arguments_bytes)} arguments, "
            f"{shown(results)} new results, {shown(found.temp_size_in_bytes)} temporary), "
            f"compiled in {seconds:.1f} s"
        )
        if least_seconds(kind, {}) is not None:
            flops = product_flops(compiled.as_text(), loops())
            least = least_seconds(kind, flops) or 0.0
            yield (
                f"    products of {sum(flops.values()) / 1e12:.3g} TFLOP per device: "
                f"{1e3 * least / SHARE_OF_PEAK:.3g} ms at {SHARE_OF_PEAK:.0%} of the peak"
            )
    yield f"{len(programs)} programs, each compiled once for {len(devices)} {kind} device(s)"
    if described is not None:
        yield fit(largest, described.target, system)


def fit(needed: int, target: Target, system: str | None = None) -> str:
    """One line: whether so many bytes fit into a device's memory; if not, what saves some."""
    room = int(MEMORY_SHARE * target.memory)
    of = f"of {shown(target.memory)}, {1 - MEMORY_SHARE:.0%} of which are kept free"
    if needed <= room:
        return f"fits: {shown(needed)} {of}"
    return (
        f"does not fit: {shown(needed)} {of}, so {shown(needed - room)} too much; {saving(system)}"
    )
