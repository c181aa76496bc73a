"""Embeddings of texts kept on disk between commands: one folder for one encoder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.files import reason, write_whole

_SUFFIX = ".rows"
_NAME_BYTES = 16


def encoder_key(params: Any, settings: Mapping[str, Any]) -> str:
    """A digest of parameters and of all else that an embedding depends on."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()[:32]


class EmbeddingFiles:
    """One file for each group of texts: their digests, then their embeddings.

    A file is named by a digest of its content and put in its place whole, so one that a kill, a
    full disk or another process left broken is known by its name, and its texts are embedded
    again. Several processes may add at the same time.

    Args:
        folder: of one `encoder_key`. width: D. digest_bytes: length of a text's digest.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, width: int, digest_bytes: int = 16) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be made ({error.strerror}); give another folder for embeddings."
            ) from None
        self._folder, self._width, self._digest_bytes = folder, width, digest_bytes

    def load(self) -> Iterator[tuple[list[bytes], np.ndarray]]:
        """Digests of texts and their embeddings `[n, D]`, file by file; deletes broken files."""
        size = self._digest_bytes
        for path in sorted(self._folder.glob("*" + _SUFFIX)):
            data = path.read_bytes()
            count, rest = divmod(len(data), size + 4 * self._width)
            if rest or _name(data) != path.name:
                path.unlink(missing_ok=True)
                continue
            rows = np.frombuffer(data, np.float32, offset=count * size)
            yield [data[i * size : (i + 1) * size] for i in range(count)], rows.reshape(count, -1)

    def add(self, digests: Sequence[bytes], embeddings: np.ndarray) -> None:
        """Keeps the embeddings `[n, D]` of the texts with these digests.

        Raises:
            InputError: the disk is full, or the folder may not be written to.
        """
        data = b"".join(digests) + np.ascontiguousarray(embeddings, np.float32).tobytes()
        try:
            write_whole(self._folder / _name(data), data)
        except OSError as error:
            raise InputError(
                f"{self._folder} cannot be written ({reason(error)}); free space there, or keep "
                "no embeddings."
            ) from None


def _name(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_NAME_BYTES).hexdigest() + _SUFFIX
