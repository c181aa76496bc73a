"""Checks the files of Qdrant's client library before the library opens them.

Without a server the library keeps each point as a pickle in a table of SQLite, and a pickle is a
program. So every pickle is first loaded here, by a reader that knows one class and does nothing
with it. A pickle that passes names no other class to the library either.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.runtime.bounded_json import shown
from qrag_jax.runtime.file_names import check_links, is_plain

_COLLECTIONS, _SETTINGS, _TABLE = "collection", "meta.json", "storage.sqlite"
# As the library makes it. A view or a generated column could give another pickle when it is read
# for the second time.
_LAYOUT = "CREATE TABLE points (id TEXT PRIMARY KEY, point BLOB)"
_POINT = ("qdrant_client.http.models.models", "PointStruct")
_FIX = "build the index again"


class _Point:
    """Stands for a point of the library."""

    def __setstate__(self, state: object) -> None:
        """Keeps nothing."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Point]:
        if (module, name) != _POINT:
            raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}")
        return _Point


def check_storage(folder: Path) -> None:
    """Refuses a folder of the library that holds more than points; an absent one is good.

    Raises:
        InputError: a pickle names something else, a table is not as the library makes it, a
            collection or a link leaves the folder, or a file cannot be read.
    """
    if not folder.exists():
        return
    check_links(folder)
    for name in _names(folder / _SETTINGS):
        if not is_plain(name):
            raise InputError(
                f"{folder / _SETTINGS} has a collection of the name {shown(name)}, which leaves "
                f"the folder; {_FIX}."
            )
        path = folder / _COLLECTIONS / name / _TABLE
        if path.exists():
            _check_table(path)


def _names(path: Path) -> list[Any]:
    """The collections that the library will open."""
    try:
        return [*json.loads(path.read_bytes())["collections"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is damaged; {_FIX}.") from None


def _check_table(path: Path) -> None:
    try:
        with contextlib.closing(sqlite3.connect(path)) as database:
            made = database.execute("SELECT sql FROM sqlite_master WHERE name = 'points'")
            (layout,) = made.fetchone() or (None,)
            if layout is None:
                return  # the library makes it
            if layout != _LAYOUT:
                raise InputError(f"{path} has a table that is not the library's own; {_FIX}.")
            for (data,) in database.execute("SELECT point FROM points"):
                _check_point(data, path)
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be read ({error}); {_FIX}.") from None


def _check_point(data: object, path: Path) -> None:
    try:
        if not isinstance(data, bytes):
            raise pickle.UnpicklingError("it is no sequence of bytes")
        file = io.BytesIO(data)
        if type(_Reader(file).load()) is not _Point or file.read(1):
            raise pickle.UnpicklingError("it holds no point")
    except Exception as error:  # a broken pickle may fail with nearly any exception
        reason = str(error).split("\n")[0][:120]
        raise InputError(
            f"{path}: refused, since a pickle in it is none of a point ({reason}); {_FIX}, or use "
            "a Qdrant server."
        ) from None
