"""Puts an engine's files into the folder of an index, which never seems whole before it is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from qrag_jax.retrieval.manifest import NAME, Manifest, read_manifest, write_manifest
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.runtime import whole_files


@contextlib.contextmanager
def replaced_files(folder: Path, engine: str, corpus: Corpus) -> Iterator[Path]:
    """A new folder for an engine's files; they move to `folder` when the block ends well.

    Files that are mapped, such as those of an index that is saved where it was opened, stay as
    they were for those who map them. The folder then has no manifest: `finish` writes one.

    Raises:
        InputError: the folder holds an index of another engine or corpus, or a damaged manifest.
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
