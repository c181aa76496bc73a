"""Measures search by words: BM25 on small judged collections, by settings, and its speed.

The collections are in BEIR's layout in `ir` of the folder QRAG_DATA (default ../shared/data);
their dev queries are scored. The settings are the three usual pairs of k1 and b, with and without
stemmer and stop words. With `--quick` only SciFact and the package's defaults are measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Case
from qrag_jax.data.files.beir import qrels_path, read_documents, read_queries
from qrag_jax.metrics.ranking import ranking_summary
from qrag_jax.metrics.score_table import interval_text
from qrag_jax.metrics.trec import read_qrels
from qrag_jax.retrieval.bm25 import BM25Config, BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.protocol import NONE, Passage, Queries

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data")) / "ir"
COLLECTIONS = ("scifact", "cranfield", "cisi", "cacm", "vaswani")
PAIRS = ((1.5, 0.75), (1.2, 0.75), (0.9, 0.4))
# (stemmer, stop words)
READINGS = (("english", "english"), ("", "english"), ("english", ""), ("", ""))
_TARGET = 0.66  # nDCG@10 of SciFact
_DEPTH = 100


def run(quick: bool) -> list[Case]:
    """All cases of the suite.

    Raises:
        InputError: a collection is not there, or the extra `retrieval` is not installed.
    """
    cases = []
    for name in COLLECTIONS[:1] if quick else COLLECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            corpus = write_corpus(Path(folder), _passages(DATA / name))
            for case in _cases(name, corpus, quick):
                print(f"measured: {case.case}", flush=True)
                cases.append(case)
    return cases


def _passages(folder: Path) -> Iterator[Passage]:
    """Those with a title or a text; Cranfield has two without either."""
    every = (Passage(*document) for document in read_documents(folder))
    return (passage for passage in every if passage.whole)


def _cases(name: str, corpus: StoredCorpus, quick: bool) -> Iterator[Case]:
    for stemmer, stop_words in READINGS[:1] if quick else READINGS:
        for k1, b in PAIRS[:1] if quick else PAIRS:
            config = BM25Config(k1=k1, b=b, stemmer=stemmer, stop_words=stop_words)
            yield _case(name, corpus, config)


def _case(name: str, corpus: StoredCorpus, config: BM25Config) -> Case:
    queries = read_queries(DATA / name, "dev")
    began = time.perf_counter()
    index = BM25Index.build(corpus, config)
    built = time.perf_counter()
    hits = index.search(Queries(list(queries.values())), _DEPTH)
    found = time.perf_counter()
    rankings = {
        query: [passage.name for passage in corpus.passages(numbers[numbers != NONE])]
        for query, numbers in zip(queries, hits.numbers, strict=True)
    }
    summary = ranking_summary(rankings, read_qrels(qrels_path(DATA / name, "dev")))
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
            **{measure: interval_text(summary[measure]) for measure in ("ndcg@10", "recall@100")},
            **{measure: interval_text(summary[measure]) for measure in ("ap", "rr@10", "hit@10")},
            "queries": summary["queries"],
            "build, passages/s": len(corpus) / (built - began),
            "search, ms a query": 1e3 * (found - built) / len(queries),
        },
    )
