"""Embeddings of texts kept on disk between commands: one folder for one encoder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

_DIGEST = 16  # bytes
_AT_ONCE = 65_536  # rows read at a time


def encoder_key(params: Any, settings: Mapping[str, Any]) -> str:
    """A digest of parameters and of all else that an embedding depends on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(leaf).data)
    return digest.hexdigest()[:32]


class EmbeddingFiles:
    """Rows and the digests of their texts, appended; a torn end left by a kill is cut off.

    A row counts once its digest is written, which is after the row itself.

    Args:
        folder: of one `encoder_key`. width: D.
    """

    def __init__(self, folder: Path, width: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._digests = folder / "rows.f32", folder / "texts.sha256"
        self._width = width
        for path in (self._rows, self._digests):
            path.touch()
        count = min(
            self._digests.stat().st_size // _DIGEST, self._rows.stat().st_size // (4 * width)
        )
        os.truncate(self._digests, count * _DIGEST)
        os.truncate(self._rows, count * 4 * width)

    def digest(self, text: str) -> bytes:
        """What stands for a text."""
        return hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:_DIGEST]

    def load(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Digests of texts and their embeddings `[n, D]`, a part at a time."""
        with self._rows.open("rb") as rows, self._digests.open("rb") as digests:
            while part := digests.read(_AT_ONCE * _DIGEST):
                count = len(part) // _DIGEST
                names = [part[i * _DIGEST : (i + 1) * _DIGEST] for i in range(count)]
                values = np.frombuffer(rows.read(count * 4 * self._width), np.float32)
                yield names, values.reshape(count, self._width)

    def add(self, texts: Sequence[str], embeddings: np.ndarray) -> None:
        """Appends the embeddings `[n, D]` of texts."""
        for path, data in (
            (self._rows, np.ascontiguousarray(embeddings, np.float32).tobytes()),
            (self._digests, b"".join(map(self.digest, texts))),
        ):
            with path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
