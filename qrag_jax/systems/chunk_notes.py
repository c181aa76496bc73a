"""A note in an index's folder: which exported tower of chunks its vectors are of.

The manifest's digest of the encoder is of weights as jax has them, and of a run's weights it is
another one than of those exported. The note has the digest of the exported files
(`retrieval.exported.chunk_digest`), which any environment can compare.
"""

from __future__ import annotations

import json
from pathlib import Path

from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.whole_files import write_whole

NOTE = "chunk_tower.json"


def write_note(index: Path, encoder: str, chunk_tower: str) -> None:
    """Notes what embedded an index.

    Args:
        index: its folder.
        encoder: the digest in the manifest of its vectors.
        chunk_tower: the digest of the exported tower.

    Raises:
        OSError: the folder cannot be written.
    """
    said = {"encoder": encoder, "chunk_tower": chunk_tower}
    write_whole(index / NOTE, json.dumps(said, indent=1) + "\n")


def noted(index: Path, encoder: str) -> str:
    """The digest of the exported tower that the vectors of this encoder are of; "": unknown.

    A note on other vectors, which were in the folder before, is not read.
    """
    try:
        said = bounded_json.load(index / NOTE)
        return str(said["chunk_tower"]) if said["encoder"] == encoder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
