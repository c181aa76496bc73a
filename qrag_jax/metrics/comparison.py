"""Compares retrievers: means with intervals, gains over the same questions, a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qrag_jax.metrics.bootstrap import columns_text, gains, interval_cells, interval_text
from qrag_jax.metrics.chunk_filters import FULL_BUDGET, UNTIL_FOUND, until_found
from qrag_jax.metrics.facts import score_columns, summarise
from qrag_jax.metrics.rows import Row

TRAINED, UNTRAINED = "trained", "untrained"
# What each line of the table is called: (encoder, steps) → name.
NAMES = {
    (UNTRAINED, "multi"): "untrained",
    (UNTRAINED, "single"): "single_step",
    (TRAINED, "single"): "single_step_trained",
    (TRAINED, "multi"): "trained",
}
PLANNED = "planned"  # the trained one, with beam search or a stopping rule


def compared(played: Mapping[str, list[Row]], *, in_full: bool) -> dict[str, Any]:
    """The scores of retrievers that were asked the same questions.

    Both modes come from one play. If play ended at the last fact, there is no full budget. If no
    question has supporting facts, there is only the full budget.
    """
    cut = {name: [until_found(row) for row in rows if row.sf_idx] for name, rows in played.items()}
    known = all(cut.values())
    in_full = in_full or not known
    summary: dict[str, Any] = {"mode": FULL_BUDGET if in_full else UNTIL_FOUND}
    summary |= _summaries(played)
    with_facts = sum(bool(row.sf_idx) for row in played[TRAINED])
    if with_facts < len(played[TRAINED]):
        summary["with_facts"] = with_facts  # questions
    if known:
        summary["until_found"] = _summaries(cut)
    # Trained minus each other retriever, over the same questions.
    columns = {name: score_columns(rows) for name, rows in (played if in_full else cut).items()}
    scores = ("fact_em", "fact_f1", "answer_found")
    shown = {name: columns[TRAINED][name] for name in scores if name in columns[TRAINED]}
    others = (name for name in NAMES.values() if name != TRAINED)
    summary["gains"] = {name: gains(shown, columns[name]) for name in others}
    return summary


def table(summary: dict[str, Any]) -> str:
    """The scores as text, one line per mode and retriever: means, most with 95 % intervals.

    Those of precision, recall and steps would make the table too wide to read.
    """
    cut = summary.get("until_found", {})
    text = []
    if summary["mode"] == FULL_BUDGET:
        whole = {name: summary[name] for name in (*NAMES.values(), PLANNED) if name in summary}
        every = {column for scores in whole.values() for column in scores["intervals"]}
        ranked = sorted((c for c in every if c.startswith("recall@")), key=lambda c: int(c[7:]))
        text += [*_lines(FULL_BUDGET, whole, ranked), ""]
    if cut:
        text += _lines(f"{UNTIL_FOUND} *", cut, [])
        text.append(
            "* uses the answer key: an episode ends once all supporting facts are found, and "
            "returns 1, as in Q-RAG's own evaluation"
        )
    if (some := summary.get("with_facts")) is not None:
        text.append(
            f"{some} of {summary['samples']} questions have supporting facts, and scores of facts "
            "are of these alone; answer_found: an answer stands in a chunk taken"
        )
    if PLANNED in cut and summary["mode"] == FULL_BUDGET:
        text.append("planned: the path that was best for all steps, cut at its last fact")
    if summary["mode"] == UNTIL_FOUND:
        text.append("no full budget: with config.env.never_terminate=False it is never played")
    for other, found in summary["gains"].items():
        differences = [f"{name} {interval_text(gain, sign=True)}" for name, gain in found.items()]
        text.append(f"trained - {other.replace('_', ' ')}: {', '.join(differences)}")
    speed = summary["episodes_per_second"]
    text.append(
        f"{summary['samples']} questions, {summary['checkpoint']} checkpoint of step "
        f"{summary['step']}" + (f", {speed:.1f} episodes/s" if speed else "")
    )
    if summary["best_is_untrained"]:
        text.append(
            "best = untrained: the best checkpoint is that of step 0; --checkpoint=last scores the "
            "trained weights"
        )
    return "\n".join(text)


def _lines(title: str, summaries: dict[str, Any], ranked: Sequence[str]) -> list[str]:
    """The table of one mode; `ranked` lists its columns of recall@k."""
    names = [name for name in (*NAMES.values(), PLANNED) if name in summaries]
    there = summaries[names[0]]["intervals"]  # all were asked the same questions
    bare = [column for column in ("fact_precision", "fact_recall", "steps") if column in there]
    first = [column for column in ("fact_em", "fact_f1", "answer_found") if column in there]
    last = [column for column in ("return",) if column in there]
    lines = [[title, *first, *(column.removeprefix("fact_") for column in bare), *ranked, *last]]
    for name in names:
        intervals = summaries[name]["intervals"]
        # A retriever that stops early may never take k chunks; then all its chunks count.
        at_k = [intervals.get(column) or intervals["fact_recall"] for column in ranked]
        cells = [name.replace("_", " "), *interval_cells(intervals, first)]
        cells += [f"{intervals[column]['mean']:.3f}" for column in bare]
        lines.append([*cells, *map(interval_text, at_k), *interval_cells(intervals, last)])
    return columns_text(lines)


def _summaries(played: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Means under the names of the scores, and all intervals under `intervals`."""
    summaries = {}
    for retriever, rows in played.items():
        scores = summarise(rows).items()
        intervals = {name: value for name, value in scores if isinstance(value, dict)}
        means = {name: value["mean"] for name, value in intervals.items()}
        summaries[retriever] = {**means, "intervals": intervals}
    return summaries
