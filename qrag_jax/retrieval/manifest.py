"""What an index folder says of itself: `manifest.json`, which is written last.

It says which engine the folder is for, which corpus and encoder its vectors come from, and how
large its files are. An index that does not fit what it is opened with is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import check_sizes
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.file_names import check_links
from qrag_jax.runtime.typed_json import made

FORMAT = 2
NAME = "manifest.json"
INNER_PRODUCT = "inner product"
_AGAIN = "build the index again"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known of an index.

    Attributes:
        engine: the name of the engine that reads it.
        corpus: the digest of the corpus.
        count: number of passages in it.
        encoder: a digest of the encoder and its settings; "" for engines that compare words.
        width: of a vector; 0 for engines without.
        dtype: of the numbers in the files, as NumPy names it; "" for engines without vectors.
        metric: what scores are.
        files: bytes of every file of the engine, in the engine's order.
        settings: the engine's own, as JSON has them.
    """

    engine: str
    corpus: str
    count: int
    encoder: str = ""
    width: int = 0
    dtype: str = ""
    metric: str = INNER_PRODUCT
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Settings = TypeVar("Settings")  # a dataclass

_KINDS = {
    field.name: {"int": int, "str": str}.get(str(field.type), dict)
    for field in dataclasses.fields(Manifest)
}
# What a reader may ask of a manifest, and what is done where it has another value.
_FIXES = {
    "engine": "open it with the engine that built it, or build one for this engine",
    "corpus": f"give the corpus that the index was built from, or {_AGAIN} from this one",
    "encoder": f"give the encoder that embedded it, or {_AGAIN} with this one",
    "count": f"give the passages that it was built from, or {_AGAIN}",
    "width": f"give the encoder that embedded it, or {_AGAIN} with this one",
    "metric": f"{_AGAIN} with this metric",
    "dtype": f"{_AGAIN} with this dtype",
}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the folder's manifest; the files that it names must be on disk.

    Raises:
        OSError: it cannot be written.
    """
    said = {"format": FORMAT} | dataclasses.asdict(manifest)
    whole_files.write_whole(folder / NAME, json.dumps(said, indent=1) + "\n")


def read_manifest(folder: Path, **wanted: str | int) -> Manifest:
    """The folder's manifest.

    Args:
        wanted: values that fields must have, such as `engine="exact"`.
    """
    path = folder / NAME
    try:
        said = bounded_json.load(path)
        form = said.pop("format")
    except OSError:
        raise InputError(
            f"{path} is missing, so {folder} holds no finished index; build one there, or give "
            "another folder."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is damaged; restore it from a backup, or {_AGAIN}.") from None
    if form != FORMAT:
        raise InputError(
            f"{path} has the format {form!r:.60} (field format), but this version reads {FORMAT}; "
            f"{_AGAIN} with it."
        )
    for name, kind in _KINDS.items():
        if type(said.get(name)) is not kind:
            raise InputError(
                f"{path} has {said.get(name)!r:.60} in the field {name}; restore it from a backup, "
                f"or {_AGAIN}."
            )
    if any(type(size) is not int for size in said["files"].values()):
        raise InputError(
            f"{path} has sizes that are no numbers in the field files; restore it from a backup, "
            f"or {_AGAIN}."
        )
    if unknown := sorted(said.keys() - _KINDS.keys()):
        raise InputError(
            f"{path} has the unknown field {bounded_json.shown(unknown[0])[1:-1]}; a later version "
            f"wrote it: use that one, or {_AGAIN}."
        )
    check_links(folder)
    manifest = Manifest(**said)
    for name, value in wanted.items():
        found = getattr(manifest, name)
        if found != value:
            raise InputError(
                f"{path} has {found!r:.100} in the field {name}, but {value!r} is "
                f"asked for; {_FIXES[name]}."
            )
    return manifest


def settings_as(kind: type[Settings], settings: Any, folder: Path) -> Settings:
    """Settings of an engine in a manifest, as a dataclass that checks them."""
    try:
        return made(kind, settings)
    except ValueError as error:
        raise InputError(
            f"{folder / NAME} has settings that cannot be used ({error}); restore it from a "
            f"backup, or {_AGAIN}."
        ) from None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compares the folder's files with the manifest."""
    check_sizes(folder, manifest.files, f"restore it from a backup, or {_AGAIN}")


@contextlib.contextmanager
def replaced_files(folder: Path, engine: str, corpus: Corpus) -> Iterator[Path]:
    """A new folder for an engine's files; they move to `folder` when the block ends well.

    Files that are mapped, such as those of an index that is saved where it was opened, stay as
    they were for those who map them. The folder then has no manifest: `finish` writes one.

    Raises:
        OSError: a file cannot be written.
    """
    if (folder / NAME).exists():
        read_manifest(folder, engine=engine, corpus=corpus.digest)
    new = whole_files.new_folder(folder, f".{engine}.")
    try:
        yield new
        (folder / NAME).unlink(missing_ok=True)  # no index until all is written
        for path in sorted(new.iterdir()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(path, folder / path.name)
        whole_files.sync_folder(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def finish(folder: Path, manifest: Manifest, files: tuple[str, ...] = ()) -> None:
    """Writes the manifest, with the sizes of these files.

    Raises:
        OSError: it cannot be written.
    """
    sizes = {name: (folder / name).stat().st_size for name in files}
    write_manifest(folder, Manifest(**vars(manifest) | {"files": sizes}))
