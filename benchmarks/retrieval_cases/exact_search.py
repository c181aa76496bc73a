"""Measures exact search beside faiss' flat index and beside NumPy, on vectors drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.measure import interleave, ratio
from benchmarks.report import Case
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.retrieval.faiss_index import FaissIndex
from qrag_jax.retrieval.protocol import Passage, Queries, Where

SIZES = ((1_000_000, 384), (200_000, 1024))
QUICK = ((20_000, 64),)
BATCHES = (1, 8, 64, 512)
K = 10
_ROUNDS = 5
_NUMPY_AT_ONCE = 64  # queries, whose scores of all passages are in memory at once


class Numbered:
    """A corpus of passages that nobody reads; see `retrieval.protocol.Corpus`."""

    def __init__(self, count: int) -> None:
        self._count, self.digest = count, f"{count} numbers"

    def __len__(self) -> int:
        return self._count

    def passages(self, numbers: object) -> list[Passage]:
        """Never called."""
        raise NotImplementedError

    def matching(self, where: Where) -> np.ndarray:
        """Never called."""
        raise NotImplementedError


def exact_cases(quick: bool) -> Iterator[Case]:
    """Queries per second of each size and batch, beside faiss; NumPy is in the details."""
    for count, width in QUICK if quick else SIZES:
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((count, width), np.float32)
        corpus = Numbered(count)
        engines = ExactIndex(corpus, vectors), FaissIndex(corpus, vectors)
        for batch in BATCHES[1:3] if quick else BATCHES:
            asked = rng.standard_normal((batch, width), np.float32)
            yield _case(vectors, *engines, asked, quick)


def _case(
    vectors: np.ndarray, ours: ExactIndex, faiss: FaissIndex, asked: np.ndarray, quick: bool
) -> Case:
    (count, width), batch = vectors.shape, len(asked)
    queries = Queries([""] * batch, asked)
    programs: dict[str, Callable[[int], object]] = {
        "ours": lambda _: ours.search(queries, K),
        "faiss": lambda _: faiss.search(queries, K),
        "numpy": lambda _: by_numpy(vectors, asked, K),
    }
    timings = interleave(programs, 2 if quick else _ROUNDS)
    same = ours.search(queries, K).numbers == faiss.search(queries, K).numbers
    gain = ratio(timings["ours"], timings["faiss"])
    aimed = batch >= 64 and not quick
    return Case(
        f"exact search, {count} x {width}, float32, top {K}, batch {batch}: beside faiss",
        batch / timings["ours"].median,
        "queries/s",
        peer=batch / timings["faiss"].median,
        ratio=gain,
        target=">= 1x" if aimed else None,
        holds=gain >= 1 if aimed else None,
        details={
            "NumPy, queries/s": batch / timings["numpy"].median,
            "same passages at the same ranks as faiss": float(same.mean()),
            "GFLOP/s": 2e-9 * batch * count * width / timings["ours"].median,
            "vectors (GiB)": vectors.nbytes / 2**30,
            "peak of the process, all three in it (GiB)": timings["ours"].memory / 2**30,
        },
    )


def by_numpy(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """int64 `[queries, k]`: the highest products, in no order among equal ones."""
    found = []
    for first in range(0, len(queries), _NUMPY_AT_ONCE):
        scores = queries[first : first + _NUMPY_AT_ONCE] @ vectors.T
        best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
        found.append(np.take_along_axis(best, order, 1))
    return np.concatenate(found)
