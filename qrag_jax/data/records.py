"""Reads records from JSON, JSON-lines, CSV and Parquet files and the hub, and texts of files."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files

CSV, PARQUET = (".csv", ".csv.gz"), ".parquet"
TEXTS = (".txt", ".txt.gz")
MARK = "hub:"  # before the name of a data set of the hub
_ROWS = 1024  # in memory at a time


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of a Parquet file; `where` has the row, from 1."""
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


SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", *CSV, PARQUET)


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields pairs (where, record); `where` is for example "file.jsonl.gz:17".

    A `.jsonl` file holds one object per line. It is read line by line, so that it need not fit in
    memory. A `.json` file holds a list of objects, an object with such a list under "data", or
    JSON lines. It is read whole. The limits of `bounded_files` apply to both. A `.csv` file has the
    names of its columns in the first line; its cells are texts, or None if they are empty. A
    `.parquet` file needs the package pyarrow. The number in `where` is the line; for a list or a
    table it is the number of the record, from 1.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a data file or folder")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"the name of {path} ends in none of {', '.join(SUFFIXES)}; rename it")
    if path.name.endswith(PARQUET):
        yield from parquet_rows(path)
        return
    lines = path.name.removesuffix(".gz").endswith(".jsonl")
    read = csv_rows if path.name.endswith(CSV) else _lines if lines else _document
    count = 0
    with _opened(path, lambda: f" after record {count}") as file:
        for where, record in read(path, file):
            yield where, record
            count += 1
    if count == 0:
        raise InputError(f"{path} is empty; it should hold one record at least")


@contextlib.contextmanager
def _opened(path: Path, place: Callable[[], str] = lambda: "") -> Iterator[BinaryIO]:
    """The open file, unpacked; what it is that cannot be read is told in one sentence."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except EOFError:
        raise InputError(f"{path} is truncated{place()}; download it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(
            f"{path} is not sound gzip{place()} ({error}); download it again"
        ) from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); give a file that can"
        ) from None


def split_files(path: Path, split: str, official: tuple[str, ...]) -> list[Path]:
    """Returns the files of one split, in reading order.

    Args:
        official: names of the split's official files. If the folder has any of them, in one of the
            forms of `SUFFIXES`, only these are read. Otherwise all files named `{split}*` are.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a data file or folder")
    if not path.is_dir():
        return [path]
    if found := find_split(path, split, official):
        return found
    there = sorted(entry.name for entry in path.iterdir())
    if not there:
        raise InputError(f"the folder {path} is empty; put {' or '.join(official)} there")
    listed = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
    raise InputError(
        f"the folder {path} has no {split} file: looked for {', '.join(official)} and "
        f"{split}*.jsonl, .json, .csv (.gz) or .parquet, found {listed}"
    )


def find_split(folder: Path, split: str, official: Sequence[str]) -> list[Path]:
    """Returns the files of one split as `split_files` does; an empty list if there are none."""
    stems = [_stem(name) for name in official]
    if not any(_stem_files(folder, stem) for stem in stems):
        names = (entry.name for entry in folder.glob(f"{split}*"))
        stems = sorted({_stem(name) for name in names if name.endswith(SUFFIXES)})
    # Only one file per stem: a folder often holds both a download and its unpacked copy.
    return [files[0] for stem in stems if (files := _stem_files(folder, stem))]


def _stem(name: str) -> str:
    return next((name.removesuffix(end) for end in reversed(SUFFIXES) if name.endswith(end)), name)


def _stem_files(folder: Path, stem: str) -> list[Path]:
    return [file for suffix in SUFFIXES if (file := folder / (stem + suffix)).is_file()]


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    fix = "write one record a line"
    for number, line in enumerate(whole_files.bounded_lines(file, path, fix), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield f"{path.name}:{number}", _object(path, number, _loads(path, number, line))


def _document(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    data = whole_files.bounded_content(file, path).removeprefix(codecs.BOM_UTF8)
    line, first = data.lstrip().partition(b"\n")[0], None
    with contextlib.suppress(ValueError, RecursionError):
        first = json.loads(line) if line.startswith(b"{") else None
    if isinstance(first, dict) and not isinstance(first.get("data"), list):  # JSON lines
        file.seek(0)
        yield from _lines(path, file)
        return
    records = _whole(path, data)
    del data
    records.reverse()
    for number in range(1, len(records) + 1):
        # Popping frees each record once it is read: official files hold half a gigabyte.
        yield f"{path.name}:{number}", _object(path, number, records.pop())


def _whole(path: Path, data: bytes) -> list[Any]:
    if not data.strip():
        return []
    value = _loads(path, None, data)
    if isinstance(value, dict):
        value = value.get("data")
    if not isinstance(value, list):
        raise InputError(
            f'{path} holds neither a list of records nor an object with one under "data"; '
            "write one of them, or one record a line"
        )
    return value


def _loads(path: Path, number: int | None, data: bytes) -> Any:
    place = f"{path}" if number is None else f"{path}, line {number},"
    try:
        return json.loads(_text(place, data))
    except json.JSONDecodeError as error:
        spot = f"line {error.lineno} " * (number is None) + f"column {error.colno}"
        raise InputError(
            f"{place} is not JSON ({error.msg} at {spot}); mend it, or download it again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is not JSON that can be read ({error}); mend it") from None


def _object(path: Path, number: int, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(
            f"{path}, record {number}, is not a JSON object; write each record as one object"
        )
    return value


# ---------------------------------------------------------------- tables


def csv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs (where, record) of an open CSV file; `where` has the line on which the row ends.

    Cells are texts; an empty cell is None.
    """
    # The library's own limit is for the whole process, and too low for the chunks of a document.
    csv.field_size_limit(max(csv.field_size_limit(), whole_files.MAX_LINE_BYTES))
    rows = csv.reader(_decoded(path, file), strict=True)
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


def _decoded(path: Path, file: BinaryIO) -> Iterator[str]:
    for number, line in enumerate(whole_files.bounded_lines(file, path, "write one row a line"), 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        yield _text(f"{path}, line {number},", line)


def _text(place: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8 at byte {error.start}; save it as UTF-8") from None


# ---------------------------------------------------------------- texts


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file without its byte-order mark."""
    with _opened(path) as file:
        data = whole_files.bounded_content(file, path)
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}, is not UTF-8; save the file as UTF-8.") from None


def text_files(folder: Path) -> list[Path]:
    """Returns the text files of a folder by name; if `a.txt` is there, `a.txt.gz` is left out."""
    if not folder.exists():
        raise InputError(f"{folder} does not exist; give a folder of .txt or .txt.gz files.")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder that it lies in.")
    named: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(TEXTS) and path.is_file():
            named.setdefault(path.name.removesuffix(".gz"), path)
    return list(named.values())


# ---------------------------------------------------------------- the hub


class HubPath(NamedTuple):
    """A data set of the hub, as a path that a user writes: `hub:NAME[,CONFIG[,SPLIT]]`.

    Attributes:
        split: the hub's name of the split that is read for everything; None: each split is read
            by its own name.
    """

    repo: str
    config: str | None = None  # the data set's configuration; None if it has only one
    split: str | None = None

    @classmethod
    def parse(cls, path: str) -> HubPath | None:
        """The data set that a path names; None: it is a file or folder."""
        if not path.startswith(MARK):
            return None
        repo, *rest = (part.strip() for part in path.removeprefix(MARK).split(","))
        if not repo or len(rest) > 2:
            raise InputError(
                f"data.path is {path!r}; write {MARK}NAME, {MARK}NAME,CONFIG or "
                f"{MARK}NAME,CONFIG,SPLIT"
            )
        return cls(repo, *(part or None for part in rest))


def load_hub(repo: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Returns an iterator over the records of one split, downloaded once and then cached."""
    try:
        import datasets  # optional, slow to import
    except ImportError:
        raise InputError(
            f"reading {repo} from the hub needs the package datasets: run pip install "
            "'qrag_jax[hub]', or set data.path to a file or folder"
        ) from None
    try:
        table = datasets.load_dataset(repo, config, split=split)
    # All failures here (network, name, cache, disk) have the same remedy for the user.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"split {split} of {repo} could not be had from the hub ({reason}); check the name and "
            "the network, or set data.path to a file or folder"
        ) from None
    return iter(table)
