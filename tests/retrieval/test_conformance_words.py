"""The engines that search by words, and those over others, against what every engine must do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.golden import GoldenIndex
from qrag_jax.retrieval.hybrid import FusedIndex, FusionConfig
from qrag_jax.retrieval.protocol import Corpus
from qrag_jax.retrieval.rerank import RerankedIndex
from qrag_jax.retrieval.scorers import EmbeddingScorer
from tests.retrieval.conformance import OF_ALL, WORDS, Engine, filters_hold, run_with, task_of

# A filter changes ranks and extremes within each list, so it may change the order of a fusion.
OF_FUSIONS = tuple(check for check in OF_ALL if check is not filters_hold)


def gold_of(corpus: Corpus, vectors: np.ndarray) -> GoldenIndex:
    """Several passages for every question that the checks ask of this corpus."""
    count = len(corpus)
    queries = task_of(corpus.folder / "again", count).queries.texts  # type: ignore[attr-defined]
    rng = np.random.default_rng(count)
    return GoldenIndex(corpus, {text: rng.permutation(count)[:15] for text in queries})


def fused(fusion: str) -> Engine:
    config = FusionConfig(fusion, weights=(1.0, 0.5), depth=30)

    def make(corpus: StoredCorpus, vectors: np.ndarray) -> FusedIndex:
        return FusedIndex([BM25Index.build(corpus), gold_of(corpus, vectors)], config)

    def opened(folder: Path, corpus: StoredCorpus) -> FusedIndex:
        return FusedIndex.open(folder, corpus, [BM25Index.open, GoldenIndex.open])

    return Engine(make, opened)


def bags(texts: Sequence[str]) -> np.ndarray:
    """float32 `[texts, words]`: how often each word occurs, common ones less."""
    counts = [
        [text.split().count(word) / (i + 1) for i, word in enumerate(WORDS)] for text in texts
    ]
    return np.array(counts, np.float32)


def reranked(engine: BM25Index) -> RerankedIndex:
    return RerankedIndex(engine, EmbeddingScorer(bags, bags), depth=1000)


test_bm25 = run_with(Engine(lambda corpus, _: BM25Index.build(corpus), BM25Index.open), OF_ALL)
test_golden = run_with(Engine(gold_of, GoldenIndex.open), OF_ALL)
test_ranks = run_with(fused("ranks"), OF_FUSIONS)
test_min_max = run_with(fused("min_max"), OF_FUSIONS)
test_z_score = run_with(fused("z_score"), OF_FUSIONS)
test_reranked = run_with(
    Engine(
        lambda corpus, _: reranked(BM25Index.build(corpus)),
        lambda folder, corpus: reranked(BM25Index.open(folder, corpus)),
    ),
    OF_ALL,
)
