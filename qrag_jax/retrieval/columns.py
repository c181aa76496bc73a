"""One field of all passages' metadata as a column: a code for each passage, a value for each code.

A column is made when its field is first asked for, and kept in the folder of the corpus. So are the
names of all fields: a field that no passage has is then refused without reading the corpus again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files, bounded_json, whole_files

FOLDER = "columns"
FIELDS = "fields.json"  # in it: the names of all fields
_MOST_FIELDS = 10_000  # of a corpus with more of them the names are not kept
ABSENT = -1  # the code of passages without the field
_CODE = np.dtype("<i4")


class Column(NamedTuple):
    """A field of all passages.

    codes: int32 `[passages]`; `ABSENT` where a passage has not the field.
    values: number of codes.
    codes_of: what a value is found by (see `keys_of`) → the codes of the values that have it.
    """

    codes: np.ndarray
    values: int
    codes_of: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, codes: np.ndarray, values: Sequence[Any]) -> Column:
        """Reads the value of each code."""
        codes_of: dict[str, list[int]] = {}
        for code, value in enumerate(values):
            for key in keys_of(value):
                codes_of.setdefault(key, []).append(code)
        return cls(codes, len(values), codes_of)


class Columns:
    """The columns of one corpus.

    Args:
        folder: the corpus's; columns stay in memory where it may not be written.
        digest: the corpus's.
        count: the number of passages.
    """

    def __init__(self, folder: Path, digest: str, count: int) -> None:
        self._folder, self._digest, self._count = folder / FOLDER, digest, count
        self._found: dict[str, Column] = {}
        self._fields: set[str] | None = None  # None: unknown

    def matching(
        self, field: str, wanted: Any, metadata: Iterable[Mapping[str, Any]]
    ) -> np.ndarray:
        """bool `[passages]`: those whose field has one of the values.

        Args:
            wanted: a value, or a list, tuple or set of values.
            metadata: of all passages in order; read if the column is not there yet.
        """
        column = self._found.get(field)
        if column is None:
            column = self._read(field) or self._make(field, metadata)
            self._found[field] = column
        good = np.zeros(column.values + 1, bool)  # the last place is that of `ABSENT`
        for key in wanted_keys(wanted):
            good[list(column.codes_of.get(key, ()))] = True
        return good[column.codes]

    def _make(self, field: str, metadata: Iterable[Mapping[str, Any]]) -> Column:
        if (there := self._names()) is not None and field not in there:
            raise unknown_field(field, self._folder.parent)
        codes = np.full(self._count, ABSENT, _CODE)
        names = set[str]()
        known: dict[str, int] = {}
        values: list[Any] = []
        for number, fields in enumerate(metadata):
            if len(names) <= _MOST_FIELDS:
                names.update(fields)
            if field in fields:
                value = fields[field]
                code = known.setdefault(_key(value), len(values))
                if code == len(values):
                    values.append(value)
                codes[number] = code
        if len(names) <= _MOST_FIELDS:
            self._keep_names(names)
        if not values:
            raise unknown_field(field, self._folder.parent)
        with contextlib.suppress(OSError):
            self._write(field, codes, values)
        return Column.of(codes, values)

    def _names(self) -> set[str] | None:
        """The names of all fields; None: unknown."""
        if self._fields is None:
            with contextlib.suppress(FileNotFoundError):
                said = bounded_json.load(self._folder / FIELDS)
                if said["corpus"] == self._digest:
                    self._fields = set(said["fields"])
        return self._fields

    def _keep_names(self, names: set[str]) -> None:
        self._fields = names
        said = {"corpus": self._digest, "fields": sorted(names)}
        with contextlib.suppress(OSError):
            whole_files.write_whole(self._folder / FIELDS, json.dumps(said))

    def _write(self, field: str, codes: np.ndarray, values: Sequence[Any]) -> None:
        stem = self._stem(field)
        whole_files.write_whole(stem.with_suffix(".codes"), codes.tobytes())
        said = {"field": field, "corpus": self._digest, "values": values}
        whole_files.write_whole(stem.with_suffix(".json"), json.dumps(said))

    def _read(self, field: str) -> Column | None:
        """The column if it is in the folder, and of this corpus."""
        stem = self._stem(field)
        try:
            said = bounded_json.load(stem.with_suffix(".json"), most=bounded_files.MAX_WHOLE_BYTES)
        except FileNotFoundError:
            return None
        if (said["field"], said["corpus"]) != (field, self._digest):
            return None
        return Column.of(np.fromfile(stem.with_suffix(".codes"), _CODE), said["values"])

    def _stem(self, field: str) -> Path:
        data = field.encode("utf-8", "surrogatepass")
        return self._folder / hashlib.blake2b(data, digest_size=8).hexdigest()


def unknown_field(field: str, where: object) -> InputError:
    """The error for a field that no passage of a corpus has; `where` names the corpus."""
    return InputError(
        f"where has the field {field!r}, which no passage of {where} has in its metadata; name "
        "one that passages have."
    )


def _key(value: Any) -> str:
    """Equal for values that are equal as JSON has them; 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True, default=str)


def keys_of(value: Any) -> set[str]:
    """What a passage's field is found by: its key, or those of its members if it is a list."""
    return {_key(member) for member in value} if isinstance(value, list) else {_key(value)}


def wanted_keys(wanted: Any) -> set[str]:
    """The keys of which a passage must have one; `wanted` as in `Columns.matching`."""
    several = isinstance(wanted, list | tuple | set | frozenset)
    return {_key(value) for value in (wanted if several else (wanted,))}
