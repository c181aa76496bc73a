"""Tunes a stopping threshold on Q on one log, and compares it with other rules on another log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qrag_jax.errors import InputError
from qrag_jax.metrics.bootstrap import gains, interval_text, score_table, with_intervals
from qrag_jax.metrics.facts import chunk_filter, fact_columns
from qrag_jax.metrics.row_log import Row, read_record, read_retrievals
from qrag_jax.runtime.plots import plot_thresholds
from qrag_jax.runtime.whole_files import half, write_whole, writing

REPORT = "stopping.json"  # file name of the report
OBJECTIVES = ("fact_f1", "fact_em", "fact_precision", "fact_recall")
COLUMNS = ("fact_f1", "fact_precision", "fact_recall", "fact_em", "steps")


# Sums over the rows are rounded differently from one threshold to the next. Scores this close count
# as equal. Two different means of F1 over 100,000 questions differ by more than this.
_TIE = 1e-10


def tune(
    log: Path,
    *,
    test_log: Path | None = None,
    out: Path | None = None,
    budgets: Sequence[int] = (),
    objective: str = "fact_f1",
) -> list[str]:
    """Tunes the threshold and writes the files; the lines are the report on `test_log`, or a half.

    `budgets` are fixed ones to compare with; (): 1, 2, …, all.
    """
    parts, report = _parts(log, test_log)
    (held_out, (_, tuned)), (test, (_, tested)) = parts.items()
    if not any(row.pred_idx for row in tuned):
        raise InputError(f"{log} holds no chunk taken ('pred_idx'); give another log")
    longest = max(len(row.pred_idx) for row in (*tuned, *tested))
    steps = sorted({*(budgets or range(1, longest + 1))})
    thresholds, swept = sweep_thresholds(tuned)
    threshold = float(thresholds[choose(swept[objective], swept["steps"])])
    rules = {
        "no_stopping": chunk_filter("none"),
        **{f"budget_{n}": chunk_filter("retrieval_step", {"steps": n}) for n in steps},
        "threshold": chunk_filter("qvalue", {"threshold": threshold}),
        "early_stop": chunk_filter("early_stop"),
    }
    # For each part and rule, the values of every metric, one per row.
    scores = {
        name: {rule: fact_columns([keep(row) for row in rows]) for rule, keep in rules.items()}
        for name, (_, rows) in parts.items()
    }
    of_budgets = [scores[held_out][f"budget_{n}"] for n in steps]
    means = [[float(np.mean(c[name])) for c in of_budgets] for name in (objective, "steps")]
    budget = steps[choose(*means)]
    labels = {rule: rule.replace("_", " ") for rule in rules}
    labels |= {"threshold": f"Q > {threshold:.4g}", "early_stop": "early_stop (oracle)"}
    summary: dict[str, Any] = {
        "threshold": threshold,
        "objective": objective,
        "budget": budget,
        "provenance": read_record(log),
    }
    lines = list[tuple[str, Mapping[str, Any]]]()
    for key, (name, (path, rows)) in zip(("tuned_on", "reported_on"), parts.items()):
        intervals = {rule: with_intervals(columns) for rule, columns in scores[name].items()}
        about = {"part": name, "log": str(path), "samples": len(rows)}
        summary[key] = {**about, "scores": intervals}
        lines.append((name, {}))
        for rule, cells in intervals.items():
            star = " *" if rule in ("threshold", f"budget_{budget}") else ""
            lines.append((f"  {labels[rule]}{star}", cells))
    report += score_table(lines, COLUMNS)
    report.append(f"*: chosen for its {objective} on the {held_out}, fewest steps among equals")
    shown = {name: scores[test]["threshold"][name] for name in ("fact_f1", objective, "steps")}
    for other in ("no_stopping", f"budget_{budget}"):
        differences = gains(shown, scores[test][other]).items()
        text = ", ".join(f"{name} {interval_text(gain, sign=True)}" for name, gain in differences)
        report.append(f"{test}: {labels['threshold']} - {labels[other]}: {text}")
    if shared := len({row.id for row in tuned} & {row.id for row in tested}):
        report.append(f"note: {shared} ids are in both logs; tune on other questions")
    folder = out or log.parent
    picture, path = folder / "stopping.png", folder / REPORT
    title = f"{objective} is highest at Q = {threshold:.4g} ({len(tuned)} questions)"
    curves = {name: values.tolist() for name, values in swept.items()}
    with writing(folder, "--out"):
        plot_thresholds(thresholds.tolist(), curves, threshold, picture, title)
        write_whole(path, json.dumps(summary, indent=2) + "\n")
    return [*report, f"threshold: {threshold!r} in {path}", f"plot: {picture}"]


def _parts(log: Path, test: Path | None) -> tuple[dict[str, tuple[Path, list[Row]]], list[str]]:
    """The log and the rows to tune on, and those to report on, by what they are called.

    And a line that says how one log is split.
    """
    rows = _played(log)
    if test is not None:
        other = _played(test)
        if test.samefile(log) or other == rows:
            raise InputError(f"--log and --test={test} hold the same rows; leave --test out")
        return {"held-out log": (log, rows), "test log": (test, other)}, []
    halves = [[row for row in rows if half(row.id) == side] for side in (0, 1)]
    if not all(halves):
        raise InputError(f"{log} has too few questions to be split in two halves; give --test")
    report = (
        f"no --test: {log} is split by a hash of the ids, {len(halves[0])} questions to tune on "
        f"and {len(halves[1])} others to report on"
    )
    return {"tuning half": (log, halves[0]), "other half": (log, halves[1])}, [report]


def _played(log: Path) -> list[Row]:
    rows = read_retrievals(log)
    if read_record(log).get("filters"):
        raise InputError(f"{log} is a filtered log; give the log that it was made from")
    if lacking := next((row for row in rows if len(row.q_values) != len(row.pred_idx)), None):
        raise InputError(f"{log}: {lacking.id} lacks 'q_values'; give a log of play")
    return rows


# ---------------------------------------------------------------------------- thresholds


def sweep_thresholds(
    rows: Sequence[Row],
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """All thresholds that take different chunks, `[K]`, falling; and their scores, `[K]` each.

    Play stops at the first step with Q <= the threshold; the first one takes nothing. Scores are
    the objectives and `steps`, exact means over the played rows, in one pass over sorted values.

    A step is taken if the running minimum of Q is above the threshold. So decisions change only at
    the running minima, and K is one more than the number of distinct minima. The minima are sorted
    from the highest; each adds the change of score of its step. A threshold lies in the middle of
    two neighbouring minima, with the largest margin to both, and the two outermost ones beyond the
    minima, by half their mean distance.
    """
    longest = max(len(row.pred_idx) for row in rows)
    taken = np.zeros((len(rows), longest), bool)
    hits = np.zeros((len(rows), longest))
    q = np.full((len(rows), longest), np.inf)
    facts = np.empty((len(rows), 1))
    for i, row in enumerate(rows):
        gold = set(row.sf_idx)
        taken[i, : len(row.pred_idx)] = True
        q[i, : len(row.pred_idx)] = row.q_values
        hits[i, : len(row.pred_idx)] = [index in gold for index in row.pred_idx]
        facts[i] = len(gold)

    minima = np.minimum.accumulate(q, axis=1)[taken]
    order = np.argsort(-minima, kind="stable")
    minima = minima[order]
    ends = np.flatnonzero(np.append(minima[1:] != minima[:-1], True))  # last of equal minima
    scores = {}
    for name, prefix in _prefix_scores(hits, facts).items():
        changes = np.cumsum(np.diff(prefix, axis=1)[taken][order])[ends]
        scores[name] = np.concatenate([[0.0], changes]) / len(rows)
    return _between(minima[ends]), scores


def choose(values: Sequence[float] | NDArray[np.float64], steps: Sequence[float] | NDArray) -> int:
    """Index of the highest value; among equal ones the fewest steps win."""
    value = np.asarray(values, np.float64)
    best = np.flatnonzero(value >= value.max() - _TIE)
    return int(best[np.argmin(np.asarray(steps)[best])])


def _prefix_scores(
    hits: NDArray[np.float64], facts: NDArray[np.float64]
) -> dict[str, NDArray[np.float64]]:
    """Scores of the first 0, 1, … T chunks of each row, `[n, T + 1]` each."""
    taken = np.pad(np.cumsum(hits, axis=1), ((0, 0), (1, 0)))
    steps = np.broadcast_to(np.arange(taken.shape[1], dtype=np.float64), taken.shape)
    return {
        "fact_f1": 2.0 * taken / (facts + steps),
        "fact_em": (taken == facts).astype(np.float64),
        "fact_precision": taken / np.maximum(steps, 1.0),
        "fact_recall": taken / facts,
        "steps": steps,
    }


def _between(minima: NDArray[np.float64]) -> NDArray[np.float64]:
    """The `[D + 1]` thresholds around the falling, distinct `minima` `[D]`."""
    spread = float(minima[0] - minima[-1])
    gap = spread / (minima.size - 1) if spread > 0 else 1.0
    upper = np.concatenate([[minima[0] + gap], minima])
    lower = np.concatenate([minima, [minima[-1] - gap]])
    middle = lower + (upper - lower) / 2.0
    # Devices compare in float32, where the middle of two neighbouring numbers rounds to one of
    # them. It must not round to the upper one, because a step with that Q is taken.
    rounded = middle.astype(np.float32).astype(np.float64)
    return np.where((lower <= rounded) & (rounded < upper), rounded, lower)
