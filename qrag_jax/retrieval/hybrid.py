"""Several engines as one: their rankings of the same corpus are fused, by ranks or by scores.

`FusedIndex` asks each engine for its best passages and ranks all that any of them found. A passage
that an engine did not find, or not among its first `depth`, gets nothing from this engine.

- `ranks`: reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): the sum, over the
  engines, of weight / (constant + rank), the first rank being 1. Scores do not matter.
- `min_max`: the sum of weight × (score - lowest) / (highest - lowest), over each engine's own hits
  of the query; its last hit so gets nothing. Where all its scores are equal, each hit gets 1.
- `z_score`: the sum of weight × (score - mean) / deviation, over the same hits (the deviation is
  that of the whole, divided by n). What an engine did not find counts as its lowest hit, so that it
  is never better to be missed. Where all scores are equal, all get 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.retrieval.manifest import NAME, Manifest, read_manifest, settings_as
from qrag_jax.retrieval.protocol import Corpus, Hits, Index, Queries, Where
from qrag_jax.retrieval.ranking import Row, as_hits, best, check_k, found
from qrag_jax.retrieval.saving import finish, replaced_files

ENGINE = "fused"
FUSIONS = ("ranks", "min_max", "z_score")
_SECTION = "fusion"

Opener = Callable[[Path, Corpus], Index]


@dataclasses.dataclass(frozen=True)
class FusionConfig:
    """How rankings become one.

    Attributes:
        fusion: one of `FUSIONS`, see above.
        weights: one for each engine, above 0, in the engines' order; empty: all are 1.
        constant: of `ranks`: the larger, the less the first ranks stand out; 60 in the paper.
        depth: hits taken from each engine, whatever k is: so the first of many are the few.

    Raises:
        InputError: a field cannot be used.
    """

    fusion: str = "ranks"
    weights: tuple[float, ...] = ()
    constant: float = 60.0
    depth: int = 100

    def __post_init__(self) -> None:
        check_known(_SECTION, self, "fusion", FUSIONS)
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

    Raises:
        InputError: there are fewer than two engines, weights for another number of them, or engines
            over different corpora.
    """

    def __init__(self, engines: Sequence[Index], config: FusionConfig | None = None) -> None:
        self.engines, self.config = tuple(engines), config or FusionConfig()
        if len(self.engines) < 2:
            raise InputError(f"fusion is of 2 engines or more, not {len(self.engines)}; give more.")
        self._weights = self.config.weights or (1.0,) * len(self.engines)
        if len(self._weights) != len(self.engines):
            raise InputError(
                f"config.fusion.weights has {len(self._weights)} values for {len(self.engines)} "
                "engines; give one for each."
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

        Raises:
            InputError: k is below 1, or as an engine's search does.
        """
        check_k(k)
        hits = [engine.search(queries, self.config.depth, where) for engine in self.engines]
        rows = []
        for query in range(len(queries)):
            numbers, sums = self._fused([found(each, query) for each in hits])
            rows.append(best(numbers, sums, k))
        return as_hits(rows, k)

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, openers: Sequence[Opener]) -> FusedIndex:
        """Opens what `save` wrote.

        Args:
            openers: one for each engine in its order, such as `BM25Index.open`.

        Raises:
            InputError: there is no such index, it is damaged, of another corpus or of another
                number of engines, or an engine cannot be opened.
        """
        settings = read_manifest(folder, engine=ENGINE, corpus=corpus.digest).settings
        config = settings_as(FusionConfig, settings.get("fusion"), folder)
        count = settings_as(int, settings.get("engines"), folder)
        if count != len(openers):
            raise InputError(
                f"{folder} holds {count} engines, and {len(openers)} are opened; name each of them."
            )
        engines = [opener(_part(folder, at), corpus) for at, opener in enumerate(openers)]
        return cls(engines, config)

    def save(self, folder: Path) -> None:
        """Writes the settings, and each engine into a folder of its own: engine0, engine1, ….

        Raises:
            InputError: the folder holds an index of another engine or corpus, or an engine cannot
                be saved.
            OSError: a file cannot be written.
        """
        with replaced_files(folder, ENGINE, self.corpus):
            (folder / NAME).unlink(missing_ok=True)  # old and new engines are no fusion
            for place, engine in enumerate(self.engines):
                engine.save(_part(folder, place))
        manifest = Manifest(
            engine=ENGINE,
            corpus=self.corpus.digest,
            count=len(self.corpus),
            metric=self.config.fusion,
            settings={"fusion": dataclasses.asdict(self.config), "engines": len(self.engines)},
        )
        finish(folder, manifest)

    def _fused(self, rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
        """int64 and float64 `[n]`: all passages that any engine found, and their sums."""
        numbers = np.unique(np.concatenate([row.numbers for row in rows]))
        parts = np.zeros((len(rows), len(numbers)))
        for part, weight, row in zip(parts, self._weights, rows):
            if len(row.numbers):
                gains, missed = self._gains(row.scores.astype(np.float64))
                part[:] = weight * missed
                part[np.searchsorted(numbers, row.numbers)] = weight * gains
        # In order of size, so that the same parts in another order have the same sum.
        return numbers, np.sort(parts, axis=0).sum(axis=0)

    def _gains(self, scores: np.ndarray) -> tuple[np.ndarray, float]:
        """What an engine gives its hits, best first, and what it gives others."""
        if self.config.fusion == "ranks":
            return 1.0 / (self.config.constant + np.arange(1, len(scores) + 1)), 0.0
        low, high = scores.min(), scores.max()
        if self.config.fusion == "min_max":
            gains = (scores - low) / (high - low) if high > low else np.ones_like(scores)
            return gains, 0.0
        gains = (scores - scores.mean()) / scores.std() if high > low else np.zeros_like(scores)
        return gains, float(gains.min())


def _part(folder: Path, place: int) -> Path:
    return folder / f"engine{place}"
