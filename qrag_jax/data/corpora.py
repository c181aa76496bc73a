"""Reads corpora of passages: records of any kind, BEIR's layout, `contents` as FlashRAG has it.

Records may have any field names. By itself a reader finds `id`, `title` and `text`; BEIR's `_id`;
`doc_id`, as remakes of DeepRetrieval have it, whose corpora are JSON lists; and the form of the
corpus wiki18_100w (FlashRAG, arXiv 2405.13576; Search-R1, arXiv 2503.09516): `id` and `contents`,
which is a title in double quotes on a line of its own, then the text.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data import records
from qrag_jax.data.records import SUFFIXES, read_records
from qrag_jax.data.sample import Passage
from qrag_jax.errors import InputError

NAMES, TITLE, TEXTS = ("_id", "id", "doc_id"), "title", ("text", CONTENTS := "contents")
METADATA = "metadata"  # a field of this name that holds an object is spread out
ALL = "*"


@dataclasses.dataclass(frozen=True)
class Columns:
    """The fields of a corpus."""

    id: str | None = None  # None: the first of `NAMES` that the first record has
    # Records may lack it; None: `TITLE`, or else their `contents` have it; "": there are no titles
    title: str | None = None
    text: str | None = None  # None: the first of `TEXTS` that the first record has
    metadata: tuple[str, ...] | None = None  # the further fields that are kept; None: all

    @classmethod
    def parse(cls, columns: str = "", metadata: str = ALL) -> Columns:
        """The columns of flags such as "id=docid,title=name,text=body", and "year,url" or "*"."""
        given = records.named_columns(columns, ("id", "title", "text"), ("title",))
        kept = None if metadata == ALL else tuple(filter(None, metadata.split(",")))
        return cls(**given, metadata=kept)

    def of(self, record: Mapping[str, Any], where: str) -> Columns:
        """The columns with the names of ids and texts settled by the first record."""
        name = self._one(record, where, "id", NAMES)
        return dataclasses.replace(self, id=name, text=self._one(record, where, "text", TEXTS))

    def _one(self, record: Mapping[str, Any], where: str, kind: str, usual: tuple[str, ...]) -> str:
        given = getattr(self, kind)
        names = usual if given is None else (given,)
        for name in names:
            if name in record:
                return name
        raise InputError(
            f"{where}: there is no field {' or '.join(map(repr, names))}, only "
            f"{', '.join(map(repr, record)) or 'none'}; name the column with --columns={kind}=NAME."
        )


class Read(NamedTuple):
    """A document and its place in the corpus' files, such as "corpus.jsonl.gz:17"."""

    where: str
    document: Passage


def corpus_files(path: Path) -> list[Path]:
    """The files of a corpus, in reading order.

    The path is a file; a folder with `corpus.jsonl` (BEIR's layout), gzip'd or not; or a folder all
    of whose files with known suffixes are the corpus, by name.
    """
    for file in (path, path / "corpus.jsonl", path / "corpus.jsonl.gz"):
        if file.is_file():
            return [file]
    if not path.exists():
        raise InputError(f"{path} does not exist; give a corpus' file or folder.")
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES))
    if not files:
        raise InputError(
            f"the folder {path} has no corpus.jsonl and no {', '.join(SUFFIXES)}; put one there."
        )
    return files


def read_corpus(path: Path, columns: Columns | None = None) -> Iterator[Read]:
    """Yields the documents of a corpus in the files' order; little of it is in memory at a time.

    Ids that are whole numbers become texts, titles and texts that are null empty ones, and in
    further fields times become ISO texts, and NaN null. Two documents may have one id.
    """
    columns = columns or Columns()
    titled = not columns.title
    for file in corpus_files(path):
        settled = None
        for where, record in read_records(file):
            settled = settled or columns.of(record, where)
            titled = titled or columns.title in record
            yield Read(where, _document(where, record, settled))
    if not titled:
        raise InputError(
            f"{path}: no record has {columns.title!r}; give --columns=title=NAME, or leave it out."
        )


def _document(where: str, record: Mapping[str, Any], columns: Columns) -> Passage:
    assert columns.id is not None
    assert columns.text is not None
    name = record.get(columns.id)
    name = str(name) if type(name) is int else _text(where, record, columns.id)
    if not name.strip():
        raise InputError(f"{where}: field {columns.id!r} is empty; give every passage its own id.")
    text = _text(where, record, columns.text)
    title, column = "", TITLE if columns.title is None else columns.title
    if column and record.get(column) is not None:
        title = _text(where, record, column)
    elif columns.title is None and columns.text == CONTENTS:
        title, text = split_contents(text)
    further = {
        key: value for key, value in record.items() if key not in (columns.id, column, columns.text)
    }
    spread = further.get(METADATA)
    if isinstance(spread, Mapping):
        del further[METADATA]
        further |= spread
    elif spread is None:  # as in many files of BEIR's layout
        further.pop(METADATA, None)
    if columns.metadata is not None:
        further = {key: further[key] for key in columns.metadata if key in further}
    kept = {key: _as_json(f"{where}: field {key!r}", value) for key, value in further.items()}
    return Passage(name, text, title, kept)


def _as_json(place: str, value: Any) -> Any:
    """A value of a table as JSON has it: times as ISO texts; null for NaN, as pandas writes it."""
    try:
        # Others that JSON has not, such as Infinity, are refused.
        return json.loads(
            json.dumps(value, default=_plain), parse_constant={"NaN": None}.__getitem__
        )
    except (TypeError, ValueError, KeyError, RecursionError):
        raise InputError(
            f"{place} has {str(value)[:40]!r}, which JSON cannot hold; mend it, or see --metadata."
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date, too
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise TypeError


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a `contents`; a first line that is not in double quotes is no title."""
    first, newline, rest = contents.partition("\n")
    first = first.strip()
    if newline and len(first) > 1 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents.removeprefix("\n")


def _text(where: str, record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if value is None and field in record:  # an empty cell, or null
        return ""
    if not isinstance(value, str):
        shown = repr(value)[:80] if field in record else "missing"
        raise InputError(
            f"{where}: field {field!r} is {shown}; write a text, or name another with --columns."
        )
    return value
