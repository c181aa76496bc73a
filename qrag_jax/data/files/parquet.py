"""Reads the rows of Parquet files, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError

PARQUET = ".parquet"
_ROWS = 1024  # in memory at a time


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of a Parquet file; `where` has the row, from 1.

    Raises:
        InputError: the package pyarrow is missing, or the file is empty or cannot be read.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(
            f"{path} needs the package pyarrow to be read: run pip install 'qrag_jax[parquet]', "
            "or write it as .jsonl."
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path.name}, row {number}", record
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(
            f"{path} cannot be read as Parquet after row {number} ({said}); download it again."
        ) from None
    if not number:
        raise InputError(f"{path} is empty; it should hold one record at least.")
