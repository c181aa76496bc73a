"""Reads the logs of `evaluate`, `predict` and `search`: of each question its scores and its list.

Every line is one question. The five systems write different lines, which their fields tell apart.
An episode that the infrastructure broke has no score and no list: it is left out, never a 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.runner import read_lines
from qrag_jax.data.queries import read_qrels
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import INFRASTRUCTURE
from qrag_jax.metrics.ranking import ranking_columns

COUNTS = (2, 4, 6, 10)  # passages at which a list is cut
MOST = COUNTS[-1]
NDCG = "ndcg@10"
_FUSION = 60.0  # as the engine `hybrid` has it

Scores = dict[str, dict[str, float]]  # question → score → value
Lists = dict[str, tuple[str, ...]]  # question → names of passages in the order they are read

Row = dict[str, Any]


def the_log(folder: Path, pattern: str) -> Path:
    """The one file of a pattern, such as best-*/eval_seed*.jsonl.

    Raises:
        InputError: there is none, or there are several.
    """
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise InputError(f"{folder} has {len(files)} files {pattern}; there must be one.")
    return files[0]


def has_failed(row: Row) -> bool:
    """Whether the infrastructure broke the episode, so that nobody knows its score."""
    if "trajectory" in row:  # RLVR
        return row["reward"] is None
    if "broken" in row:  # HARR
        return row["broken"] in INFRASTRUCTURE
    if "hops" in row:  # LeReT
        return any(hop["outcome"] in INFRASTRUCTURE for hop in row["hops"])
    return row.get("outcome", "") in INFRASTRUCTURE  # DeepRetrieval; Q-RAG has none


def scores_of(log: Path) -> Scores:
    """The scores of each question.

    Rewritten queries (DeepRetrieval) are scored by the judgements in the folder of their log.
    """
    rows = [row for row in read_lines(log) if not has_failed(row)]
    if rows and "original" in rows[0]:
        return _ranked(rows, log.parent / "trec")
    return {str(row["id"]): _scores(row) for row in rows}


def _scores(row: Row) -> dict[str, float]:
    if "sf_idx" in row:  # Q-RAG: gold passages, and those that were taken
        return fact_scores(row["sf_idx"], row["pred_idx"])
    if "trajectory" in row:
        return {**row["trajectory"]["parts"], "reward": row["reward"]}
    if "hops" in row:
        hops = enumerate((hop["scores"] for hop in row["hops"]), 1)
        return {f"hop{n}/{name}": value for n, hop in hops for name, value in hop.items()}
    # HARR: the recall is null where the corpus lacks gold passages.
    return {name: row[name] for name in ("em", "f1", "recall") if row[name] is not None}


def fact_scores(gold: Iterable[int], taken: Sequence[int]) -> dict[str, float]:
    """Fact EM is 1 where no gold passage is missing; precision, recall and F1 are of passages."""
    needed = {*gold}
    hits = len(needed & {*taken})
    recall, precision = hits / len(needed), hits / max(len(taken), 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {
        "fact_em": float(recall == 1.0),
        "fact_f1": f1,
        "fact_precision": precision,
        "fact_recall": recall,
    }


def _ranked(rows: Sequence[Row], folder: Path) -> Scores:
    """nDCG@10 by the folder's qrels; queries of several collections are named COLLECTION/QUERY."""
    scores: Scores = {}
    for collection in dict.fromkeys(row["collection"] for row in rows):
        lists = {r["id"]: list_of(r) for r in rows if r["collection"] == collection}
        column = ranking_columns(lists, read_qrels(folder / collection / "qrels.txt"), [NDCG])[NDCG]
        scores |= {f"{collection}/{q}": {NDCG: v} for q, v in column.items() if q in lists}
    return scores


# ---------------------------------------------------------------- lists


def lists_of(log: Path) -> tuple[Lists, set[str]]:
    """The passages of each question, and the questions whose episode failed."""
    rows = read_lines(log)
    failed = {str(row["id"]) for row in rows if has_failed(row)}
    return {str(r["id"]): list_of(r) for r in rows if str(r["id"]) not in failed}, failed


def list_of(row: Row) -> tuple[str, ...]:
    """The passages as they are read, each once, at most `MOST`.

    Where an episode searches several times, the best passage of every search comes first.
    """
    if "hits" in row:  # `qrag search`
        steps = itertools.groupby(row["hits"], key=lambda hit: hit["step"])
        return by_turns([hit["id"] for hit in hits] for _, hits in steps)
    if "trajectory" in row:
        return read_list(row["trajectory"]["facts"].get("seen", ()))
    if "searches" in row:
        return by_turns(search["names"] for search in row["searches"])
    if "hops" in row:
        return by_turns([name for name, _ in hop["found"]] for hop in row["hops"])
    return read_list(name for name, _ in row["found"] or ())


def read_list(names: Iterable[str]) -> tuple[str, ...]:
    """Each name where it comes first, at most `MOST`."""
    return tuple(dict.fromkeys(names))[:MOST]


def by_turns(searches: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The best of each search, then the second ones; so a list that is cut has some of each."""
    turns = itertools.zip_longest(*searches)
    return read_list(name for turn in turns for name in turn if name is not None)


def fused(*lists: Mapping[str, Sequence[str]]) -> Lists:
    """Reciprocal rank fusion (Cormack et al., 2009): by the sums of 1 / (60 + rank)."""
    merged = {}
    for question in lists[0]:
        sums: dict[str, float] = {}
        for ranking in lists:
            for rank, name in enumerate(ranking[question], 1):
                sums[name] = sums.get(name, 0.0) + 1 / (_FUSION + rank)
        merged[question] = read_list(sorted(sums, key=lambda name: -sums[name]))
    return merged
