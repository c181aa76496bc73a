"""Lists the programs of a run and the memory they need, without running them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """A jitted function and the shapes that it is called with."""

    name: str
    function: Any
    arguments: tuple[Any, ...]


def program_lines(programs: Sequence[Program]) -> Iterator[str]:
    """Compiles each program for the devices of this process.

    Yields:
        One line of text per program, then one line with their number.
    """
    for name, function, arguments in programs:
        before = time.monotonic()
        found = function.lower(*arguments).compile().memory_analysis()
        seconds = time.monotonic() - before
        if found is None:
            yield f"  {name}: compiled in {seconds:.1f} s; this backend tells no bytes"
            continue
        arguments_bytes = found.argument_size_in_bytes
        results = found.output_size_in_bytes - found.alias_size_in_bytes
        total = arguments_bytes + results + found.temp_size_in_bytes
        yield (
            f"  {name}: {_size(total)} per device ({_size(arguments_bytes)} arguments, "
            f"{_size(results)} new results, {_size(found.temp_size_in_bytes)} temporary), "
            f"compiled in {seconds:.1f} s"
        )
    kind = jax.devices()[0].device_kind
    yield f"{len(programs)} programs, each compiled once for {jax.device_count()} {kind} device(s)"


def _size(count: int) -> str:
    """A number of bytes as text for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 2**10:.0f} KiB"
