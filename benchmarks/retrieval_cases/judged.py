"""Measures search on small judged collections: BM25 by settings, MiniLM, both fused.

The collections are in BEIR's layout in `ir` of the folder QRAG_DATA (default ../shared/data);
their dev queries are scored. BM25's settings are the three usual pairs of k1 and b, with and
without stemmer and stop words. MiniLM compares the cosines of its own vectors.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Case
from benchmarks.retrieval_cases.encoders import embedded, minilm, vectors_of
from qrag_jax.data.files.beir import qrels_path, read_documents, read_queries
from qrag_jax.metrics.bootstrap import interval_text
from qrag_jax.metrics.ranking import ranking_summary
from qrag_jax.metrics.trec import read_qrels
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.hybrid import FusedIndex
from qrag_jax.retrieval.protocol import NONE, Hits, Index, Passage, Queries
from qrag_jax.systems.indexing import CORPUS

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data")) / "ir"
COLLECTIONS = ("scifact", "cranfield", "cisi", "cacm", "vaswani")
PAIRS = ((1.5, 0.75), (1.2, 0.75), (0.9, 0.4))
# (stemmer, stop words)
READINGS = (("english", "english"), ("", "english"), ("english", ""), ("", ""))
_TARGET = 0.66  # nDCG@10 of SciFact
# MiniLM's nDCG@10 on SciFact by its card on the hub, and how near half of the queries should come.
_PUBLISHED, _CLOSE = 0.645, 0.03
_DEPTH = 100


def word_cases(quick: bool) -> Iterator[Case]:
    """BM25; `quick`: on SciFact with the package's defaults.

    Raises:
        InputError: a collection is not there, or the extra `retrieval` is not installed.
    """
    for name in COLLECTIONS[:1] if quick else COLLECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            corpus = _corpus(name, Path(folder))
            for stemmer, stop_words in READINGS[:1] if quick else READINGS:
                for k1, b in PAIRS[:1] if quick else PAIRS:
                    config = BM25Config(k1=k1, b=b, stemmer=stemmer, stop_words=stop_words)
                    yield _words(name, corpus, config)


def vector_cases(collections: Sequence[str] = COLLECTIONS) -> Iterator[Case]:
    """MiniLM, and MiniLM and BM25 with its defaults, fused by ranks.

    Raises:
        InputError: a collection is not there, or the extra `retrieval` is not installed.
    """
    encoder = minilm()
    for name in collections:
        with tempfile.TemporaryDirectory() as folder:
            corpus = _corpus(name, Path(folder))
            queries = list(read_queries(DATA / name, "dev").values())
            words, vectors = BM25Index.build(corpus), vectors_of(Path(folder), encoder)
            asked = Queries(queries, embedded(encoder, queries))
            alone = _scored(name, corpus, words.search(asked, _DEPTH))
            engines: dict[str, Index] = {"MiniLM": vectors}
            engines["BM25 and MiniLM, ranks"] = FusedIndex([words, vectors])
            best = alone
            for way, engine in engines.items():
                found = _scored(name, corpus, engine.search(asked, _DEPTH))
                yield _beside(name, way, found, best)
                best = max(best, found, key=lambda summary: summary["ndcg@10"]["mean"])


def _beside(name: str, way: str, found: Mapping[str, Any], other: Mapping[str, Any]) -> Case:
    """A way beside the better one of those it is made of, or beside BM25."""
    score, target, holds = found["ndcg@10"]["mean"], None, None
    if way == "MiniLM" and name == "scifact":
        target = f"within {_CLOSE} of the published {_PUBLISHED}"
        holds = abs(score - _PUBLISHED) <= _CLOSE
    elif way != "MiniLM":
        target, holds = "above both", score > other["ndcg@10"]["mean"]
    return Case(
        f"{way}, {name}",
        score,
        "nDCG@10",
        peer=other["ndcg@10"]["mean"],
        ratio=score / other["ndcg@10"]["mean"],
        target=target,
        holds=holds,
        details=_intervals(found),
    )


def _corpus(name: str, folder: Path) -> StoredCorpus:
    """A collection's documents with a title or a text; Cranfield has two without either."""
    every = (Passage(*document) for document in read_documents(DATA / name))
    return write_corpus(folder / CORPUS, (passage for passage in every if passage.whole))


def _words(name: str, corpus: StoredCorpus, config: BM25Config) -> Case:
    queries = list(read_queries(DATA / name, "dev").values())
    began = time.perf_counter()
    index = BM25Index.build(corpus, config)
    built = time.perf_counter()
    hits = index.search(Queries(queries), _DEPTH)
    found = time.perf_counter()
    summary = _scored(name, corpus, hits)
    score = summary["ndcg@10"]["mean"]
    read = f"stemmer {config.stemmer or 'none'}, stop words {config.stop_words or 'none'}"
    target = name == "scifact"
    return Case(
        f"BM25, {name}, k1 {config.k1:g}, b {config.b:g}, {read}",
        score,
        "nDCG@10",
        target=f">= {_TARGET}" if target else None,
        holds=score >= _TARGET if target else None,
        details={
            **_intervals(summary),
            "build, passages/s": len(corpus) / (built - began),
            "search, ms a query": 1e3 * (found - built) / len(queries),
        },
    )


def _scored(name: str, corpus: StoredCorpus, hits: Hits) -> dict[str, Any]:
    """The measures of the dev queries' hits."""
    queries = read_queries(DATA / name, "dev")
    rankings = {
        query: [passage.name for passage in corpus.passages(numbers[numbers != NONE])]
        for query, numbers in zip(queries, hits.numbers, strict=True)
    }
    return ranking_summary(rankings, read_qrels(qrels_path(DATA / name, "dev")))


def _intervals(summary: Mapping[str, Any]) -> dict[str, float | str]:
    names = ("ndcg@10", "recall@100", "ap", "rr@10", "hit@10")
    return {name: interval_text(summary[name]) for name in names} | {"queries": summary["queries"]}
