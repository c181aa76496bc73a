"""Folders of vectors, as `qrag index` writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.retrieval.manifest import NAME, Manifest, read_manifest
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.retrieval.vector_files import PartNote, VectorParts


def save_vectors(
    folder: Path, corpus: Corpus, vectors: np.ndarray, encoder: str = "", **settings: Any
) -> Manifest:
    """Writes vectors as `qrag index` does, in two parts."""
    (folder / NAME).unlink(missing_ok=True)
    count, width = vectors.shape
    parts = VectorParts(folder, {}, count, -(-count // 2), width, str(vectors.dtype))
    parts.begin()
    for number in parts.numbers:
        rows = parts.passages(number)
        parts.write(number, vectors[rows.start : rows.stop], PartNote(len(rows), 0, 0))
    parts.finish(Manifest("exact", corpus.digest, count, encoder, settings=settings))
    return read_manifest(folder)


def save_exact(index: Any, folder: Path) -> None:
    """Writes the vectors of an exact index or a scan."""
    settings = dataclasses.asdict(index.settings) if hasattr(index, "settings") else {}
    vectors = index.vectors(range(len(index.corpus)))
    save_vectors(folder, index.corpus, vectors, index.encoder, **settings)
