"""Reads records of JSON, JSON-lines, CSV and Parquet files and the hub, and checks their fields."""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from qrag_jax.data.sample import BadRecord
from qrag_jax.errors import InputError, library
from qrag_jax.runtime import whole_files

CSV, PARQUET = (".csv", ".csv.gz"), ".parquet"
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz", *CSV, PARQUET)
HUB = "hub:"  # before the name of a data set of the hub
_ROWS = 1024  # in memory at a time


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields pairs (where, record); `where` is for example "file.jsonl.gz:17".

    A `.json` file holds a list of objects, an object with such a list under "data", or JSON lines,
    and is read whole. A `.csv` file has the names of its columns in the first line; empty cells are
    None. The number in `where` is the line; of a list or of Parquet that of the record, from 1.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; give the path of a data file or folder")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"the name of {path} ends in none of {', '.join(SUFFIXES)}; rename it")
    file = _File(path)
    name, record = path.name.removesuffix(".gz"), None
    rows = {"csv": file.table, "parquet": file.parquet, "jsonl": file.lines, "json": file.document}
    with file.opened():
        for record in rows[name.rpartition(".")[2]]():
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object; write each record as one object")
            yield f"{path.name}:{file.at}", record
    if record is None:
        raise InputError(f"{path} is empty; it should hold one record at least")


class _File:
    """A file of records that is read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0  # line or record that is being read, from 1
        self._file: BinaryIO

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Opens the file, unpacked; refuses what cannot be read."""
        packed = self.path.name.endswith(".gz")
        try:
            with gzip.open(self.path) if packed else self.path.open("rb") as file:
                self._file = cast(BinaryIO, file)
                yield
        except InputError:
            raise
        except EOFError:
            why = f"{self.path} is truncated after record {self.at}; download it again"
            raise InputError(why) from None
        except (OSError, zlib.error, csv.Error, ValueError, RecursionError, OverflowError) as error:
            place = f"{self.path}, line or record {self.at}," if self.at else f"{self.path}"
            said = " ".join(str(getattr(error, "strerror", "") or error).split())[:200]
            what = "is not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read"
            raise InputError(f"{place} {what} ({said}); mend it, or download it again") from None

    def text_lines(self) -> Iterator[str]:
        lines = whole_files.bounded_lines(self._file, self.path, "write one record a line")
        for number, line in enumerate(lines, 1):
            self.at = number
            yield (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()

    def whole(self) -> bytes:
        return whole_files.bounded_content(self._file, self.path).removeprefix(codecs.BOM_UTF8)

    def lines(self) -> Iterator[Any]:
        for line in self.text_lines():
            if not line.isspace():
                yield json.loads(line)

    def document(self) -> Iterator[Any]:
        data = self.whole()
        line, first = data.lstrip().partition(b"\n")[0], None
        with contextlib.suppress(ValueError, RecursionError):
            first = json.loads(line) if line.startswith(b"{") else None
        if isinstance(first, dict) and not isinstance(first.get("data"), list):  # JSON lines
            self._file.seek(0)
            yield from self.lines()
            return
        text = data.decode()
        del data, line  # bytes, text and records of half a gigabyte would be too much at once
        records = json.loads(text) if text.strip() else []
        del text
        if isinstance(records, dict):
            records = records.get("data")
        if not isinstance(records, list):
            raise ValueError('it holds neither a list of records nor an object with one as "data"')
        records.reverse()
        while records:
            self.at += 1
            yield records.pop()  # frees each record once it is read: files hold half a gigabyte

    def table(self) -> Iterator[dict[str, str | None]]:
        # The library's own limit is for the whole process, and too low for chunks of a document.
        csv.field_size_limit(max(csv.field_size_limit(), whole_files.MAX_LINE_BYTES))
        names: list[str] = []
        for cells in csv.reader(self.text_lines(), strict=True):
            if cells and not names:
                names = [cell.strip() for cell in cells]
                if len(set(names)) < len(names) or not all(names):
                    raise ValueError("a column has an empty name, or two have one name")
            elif cells:
                if len(cells) != len(names):
                    fix = "a text with commas or line breaks needs double quotes"
                    raise ValueError(f"{len(cells)} cells, but {len(names)} columns; {fix}")
                yield {name: cell or None for name, cell in zip(names, cells)}

    def parquet(self) -> Iterator[dict[str, Any]]:
        pyarrow, parquet = (library(name, "parquet") for name in ("pyarrow", "pyarrow.parquet"))
        try:
            with parquet.ParquetFile(self.path) as table:
                for batch in table.iter_batches(_ROWS):
                    for record in batch.to_pylist():
                        self.at += 1
                        yield record
        except pyarrow.ArrowException as error:
            raise ValueError(str(error)) from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line that is not blank, without white space around it.

    Lines end with a line feed alone: JSON lets U+2028 and others stand in a text.
    """
    file = _File(path)
    with file.opened():
        for line in file.text_lines():
            if text := line.strip():
                yield file.at, text


def read_text(path: Path) -> str:
    file = _File(path)
    with file.opened():
        data = file.whole()
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            file.at = data.count(b"\n", 0, error.start) + 1
            raise


def split_files(
    path: Path, split: str, official: Sequence[str], folders: Sequence[str] = ()
) -> list[Path]:
    """The files of one split in a folder or one of its `folders`, in reading order.

    If there are `official` files, in one of the forms of `SUFFIXES`, only these are read. Otherwise
    all files named `{split}*` are.
    """
    if not path.is_dir():
        return [path]
    for folder in (path, *(path / name for name in folders)):
        entries = (entry.name for entry in folder.glob(f"{split}*"))
        of_split = sorted({_stem(name) for name in entries if name.endswith(SUFFIXES)})
        for stems in (map(_stem, official), of_split):
            # Only one file per stem: a folder often holds both a download and its unpacked copy.
            forms = ([folder / (stem + end) for end in SUFFIXES] for stem in stems)
            every = [[file for file in paths if file.is_file()] for paths in forms]
            if any(every):
                return [files[0] for files in every if files]
    names = sorted(entry.name for entry in path.iterdir())
    raise InputError(
        f"the folder {path} has no {split} file: looked for {', '.join(official)} and "
        f"{split}*.jsonl, .json, .csv (.gz) or .parquet, found {', '.join(names[:8]) or 'none'}"
    )


def _stem(name: str) -> str:
    return next((name.removesuffix(end) for end in reversed(SUFFIXES) if name.endswith(end)), name)


def text_files(folder: Path) -> list[Path]:
    """The text files of a folder by name; if `a.txt` is there, `a.txt.gz` is left out."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; give one of .txt or .txt.gz files.")
    named: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".txt", ".txt.gz")) and path.is_file():
            named.setdefault(path.name.removesuffix(".gz"), path)
    return list(named.values())


def load_hub(repo: str, config: str | None, split: str) -> Iterator[dict[str, Any]]:
    """The records of one split, which are downloaded once and then cached."""
    datasets = library("datasets", "hub")
    fix = "check name and network, or give files"
    # All failures here (network, name, cache, disk) have the same remedy for the user.
    with whole_files.reading(f"{split} of {repo} on the hub", fix, (Exception,)):
        return iter(datasets.load_dataset(repo, config, split=split))


# ---------------------------------------------------------------- fields of a record
# All of these raise BadRecord, which names the field.

TEXT, INDEX, ITEMS = "a string", "an integer", "a list"
TEXTS, OBJECTS = "a list of strings", "a list of objects"
_TYPES = {TEXT: str, INDEX: int, ITEMS: list, TEXTS: str, OBJECTS: dict}


def checked(value: Any, kind: str, name: str) -> Any:
    """The value, which must be of a kind, such as `TEXT`."""
    of, many = _TYPES[kind], kind in (TEXTS, OBJECTS)
    fits = isinstance(value, of) and not isinstance(value, bool)
    if many:  # a set of types is faster than a look at every item
        fits = isinstance(value, list) and {*map(type, value)} <= {of}
        fits = fits or (isinstance(value, list) and all(isinstance(item, of) for item in value))
    if not fits:
        raise BadRecord(f"field '{name}' is not {kind}")
    if of is str and not (text := "".join(value) if many else value).isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadRecord(f"field '{name}' holds half of a surrogate pair") from None
    return value


def present(record: Mapping[str, Any], *names: str) -> Any:
    """The first value that is not null under `names`, the spellings of one field."""
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise BadRecord(f"missing field '{names[0]}'")


def get(record: Mapping[str, Any], kind: str, *names: str, default: Any = None) -> Any:
    """The value of a field, which may be missing or null if there is a default."""
    if default is not None and all(record.get(name) is None for name in names):
        return default
    return checked(present(record, *names), kind, names[0])


def identifier(value: Any, name: str) -> str:
    """An id as a text; it may be a whole number."""
    if not checked(text := str(value) if type(value) is int else value, TEXT, name).strip():
        raise BadRecord(f"field '{name}' is empty")
    return text


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """The different texts that are not empty, without white space around them."""
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


def answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The answer and its aliases (`answer_aliases`, optional); "" means that there is no answer."""
    aliases = get(record, TEXTS, "answer_aliases", default=[])
    return distinct([get(record, TEXT, "answer"), *aliases])


def named_columns(text: str, known: Sequence[str], empty: Sequence[str]) -> dict[str, str]:
    """The columns of a flag, such as "id=docid,text=body"; names of `empty` may be empty."""
    named: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        field, equals, name = (word.strip() for word in part.partition("="))
        if field not in known or not equals or not (name or field in empty):
            raise InputError(f"--columns has {part!r}; write FIELD=NAME, of {', '.join(known)}.")
        named[field] = name
    return named


@contextlib.contextmanager
def refused(where: str) -> Iterator[None]:
    """Refuses a row for the reason that a check of its fields gives."""
    try:
        yield
    except BadRecord as bad:
        raise InputError(f"{where}: {bad}; mend the row, or leave it out.") from None
