"""Reads the logs of `evaluate`, `predict` and `search`: of each question its list of passages.

Every line is one question. The five systems write different lines, which their fields tell apart.
An episode that the infrastructure broke has no list: it is left out, never a 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.quality.runner import read_lines
from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import INFRASTRUCTURE

COUNTS = (2, 4, 6, 10)  # passages at which a list is cut
MOST = COUNTS[-1]
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
