"""The lines of a file, none of them longer than a machine's memory bears."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from qrag_jax.errors import InputError

LONGEST_LINE = 64 << 20  # bytes; a row with all its texts has some thousands


def bounded_lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The lines with their newlines, as iterating over the file gives them.

    Raises:
        InputError: a line is longer than `LONGEST_LINE`, of which no more than that was read.
    """
    number = 1
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise InputError(
                f"{path}, line {number}: is longer than {LONGEST_LINE >> 20} MiB, so it is no row "
                "of such a file; give the file that was meant"
            )
        yield line
        number += 1
