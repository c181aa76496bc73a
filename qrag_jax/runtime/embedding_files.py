"""Keeps embeddings of texts on disk between commands, in one folder per encoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.runtime.whole_files import replacing, writing

_WHAT = "folder for embeddings"


def encoder_key(params: Any, settings: Mapping[str, Any]) -> str:
    """A digest of the parameters and of all other settings that an embedding depends on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


class EmbeddingFiles:
    """Of one `encoder_key`, one file for each group: digests of texts, and their embeddings.

    Writes are atomic, and a file's name is a digest of its texts, so several processes may add
    files at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing(folder, _WHAT):
            folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Yields digests of texts and their embeddings `[n, D]` per file."""
        for path in sorted(self._folder.glob("*.npz")):
            with np.load(path) as kept:
                yield [row.tobytes() for row in kept["digests"]], kept["embeddings"]

    def add(self, digests: Sequence[bytes], embeddings: np.ndarray) -> None:
        """Keeps the embeddings `[n, D]` of the texts with these digests."""
        joined = b"".join(digests)
        rows = np.frombuffer(joined, np.uint8).reshape(len(digests), -1)
        path = self._folder / f"{hashlib.blake2b(joined, digest_size=16).hexdigest()}.npz"
        with writing(self._folder, _WHAT), replacing(path) as file:
            np.savez(file, digests=rows, embeddings=np.asarray(embeddings, np.float32))
