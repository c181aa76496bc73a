"""Keeps embeddings of texts on disk between commands, in one folder per encoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.runtime.whole_files import write_whole, writing

_SUFFIX = ".rows"
_DIGEST_BYTES = 16  # of a text
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
    """Of one `encoder_key` and width D, one file for each group: digests of texts, embeddings.

    Writes are atomic, and a file's name is a digest of its content, so several processes may add
    files at the same time.
    """

    def __init__(self, folder: Path, width: int) -> None:
        self._folder, self._width = folder, width
        with writing(folder, _WHAT):
            folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Yields digests of texts and their embeddings `[n, D]` per file."""
        size = _DIGEST_BYTES
        for path in sorted(self._folder.glob("*" + _SUFFIX)):
            data = path.read_bytes()
            count = len(data) // (size + 4 * self._width)
            digests = [data[i * size : (i + 1) * size] for i in range(count)]
            yield digests, np.frombuffer(data, np.float32, offset=count * size).reshape(count, -1)

    def add(self, digests: Sequence[bytes], embeddings: np.ndarray) -> None:
        """Keeps the embeddings `[n, D]` of the texts with these digests."""
        data = b"".join(digests) + np.ascontiguousarray(embeddings, np.float32).tobytes()
        with writing(self._folder, _WHAT):
            name = hashlib.blake2b(data, digest_size=16).hexdigest() + _SUFFIX
            write_whole(self._folder / name, data)
