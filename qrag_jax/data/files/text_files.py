"""Finds and reads plain text files, gzip'd or not, with plain messages when that fails."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_files

SUFFIXES = (".txt", ".txt.gz")


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file without its byte-order mark."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            data = bounded_files.whole(cast(BinaryIO, file), path)
    except EOFError:
        raise InputError(f"{path} is truncated gzip; download it again.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path} is not sound gzip ({error}); download it again.") from None
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror or error}); give a file that can."
        ) from None
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
        if path.name.endswith(SUFFIXES) and path.is_file():
            named.setdefault(path.name.removesuffix(".gz"), path)
    return list(named.values())
