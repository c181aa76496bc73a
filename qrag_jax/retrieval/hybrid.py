"""Several engines as one: their rankings of the same corpus are fused by reciprocal ranks.

`FusedIndex` asks each engine for its best passages and ranks all that any of them returned by the
sum, over the engines, of weight / (constant + rank), the first rank being 1 (reciprocal rank
fusion; Cormack, Clarke and Büttcher, SIGIR 2009). Scores do not matter. A passage that an engine
did not return among its first `depth` gets nothing from this engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from qrag_jax.errors import InputError, check_least
from qrag_jax.retrieval.protocol import Corpus, Hits, Index, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, best, check_k, found

_SECTION = "fusion"


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """How rankings become one.

    Attributes:
        weights: one for each engine, above 0, in the engines' order; empty: all are 1.
        constant: the larger, the less the first ranks stand out; 60 in the paper.
        depth: hits taken from each engine, whatever k is: so the first of many are the few.
    """

    weights: tuple[float, ...] = ()
    constant: float = 60.0
    depth: int = 100

    def __post_init__(self) -> None:
        check_least(_SECTION, self, constant=0.0, depth=1)
        if not np.isfinite(self.constant):
            raise InputError(f"config.fusion.constant is {self.constant}; give a finite number.")
        for weight in self.weights:
            if not 0 < weight < np.inf:
                raise InputError(
                    f"config.fusion.weights has {weight}; give finite numbers above 0, and leave "
                    "out an engine that shall not count."
                )


class FusedIndex:
    """Engines over one corpus, searched as one; see `protocol.Index`.

    Args:
        engines: two or more, for example BM25 and vectors. The queries must have all that any of
            them searches by.
    """

    def __init__(self, engines: Sequence[Index], config: FusionConfig | None = None) -> None:
        self.engines, self.config = tuple(engines), config or FusionConfig()
        if len(self.engines) < 2:
            raise InputError(f"fusion is of 2 engines or more, not {len(self.engines)}; give more.")
        if len(self.config.weights or self.engines) != len(self.engines):
            raise InputError(
                f"config.fusion.weights has {len(self.config.weights)} values for "
                f"{len(self.engines)} engines; give one for each."
            )
        self.corpus: Corpus = self.engines[0].corpus
        for place, engine in enumerate(self.engines):
            if engine.corpus.digest != self.corpus.digest:
                raise InputError(
                    f"engine {place} searches another corpus (digest {engine.corpus.digest:.12}) "
                    f"than engine 0 ({self.corpus.digest:.12}); build both over the same one."
                )

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest sums; of equal sums, the lowest numbers.

        With a filter, each engine ranks only what agrees with it.
        """
        check_k(k)
        hits = [engine.search(queries, self.config.depth, where) for engine in self.engines]
        rows = []
        for query in range(len(queries)):
            rows.append(best(*fused([found(each, query) for each in hits], self.config), k))
        return as_hits(rows, k)


def fused(rows: Sequence[Row], config: FusionConfig) -> Row:
    """All passages of some rankings, and their sums, float64; in the order of their numbers."""
    numbers = np.unique(np.concatenate([row.numbers for row in rows]))
    parts = np.zeros((len(rows), len(numbers)))
    for part, weight, row in zip(parts, config.weights or (1.0,) * len(rows), rows):
        ranks = np.arange(1, len(row.numbers) + 1)
        part[np.searchsorted(numbers, row.numbers)] = weight / (config.constant + ranks)
    # In order of size, so that the same parts in another order have the same sum.
    return Row(numbers, np.sort(parts, axis=0).sum(axis=0))
