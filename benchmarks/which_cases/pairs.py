"""Paired differences of the rows that docs/which.md and benchmarks/RESULTS.md compare by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.report import markdown
from benchmarks.which_cases.found import READ
from benchmarks.which_cases.rlvr_row import IMITATED
from benchmarks.which_cases.row import FUSED, TRAINED, UNTRAINED
from benchmarks.which_cases.scores import RECALL, SPAN_F1
from benchmarks.which_cases.settings import HOTPOTQA, TWO_WIKI
from benchmarks.which_cases.table import COMPARED, Scored, difference_of, interval_cell


class Pair(NamedTuple):
    """Two lines of a setting, by their titles: the first less the second is told."""

    setting: str
    first: str
    second: str
    column: str = COMPARED


BM25, HYBRID, SECOND_HOP = "BM25", "BM25 and MiniLM", "BM25, then with its first passage"
PASSAGE = "pseudo-document by SmolLM2"
CONTRASTIVE = f"MiniLM, contrastive, {TRAINED}"
CONTRASTIVE_FUSED = f"{CONTRASTIVE}, {FUSED}"
CONTRASTIVE_TWICE = f"{CONTRASTIVE}, then with its first passage"
CONTRASTIVE_MOST = f"{CONTRASTIVE_TWICE}, {FUSED}"
Q_RAG, Q_RAG_MINED = f"Q-RAG, {TRAINED}", f"Q-RAG, mined negatives, {TRAINED}"
Q_RAG_FUSED, Q_RAG_MINED_FUSED = f"{Q_RAG}, {FUSED}", f"{Q_RAG_MINED}, {FUSED}"
HARR_GRPO, HARR_PPO = f"HARR, GRPO, {TRAINED}", f"HARR, PPO, {TRAINED}"
RLVR = f"RLVR, SmolLM2, {TRAINED}"
SMOLLM2_ROWS = ("LeReT, SmolLM2", "DeepRetrieval, SmolLM2")
PAIRS = (
    *(Pair(where, SECOND_HOP, BM25) for where in (TWO_WIKI, HOTPOTQA)),
    *(Pair(where, HYBRID, BM25) for where in (TWO_WIKI, HOTPOTQA)),
    *(Pair(where, PASSAGE, BM25) for where in (TWO_WIKI, HOTPOTQA)),
    *(Pair(where, SECOND_HOP, HYBRID) for where in (TWO_WIKI, HOTPOTQA)),
    Pair(TWO_WIKI, CONTRASTIVE_MOST, SECOND_HOP),
    Pair(TWO_WIKI, Q_RAG, CONTRASTIVE_MOST),
    Pair(TWO_WIKI, Q_RAG_FUSED, CONTRASTIVE_MOST),
    Pair(TWO_WIKI, Q_RAG_FUSED, Q_RAG),
    Pair(TWO_WIKI, HARR_GRPO, f"HARR, GRPO, {UNTRAINED}, sub-queries alone"),
    Pair(TWO_WIKI, HARR_GRPO, HARR_PPO),
    *(Pair(TWO_WIKI, f"{row}, {TRAINED}", f"{row}, {UNTRAINED}") for row in SMOLLM2_ROWS),
    *(Pair(TWO_WIKI, f"{row}, {TRAINED}", BM25) for row in SMOLLM2_ROWS),
    Pair(TWO_WIKI, RLVR, f"RLVR, SmolLM2, {IMITATED}"),
    Pair(TWO_WIKI, RLVR, f"RLVR, SmolLM2, {IMITATED}", f"{RECALL}@{READ}"),
    *(Pair(TWO_WIKI, Q_RAG_FUSED, row, SPAN_F1) for row in (HYBRID, CONTRASTIVE_MOST)),
    Pair(TWO_WIKI, HARR_GRPO, Q_RAG_FUSED, SPAN_F1),
    *(Pair(HOTPOTQA, row, HYBRID, SPAN_F1) for row in (CONTRASTIVE_TWICE, CONTRASTIVE_MOST)),
    Pair(HOTPOTQA, CONTRASTIVE_MOST, HYBRID),
    Pair(HOTPOTQA, CONTRASTIVE_FUSED, HYBRID),
    Pair(HOTPOTQA, Q_RAG, HYBRID),
    *(
        Pair(HOTPOTQA, row, less)
        for row in (Q_RAG_FUSED, Q_RAG_MINED_FUSED)
        for less in (HYBRID, CONTRASTIVE_MOST)
    ),
    *(
        Pair(HOTPOTQA, f"{row}, {TRAINED}", less)
        for row in SMOLLM2_ROWS
        for less in (f"{row}, {UNTRAINED}", BM25)
    ),
    Pair(HOTPOTQA, Q_RAG_MINED, Q_RAG),
    Pair(HOTPOTQA, Q_RAG_MINED_FUSED, Q_RAG_FUSED),
)


def table(lines: Sequence[Scored]) -> str:
    """A section in Markdown with each pair of which both lines are there; "" without one."""
    found = {(line.trained_in, line.title): line for line in lines}
    rows = []
    for pair in PAIRS:
        first, second = (found.get((pair.setting, title)) for title in (pair.first, pair.second))
        if first is None or second is None:
            continue
        gain = interval_cell(difference_of(first, second, pair.column), sign=True)
        rows.append([pair.setting, pair.first, pair.second, pair.column, gain])
    if not rows:
        return ""
    told = markdown(["setting", "row", "less", "column", "difference"], rows)
    return f"### Pairs that the text names\n\n{told}"
