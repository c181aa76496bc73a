"""Tunes when to stop: python -m qrag_jax.stopping --log=HELD_OUT.jsonl --test=OTHER.jsonl

Both are retrieval logs of greedy play (`qrag_jax.evaluate`, `qrag_jax.evaluate_lengths`). The
threshold of Q is chosen on the first and judged on the second; without `--test` the log is split in
two halves by its questions' ids. Prints fact F1, precision, recall, EM and mean steps for the full
budget, every fixed budget, the threshold and the oracle, and plots F1 against the threshold.
`--filter=NAME` or `NAME:VALUE` with `--filtered=FILE` writes the log with a chunk filter applied.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from qrag_jax.errors import InputError
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.chunk_filters import check_filter, filter_chunks
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.metrics.thresholds import OBJECTIVES, sweep
from qrag_jax.runtime import commandline
from qrag_jax.runtime.threshold_plot import plot_thresholds

LOG = flags.DEFINE_string("log", None, "Retrieval log that the threshold is tuned on.")
TEST = flags.DEFINE_string("test", None, "Retrieval log that it is judged on; default: a half.")
OUT = flags.DEFINE_string("out", None, "Folder of stopping.json and .png; default: the log's.")
OBJECTIVE = flags.DEFINE_enum("objective", "fact_f1", OBJECTIVES, "What the threshold maximises.")
FILTER = flags.DEFINE_string("filter", None, "Chunk filter, NAME or NAME:VALUE.")
FILTERED = flags.DEFINE_string("filtered", None, "FILE for the log with --filter applied.")

COLUMNS = ("fact_f1", "fact_precision", "fact_recall", "fact_em", "steps")
Rule = tuple[str, float | None]  # a chunk filter and its value


def tune(held_out: Sequence[Row], test: Sequence[Row], objective: str) -> dict[str, Any]:
    """The threshold, and the scores of each rule on the rows it was not tuned on."""
    found = sweep(held_out)
    place = found.best(objective)
    threshold = float(found.thresholds[place])
    most = max(len(row.pred_idx) for row in [*held_out, *test])
    rules: dict[str, Rule] = {"all steps": ("none", None)}
    rules |= {f"{n} steps": ("retrieval_step", n) for n in range(1, most)}
    rules["threshold"] = ("qvalue", threshold)
    rules["oracle"] = ("early_stop", None)
    scores = {
        name: summarise([filter_chunks(rule, row, value) for row in test])
        for name, (rule, value) in rules.items()
    }
    return {
        "threshold": threshold if math.isfinite(threshold) else None,
        "objective": objective,
        "tuned": {
            "questions": len(held_out),
            objective: float(getattr(found, objective)[place]),
            "without": float(getattr(found, objective)[0]),
        },
        "questions": len(test),
        "rules": {name: {c: score[c] for c in COLUMNS} for name, score in scores.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The rules' scores as text, with 95 % bootstrap intervals."""
    lines = [["", *COLUMNS]]
    for name, scores in result["rules"].items():
        cells = [f"{s['mean']:.3f} [{s['low']:.3f}, {s['high']:.3f}]" for s in scores.values()]
        lines.append([name, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows in two halves by a hash of their ids, the same at every call.

    Raises:
        InputError: one of them is empty.
    """
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        parts[hashlib.sha256(row.id.encode()).digest()[0] % 2].append(row)
    if not all(parts):
        raise InputError(
            f"--log has {len(rows)} questions, too few to be split into a half for tuning and one "
            "for judging; give --test=LOG."
        )
    return parts


def _read(flag: str, path: str | None) -> list[Row]:
    if not path:
        raise InputError(f"give the retrieval log, --{flag}=…/eval_seed42.jsonl.")
    rows = retrieval_log.read(Path(path))
    if not rows:
        raise InputError(f"--{flag}={path} has no rows; score a run first.")
    for row in rows:
        if not row.sf_idx:
            raise InputError(f"--{flag}={path}: {row.id} has no supporting facts to be judged by.")
        if len({len(row.pred_idx), len(row.q_values), len(row.pred_texts)}) > 1:
            raise InputError(
                f"--{flag}={path}: {row.id} has lists of different lengths in pred_idx, q_values "
                "and pred_texts; score the run again."
            )
    return rows


def _write_filtered(rows: Sequence[Row]) -> None:
    name, _, word = str(FILTER.value).partition(":")
    try:
        value = float(word) if word else None
    except ValueError:
        raise InputError(f"--filter={FILTER.value}: {word!r} is not a number.") from None
    check_filter(name, value)
    path = Path(FILTERED.value or "")
    if not FILTERED.value or path.exists():
        reason = "exists already" if FILTERED.value else "is missing"
        raise InputError(f"--filtered={path if FILTERED.value else ''} {reason}; name a new file.")
    kept = [filter_chunks(name, row, value) for row in rows]
    retrieval_log.append(path, kept)
    before, after = summarise(rows), summarise(kept)
    for column in COLUMNS:
        print(f"{column}: {before[column]['mean']:.3f} → {after[column]['mean']:.3f}")
    print(f"filtered log: {path}")


def main() -> int:
    """Reads the flags; tunes, or filters."""
    rows = _read("log", LOG.value)
    if FILTER.value:
        _write_filtered(rows)
        return 0
    if TEST.value:
        if Path(TEST.value).resolve() == Path(str(LOG.value)).resolve():
            raise InputError("--log and --test are the same file; judge on other questions.")
        held_out, test = rows, _read("test", TEST.value)
    else:
        held_out, test = halves(rows)
        print(f"tuned on {len(held_out)} of the log's questions, judged on the other {len(test)}")
    result = tune(held_out, test, OBJECTIVE.value)
    out = Path(OUT.value) if OUT.value else Path(str(LOG.value)).parent
    out.mkdir(parents=True, exist_ok=True)
    (out / "stopping.json").write_text(json.dumps(result, indent=2) + "\n")
    found = sweep(held_out)
    scores = {name: getattr(found, name) for name in OBJECTIVES[:3]}
    chosen = result["threshold"] if result["threshold"] is not None else -math.inf
    plot = out / "stopping.png"
    plot_thresholds(found.thresholds, scores, found.steps, chosen, plot, Path(str(LOG.value)).name)
    print(table(result))
    if result["threshold"] is None:
        print("no threshold is better than taking all steps")
    else:
        print(f"stop before a Q of at most {chosen:.6g}: --config.eval.stop_threshold={chosen:.6g}")
    print(f"scores: {out / 'stopping.json'}\nplot: {plot}")
    return 0


if __name__ == "__main__":
    commandline.run(main)
