"""Measures search in several steps over a corpus, trained and not, beside single searches.

Retrievers are trained as users train them, on the ten passages of each question. Then they search
the passages of all evaluation questions at once, or an open corpus. Every way finds the same number
of passages for a question; scored is whether all its gold passages are among them, and the share of
them. The ways:

- BM25, MiniLM (the cosine of its own vectors), both fused by ranks: one search with the question;
- the towers of Q-RAG, untrained and trained: one search with the question;
- the same towers, as many searches as in training. Each finds the best passages of its state, and
  the best one goes into the next state.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.report import Case
from benchmarks.retrieval_cases.encoders import embedded, minilm, vectors_of
from qrag_jax.data.files.records import read_records
from qrag_jax.data.loading import load_split
from qrag_jax.metrics.bootstrap import mean_interval, paired_interval
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.corpus_writer import write_corpus
from qrag_jax.retrieval.exported import rules_of
from qrag_jax.retrieval.hybrid import FusedIndex
from qrag_jax.retrieval.multi_step import Hit, MultiStepSearch
from qrag_jax.retrieval.protocol import Index, Passage, Queries
from qrag_jax.retrieval.tower_rows import State
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems.indexing import CORPUS
from qrag_jax.systems.jax_retriever import run_towers
from qrag_jax.systems.older_runs import load_config
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.towers_export import retriever_config, towers

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
TRAINED, TRAINED_ONCE = "trained, steps", "trained, one search"
UNTRAINED = "untrained, steps"
WORDS, VECTORS, BOTH = "BM25", "MiniLM", "BM25 and MiniLM"


class Questions(NamedTuple):
    """Evaluation questions over one corpus.

    gold: the numbers of each question's gold passages.
    """

    texts: list[str]
    gold: list[frozenset[int]]


def pooled(run: SavedRun, folder: Path) -> tuple[StoredCorpus, Questions]:
    """The different passages of a run's evaluation questions, as one corpus, and the questions."""
    samples = load_split(run.config.data, "dev", hold_out=False).all
    number: dict[str, int] = {}
    for sample in samples:
        for chunk in sample.chunks:
            number.setdefault(chunk, len(number))
    corpus = write_corpus(folder / CORPUS, (Passage(str(n), text) for text, n in number.items()))
    gold = [frozenset(number[s.chunks[i]] for i in s.support) for s in samples]
    return corpus, Questions([s.question for s in samples], gold)


def two_wiki_open(run: SavedRun, folder: Path) -> tuple[StoredCorpus, Questions]:
    """2WikiMultihopQA's open corpus and its questions, whichever run searches."""
    del run
    source = DATA / "2wikimultihopqa"
    records = (record for _, record in read_records(source / "open_corpus.jsonl.gz"))
    passages = (Passage(r["_id"], r["text"], r["title"]) for r in records)
    corpus = write_corpus(folder / CORPUS, passages)
    asked = [record for _, record in read_records(source / "open_dev.jsonl.gz")]
    gold = [frozenset(corpus.numbers(record["gold_doc_ids"]).tolist()) for record in asked]
    return corpus, Questions([record["question"] for record in asked], gold)


Lists = dict[int, list[list[int]]]  # number of passages → those found for each question
Reader = Callable[[SavedRun, Path], tuple[StoredCorpus, Questions]]


def scores_of(workdir: Path, reader: Reader, counts: Sequence[int], folder: Path) -> dict[str, Any]:
    """The scores of all ways to search, of every question (see `scores`).

    Args:
        workdir: a run, whose best checkpoint searches.
        reader: writes the corpus into the folder, beside which indexes are written.
        counts: numbers of passages, multiples of the run's steps.
    """
    run = SavedRun.open(workdir, load_config(workdir / CONFIG_NAME))
    corpus, questions = reader(run, folder)
    return scores(_found(run, corpus, questions, counts, folder), questions.gold)


def _found(
    run: SavedRun,
    corpus: StoredCorpus,
    questions: Questions,
    counts: Sequence[int],
    folder: Path,
) -> dict[str, Lists]:
    """The passages that each way finds, by way and number of passages."""
    own = PassageEncoder.of_run(run)
    lists = _single(corpus, minilm(), questions.texts, counts, folder)
    for name, params in (("untrained", run.untrained()), ("trained", run.trained("best")[0])):
        encoder = dataclasses.replace(own, params=params)
        index = vectors_of(folder, encoder)
        config = retriever_config(run, towers(run.loaded, run.config), folder, None)
        both, rules = run_towers(run, params, config), rules_of(config)
        states = both.states([State(text) for text in questions.texts])
        hits = index.search(Queries(questions.texts, states), max(counts))
        lists[f"{name}, one search"] = _firsts(hits.numbers, counts)
        lists[f"{name}, steps"] = {
            count: _numbers(
                MultiStepSearch(
                    index, both, dataclasses.replace(rules, per_step=count // rules.max_steps)
                ).search(questions.texts),
                corpus,
            )
            for count in counts
        }
    return lists


def _single(
    corpus: StoredCorpus,
    plain: PassageEncoder,
    texts: Sequence[str],
    counts: Sequence[int],
    folder: Path,
) -> dict[str, Lists]:
    """Ways that were not trained on these data."""
    vectors, words = vectors_of(folder, plain), BM25Index.build(corpus)
    asked = Queries(texts, embedded(plain, texts))
    engines: dict[str, Index] = {
        WORDS: words,
        VECTORS: vectors,
        BOTH: FusedIndex([words, vectors]),
    }
    most = max(counts)
    return {
        way: _firsts(engine.search(asked, most).numbers, counts) for way, engine in engines.items()
    }


def _firsts(numbers: np.ndarray, counts: Sequence[int]) -> Lists:
    return {count: [row[:count].tolist() for row in numbers] for count in counts}


def _numbers(hits: Sequence[Sequence[Hit]], corpus: StoredCorpus) -> list[list[int]]:
    return [corpus.numbers([hit.id for hit in one]).tolist() for one in hits]


def scores(lists: Mapping[str, Lists], gold: Sequence[frozenset[int]]) -> dict[str, Any]:
    """Of each way and number of passages: of each question, all gold found, and their share."""
    return {
        way: {
            str(count): {
                "all": [float(g <= {*row}) for g, row in zip(gold, rows, strict=True)],
                "recall": [len(g & {*row}) / len(g) for g, row in zip(gold, rows, strict=True)],
            }
            for count, rows in by_count.items()
        }
        for way, by_count in lists.items()
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The means over runs of the scores, with the interval of one run's questions, in Markdown."""
    counts = list(results[0][WORDS])
    lines = [
        "| way | " + " | ".join(f"{count} passages: all / recall" for count in counts) + " |",
        "|---" * (len(counts) + 1) + "|",
    ]
    for way in results[0]:
        cells = []
        for count in counts:
            runs = [result[way][count] for result in results]
            every = np.mean([run["all"] for run in runs], axis=0)
            mean, low, high = mean_interval(every)
            recall = float(np.mean([run["recall"] for run in runs]))
            cells.append(f"{mean:.3f} [{low:.3f}, {high:.3f}] / {recall:.3f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cases(name: str, results: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """Whether steps gain, and whether training does: differences of the same questions."""
    for count in results[0][WORDS]:

        def every(way: str, count: str = count) -> np.ndarray:
            return np.mean([result[way][count]["all"] for result in results], axis=0)

        for other in (TRAINED_ONCE, UNTRAINED, BOTH):
            mean, low, high = paired_interval(every(TRAINED), every(other))
            yield Case(
                f"{name}, {count} passages: all gold found, {TRAINED} - {other}",
                mean,
                "share of questions",
                peer=float(every(other).mean()),
                target="above 0 in its interval",
                holds=low > 0,
                details={"low": low, "high": high, TRAINED: float(every(TRAINED).mean())},
            )
