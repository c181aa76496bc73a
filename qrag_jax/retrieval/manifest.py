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
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.whole_files import check_links, is_plain

FORMAT = 2
NAME = "manifest.json"
INNER_PRODUCT = "inner product"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known of an index.

    Attributes:
        dtype: of the numbers in the files, as NumPy names it; "" for engines without vectors.
        files: bytes of every file of the engine, in the engine's order.
        settings: the engine's own, as JSON has them.
    """

    engine: str
    corpus: str
    count: int
    encoder: str = ""  # a digest of the encoder and its settings; "" for engines that compare words
    width: int = 0  # of a vector; 0 for engines without
    dtype: str = ""
    metric: str = INNER_PRODUCT
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_said(path: Path, form: int, what: str) -> dict[str, Any]:
    """What a folder's manifest says, if the folder is whole and leads to no file outside of it."""
    folder = path.parent
    if not path.is_file():
        raise InputError(
            f"{folder} holds no finished {what}: {path.name} is missing; finish writing it, or "
            "give another folder."
        )
    check_links(folder)
    try:
        said = bounded_json.load(path)
        if (found := said.pop("format")) != form:
            raise ValueError(f"its format is {found!r:.60}, but this version reads {form}")
        for name, size in said["files"].items():
            if not is_plain(name):
                raise ValueError(f"it names {bounded_json.shown(name)}, which is no plain name")
            if (found := (folder / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged, or not that of the files ({error}); restore the folder from a "
            "backup, or delete it and write it again."
        ) from None
    return said


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces the folder's manifest; the files that it names must be on disk."""
    said = {"format": FORMAT} | dataclasses.asdict(manifest)
    whole_files.write_whole(folder / NAME, json.dumps(said, indent=1) + "\n")


def read_manifest(folder: Path, **wanted: str | int | None) -> Manifest:
    """The folder's manifest. `wanted`: what fields must be, such as `engine="exact"`; None: any."""
    path = folder / NAME
    try:
        manifest = bounded_json.typed(Manifest, read_said(path, FORMAT, "index"))
    except bounded_json.BadJSONError as error:
        raise InputError(f"{path} is damaged: {error}; build the index again.") from None
    for name, value in wanted.items():
        if value is not None and (found := getattr(manifest, name)) != value:
            raise InputError(
                f"{path} has {found!r:.100} in the field {name}, but {value!r} is asked for; give "
                "the corpus, the encoder and the engine that the index was built with, or build "
                "one of these."
            )
    return manifest


@contextlib.contextmanager
def replaced_files(folder: Path, engine: str, corpus: Corpus) -> Iterator[Path]:
    """A new folder for an engine's files; they move to `folder` when the block ends well.

    Files that are mapped, such as those of an index that is saved where it was opened, stay as
    they were for those who map them. The folder then has no manifest: `finish` writes one.
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
    """Writes the manifest, with the sizes of these files."""
    sizes = {name: (folder / name).stat().st_size for name in files}
    write_manifest(folder, Manifest(**vars(manifest) | {"files": sizes}))
