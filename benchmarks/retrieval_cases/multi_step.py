"""Measures search in several steps over a corpus, trained and not, beside single searches.

Retrievers are trained as users train them, on the ten passages of each question. Then they search
the passages of all evaluation questions at once, or an open corpus. Every way finds the same number
of passages for a question; scored is whether all its gold passages are among them, and the share of
them. The ways:

- BM25, MiniLM (the cosine of its own vectors), both fused by ranks: one search with the question;
- the towers of Q-RAG, untrained and trained: one search with the question;
- the same towers, as many searches as in training. Each finds the best passages of its state, and
  the best one goes into the next state.
- the towers that were trained again, with negatives that the first ones found for the training
  questions among the passages of all of these (`config.data.negatives`), and what they find fused
  by ranks with BM25.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from qrag_jax.retrieval.multi_step import MultiStepSearch
from qrag_jax.retrieval.protocol import NONE, Index, Passage, Queries
from qrag_jax.retrieval.tower_rows import State
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.whole_files import write_whole
from qrag_jax.systems.indexing import CORPUS
from qrag_jax.systems.jax_retriever import run_towers
from qrag_jax.systems.mined_negatives import by_rank
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.q_rag_config import QRagConfig, load_config
from qrag_jax.systems.saved_run import SavedRun
from qrag_jax.systems.towers_export import retriever_config, towers

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
STEPS, ONCE, FUSED = "steps", "one search", "steps and BM25"
TRAINED, TRAINED_ONCE, UNTRAINED = f"trained, {STEPS}", f"trained, {ONCE}", f"untrained, {STEPS}"
MINED, MINED_FUSED = f"mined, {STEPS}", f"mined, {FUSED}"
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
    corpus = _written(folder, (Passage(str(n), text) for text, n in number.items()))
    gold = [frozenset(number[s.chunks[i]] for i in s.support) for s in samples]
    return corpus, Questions([s.question for s in samples], gold)


def two_wiki_open(run: SavedRun, folder: Path) -> tuple[StoredCorpus, Questions]:
    """2WikiMultihopQA's open corpus and its questions, whichever run searches."""
    del run
    source = DATA / "2wikimultihopqa"
    records = (record for _, record in read_records(source / "open_corpus.jsonl.gz"))
    passages = (Passage(r["_id"], r["text"], r["title"]) for r in records)
    corpus = _written(folder, passages)
    asked = [record for _, record in read_records(source / "open_dev.jsonl.gz")]
    gold = [frozenset(corpus.numbers(record["gold_doc_ids"]).tolist()) for record in asked]
    return corpus, Questions([record["question"] for record in asked], gold)


def _written(folder: Path, passages: Iterable[Passage]) -> StoredCorpus:
    """The corpus in a folder; written if it is not there."""
    if (folder / CORPUS).exists():
        return StoredCorpus(folder / CORPUS)
    return write_corpus(folder / CORPUS, passages)


Lists = dict[int, list[list[int]]]  # number of passages → those found for each question
Reader = Callable[[SavedRun, Path], tuple[StoredCorpus, Questions]]


def training_corpus(workdir: Path, path: Path) -> Path:
    """The different passages of a run's training questions as JSON lines, written once."""
    if path.exists():
        return path
    config = load_config(workdir / CONFIG_NAME)
    samples = load_split(QRagConfig.of(config).data, "train", hold_out=True).all
    texts = dict.fromkeys(chunk for sample in samples for chunk in sample.chunks)
    lines = (json.dumps({"id": str(n), "text": text}) for n, text in enumerate(texts))
    write_whole(path, "\n".join(lines) + "\n")
    return path


def scores_of(
    runs: Mapping[str, Path], reader: Reader, counts: Sequence[int], folder: Path
) -> dict[str, Any]:
    """The scores of all ways to search, of every question (see `scores`).

    Args:
        runs: name → a run, whose best checkpoint searches; all are of one config and seed.
        reader: writes the corpus into the folder, beside which indexes are written and kept.
        counts: numbers of passages, multiples of the runs' steps.
    """
    opened = {
        name: SavedRun.open(path, load_config(path / CONFIG_NAME)) for name, path in runs.items()
    }
    first = next(iter(opened.values()))
    corpus, questions = reader(first, folder)
    task = _Task(corpus, questions, BM25Index.build(corpus), counts, folder)
    lists = _single(task) | _ways("untrained", first, first.untrained(), task)
    for name, run in opened.items():
        lists |= _ways(name, run, run.trained("best")[0], task)
    return scores(lists, questions.gold)


class _Task(NamedTuple):
    """What is searched for, where, and the folder of the indexes."""

    corpus: StoredCorpus
    questions: Questions
    words: BM25Index
    counts: Sequence[int]
    folder: Path


def _ways(name: str, run: SavedRun, params: Any, task: _Task) -> dict[str, Lists]:
    """What one pair of towers finds: by one search, by steps, and by steps and words."""
    corpus, questions, words, counts, folder = task
    encoder = dataclasses.replace(PassageEncoder.of_run(run), params=params)
    index = vectors_of(folder, encoder)
    config = retriever_config(run, towers(run.loaded, run.config), folder, None)
    both, rules = run_towers(run, params, config), rules_of(config)
    states = both.states([State(text) for text in questions.texts])
    asked = Queries(questions.texts, states)
    stepwise: Lists = {}
    for count in counts:
        each = dataclasses.replace(rules, per_step=count // rules.max_steps)
        hits = MultiStepSearch(index, both, each).search(questions.texts)
        names = ([hit.id for hit in by_rank(one)] for one in hits)
        stepwise[count] = [corpus.numbers(one).tolist() for one in names]
    by_words = words.search(asked, max(counts)).numbers
    return {
        f"{name}, {ONCE}": _firsts(index.search(asked, max(counts)).numbers, counts),
        f"{name}, {STEPS}": stepwise,
        f"{name}, {FUSED}": {
            count: [
                fused([row, own[:count]], count) for row, own in zip(rows, by_words, strict=True)
            ]
            for count, rows in stepwise.items()
        },
    }


def fused(rankings: Sequence[Sequence[int]], count: int, constant: float = 60.0) -> list[int]:
    """The passages with the highest sums of 1 / (constant + rank), as `hybrid` fuses by ranks."""
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            if number != NONE:
                sums[int(number)] = sums.get(int(number), 0.0) + 1 / (constant + rank)
    return sorted(sums, key=lambda number: (-sums[number], number))[:count]


def _single(task: _Task) -> dict[str, Lists]:
    """Ways that were not trained on these data."""
    _, questions, words, counts, folder = task
    plain = minilm()
    vectors = vectors_of(folder, plain)
    asked = Queries(questions.texts, embedded(plain, questions.texts))
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

        pairs = [(TRAINED, other) for other in (TRAINED_ONCE, UNTRAINED, BOTH)]
        pairs += [(MINED, TRAINED), (MINED, BOTH), (MINED_FUSED, BOTH)]
        for way, other in pairs:
            mean, low, high = paired_interval(every(way), every(other))
            yield Case(
                f"{name}, {count} passages: all gold found, {way} - {other}",
                mean,
                "share of questions",
                peer=float(every(other).mean()),
                target="above 0 in its interval",
                holds=low > 0,
                details={"low": low, "high": high, way: float(every(way).mean())},
            )
