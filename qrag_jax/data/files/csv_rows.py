"""Reads the rows of CSV files: RFC 4180, UTF-8, names of the columns in the first line."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files

CSV = (".csv", ".csv.gz")


def csv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of an open CSV file; `where` has the line on which the row ends.

    Cells are texts; an empty cell is None.
    """
    # The library's own limit is for the whole process, and too low for the chunks of a document.
    csv.field_size_limit(max(csv.field_size_limit(), bounded_files.MAX_LINE_BYTES))
    rows = csv.reader(_texts(path, file), strict=True)
    names: list[str] = []
    try:
        for cells in rows:
            place = f"{path}, line {rows.line_num},"
            if not cells:  # an empty line
                continue
            if not names:
                names = [cell.strip() for cell in cells]
                if len(set(names)) < len(names) or not all(names):
                    raise InputError(
                        f"{place} has an empty name or one name twice; name each column once"
                    )
                continue
            if len(cells) != len(names):
                raise InputError(
                    f"{place} has {len(cells)} cells, but there are {len(names)} columns; put a "
                    "text that has commas or line breaks into double quotes"
                )
            record = {name: cell or None for name, cell in zip(names, cells)}
            yield f"{path.name}:{rows.line_num}", record
    except csv.Error as error:
        raise InputError(
            f"{path}, line {rows.line_num}, is not CSV ({error}); put texts into double quotes, "
            "and double each one inside"
        ) from None


def _texts(path: Path, file: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(bounded_files.lines(file, path, "write one row a line"), 1):
        try:
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}, line {number}, is not UTF-8 at byte {error.start}; save it as UTF-8"
            ) from None
