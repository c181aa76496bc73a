"""The engines that search by words, and those over others, against what every engine must do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.hybrid import FusedIndex, FusionConfig
from qrag_jax.retrieval.scan import ScanIndex
from tests.retrieval import conformance
from tests.retrieval.conformance import OF_ALL, Engine, run_with

# A filter changes the ranks within each list, so it may change the order of a fusion; and a fusion
# has no files.
NOT_OF_FUSIONS = (
    conformance.filters_hold,
    conformance.what_was_saved_finds_the_same,
    conformance.another_corpus_is_refused,
)
OF_FUSIONS = tuple(check for check in OF_ALL if check not in NOT_OF_FUSIONS)


def fused(corpus: StoredCorpus, vectors: np.ndarray) -> FusedIndex:
    engines = [BM25Index.build(corpus), ScanIndex(corpus, vectors)]
    return FusedIndex(engines, FusionConfig(weights=(1.0, 0.5), depth=30))


def unsaved(folder: Path, corpus: StoredCorpus) -> FusedIndex:
    raise AssertionError("a fusion has no files")


test_bm25 = run_with(Engine(lambda corpus, _: BM25Index.build(corpus), BM25Index.open), OF_ALL)
test_ranks = run_with(Engine(fused, unsaved), OF_FUSIONS)
