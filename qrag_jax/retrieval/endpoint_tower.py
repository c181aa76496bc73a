"""A tower behind a server of embeddings (`/v1/embeddings` of OpenAI's API, as vLLM offers it)."""

from __future__ import annotations

import math

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.llm.client import Client
from qrag_jax.llm.config import ClientConfig
from qrag_jax.llm.outcomes import Embedded, EmbeddingRequest, Failure
from qrag_jax.retrieval.tower_rows import Rows

_ROWS = 32  # of one request
_NEAR = 1e-2  # how far the length of a vector may be from that of normalised ones


class EndpointTower:
    """One tower, as `tower_rows.RowEncoder`; it sends rows of ids, composed as in training.

    Args:
        config: the server, the name of the tower's model on it, and how it is asked again.
        scale: the factor on normalised vectors that the exported folder has in a module of its own,
            which some servers skip; 1: the weights hold it. Where a server skips it, it is
            multiplied here.
    """

    def __init__(self, config: ClientConfig, width: int, scale: float = 1.0) -> None:
        self._client, self._width, self._scale = Client(config), width, scale

    def __call__(self, rows: Rows) -> np.ndarray:
        """float32 `[rows, width]`."""
        requests = [
            EmbeddingRequest(tuple(tuple(map(int, row)) for row in rows[i : i + _ROWS]))
            for i in range(0, len(rows), _ROWS)
        ]
        where = f"{self._client.config.url} (model {self._client.config.model})"
        found: list[tuple[float, ...]] = []
        for outcome in self._client.ask_blocking(requests):
            if isinstance(outcome, Failure):
                raise InputError(
                    f"{where} gives no vectors ({outcome.message}); serve an exported tower there "
                    "with an API for embeddings that takes token ids, as vLLM's does."
                )
            assert isinstance(outcome, Embedded)
            found += outcome.vectors
        if not len(rows):
            return np.zeros((0, self._width), np.float32)
        vectors = np.array(found, np.float32).reshape(len(rows), -1)
        if vectors.shape[1] != self._width or not np.isfinite(vectors).all():
            raise InputError(
                f"{where} gives vectors of {vectors.shape[1]} numbers, and the tower's have "
                f"{self._width}, none of them NaN or infinite; serve the exported tower."
            )
        return self._scaled(vectors, where)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _scaled(self, vectors: np.ndarray, where: str) -> np.ndarray:
        if self._scale == 1.0:
            return vectors
        lengths = np.linalg.norm(vectors, axis=1)
        for length, factor in ((self._scale, 1.0), (1.0, self._scale)):
            if all(math.isclose(found, length, rel_tol=_NEAR) for found in lengths):
                return vectors * np.float32(factor)
        raise InputError(
            f"{where} gives vectors of length {lengths[0]:.3g}, but the tower's have the length "
            f"{self._scale:.3g}; serve the exported tower with its pooling and normalisation."
        )
