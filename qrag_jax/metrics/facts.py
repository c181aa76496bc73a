"""Retrieved chunks: how well they cover the supporting facts, filters of them, and comparisons.

Chunks are named by their index in the document. `support` is the set of supporting facts,
`predicted` the chunks taken, in the order taken. Sources: HotpotQA (Yang et al., 2018) for EM and
F1 over sets of supporting facts; Q-RAG (arXiv 2511.07328), where EM asks only that no supporting
fact is missing, because the number of steps is fixed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.metrics.answers import answer_place, worded
from qrag_jax.metrics.bootstrap import gains, interval_text, score_table, with_intervals
from qrag_jax.metrics.row_log import Row


def fact_em(support: Iterable[int], predicted: Sequence[int]) -> float:
    """1.0 if every supporting fact was taken, whatever else was, else 0.0."""
    return float(set(support) <= set(predicted))


def fact_precision(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Share in [0, 1] of the distinct chunks taken that are supporting facts; 0.0 if none taken."""
    gold, taken = set(support), set(predicted)
    return len(gold & taken) / len(taken) if taken else 0.0


def fact_recall(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Share in [0, 1] of the supporting facts that were taken; 0.0 if nothing was taken."""
    gold = set(support)
    return len(gold.intersection(predicted)) / len(gold)


def fact_f1(support: Iterable[int], predicted: Sequence[int]) -> float:
    """Harmonic mean of precision and recall over index sets; 0.0 if no fact was taken."""
    gold, taken = set(support), set(predicted)
    # 2PR/(P+R) with P = hits/|taken| and R = hits/|gold|, without the 0/0 of no hit.
    return 2.0 * len(gold & taken) / (len(gold) + len(taken))


_SCORES = {
    "fact_em": fact_em,
    "fact_f1": fact_f1,
    "fact_precision": fact_precision,
    "fact_recall": fact_recall,
}


def fact_columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Fact metrics and `steps` (chunks taken) of each row."""
    columns = {
        name: [score(row.sf_idx, row.pred_idx) for row in rows] for name, score in _SCORES.items()
    }
    return columns | {"steps": [float(len(row.pred_idx)) for row in rows]}


def score_columns(rows: Sequence[Row]) -> dict[str, list[float]]:
    """What can be said of the rows, by the name of the score; scores of no row are left out.

    Those of facts are of the rows that have some. Where others have none there is `answer_found`:
    whether an answer stands in one of the chunks taken, of the rows whose answers have words.
    """
    known = [row for row in rows if row.sf_idx]
    columns = fact_columns(known) if known else {}
    columns["steps"] = [float(len(row.pred_idx)) for row in rows]
    if len(known) < len(rows):
        asked = [(row, worded((row.answer, *row.aliases))) for row in rows]
        places = [answer_place(row.pred_texts, answers) for row, answers in asked if answers]
        columns["answer_found"] = [float(place > 0) for place in places]
    columns["return"] = [row.ret for row in rows if row.ret is not None]
    return {name: values for name, values in columns.items() if values}


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Scores of a retrieval log, each as {"mean", "low", "high"}.

    They are those of `score_columns`, and `recall@1` … `recall@K` of the rows with facts, K being
    the length of the longest prediction.
    """
    columns = score_columns(rows)
    known = [row for row in rows if row.sf_idx]
    for k in range(1, max((len(row.pred_idx) for row in known), default=0) + 1):
        columns[f"recall@{k}"] = [fact_recall(row.sf_idx, row.pred_idx[:k]) for row in known]
    if "return" in columns:
        columns["return"] = columns.pop("return")  # the last one
    return with_intervals(columns)


# ---------------------------------------------------------------------------- chunk filters
# They choose which chunks of an episode are kept, as Q-RAG does between the retrieval log and the
# model that answers. The episode's `ret` stays. If play was greedy, `qvalue` at a threshold keeps
# exactly the chunks that an episode with this stopping rule takes: no step depends on later ones.

Filter = Callable[[Row], Row]


def qvalue(row: Row, threshold: float) -> Row:
    """The chunks before the first step whose Q is at most `threshold`."""
    if len(row.q_values) != len(row.pred_idx):
        raise InputError(f"sample {row.id} lacks Q values; give a log that is not filtered")
    stops = (step for step, q in enumerate(row.q_values) if q <= threshold)
    return _keep(row, range(next(stops, len(row.pred_idx))))


def retrieval_step(row: Row, steps: int) -> Row:
    """The first `steps` chunks taken: a fixed budget."""
    return _keep(row, range(min(steps, len(row.pred_idx))))


def early_stop(row: Row) -> Row:
    """The chunks up to the last supporting fact taken, with it; all chunks if none was taken.

    It is an oracle (griver/Q-RAG, `EarlyStopChunkFilter`).
    """
    hits = _hits(row)
    return _keep(row, range(hits[-1] + 1 if hits else len(row.pred_idx)))


def gt(row: Row) -> Row:
    """The supporting facts themselves, taken or not, in document order; they have no Q-values."""
    facts = dict(sorted(zip(row.sf_idx, row.sf_texts, strict=True)))
    taken: Any = {"pred_idx": [*facts], "pred_texts": [*facts.values()], "q_values": []}
    return scored(dataclasses.replace(row, **taken))


def _hits(row: Row) -> list[int]:
    gold = set(row.sf_idx)
    return [step for step, index in enumerate(row.pred_idx) if index in gold]


# Filters that look at the supporting facts.
BY_FACTS = ("early_stop", "gt", "no_noise")
# Name → (function, the parameter it needs besides the row).
FILTERS: dict[str, tuple[Callable[..., Row], str | None]] = {
    "none": (lambda row: _keep(row, range(len(row.pred_idx))), None),  # the full budget
    "qvalue": (qvalue, "threshold"),
    "retrieval_step": (retrieval_step, "steps"),
    "early_stop": (early_stop, None),
    "gt": (gt, None),
    # The chunks taken that are supporting facts, in the order taken.
    "no_noise": (lambda row: _keep(row, _hits(row)), None),
}


def chunk_filter(name: str, parameters: Mapping[str, Any] | None = None) -> Filter:
    """The filter called `name`, with its parameter bound; parameters may be None."""
    if name not in FILTERS:
        raise InputError(f"the chunk filter {name!r} is unknown; use one of {', '.join(FILTERS)}")
    function, parameter = FILTERS[name]
    options = {key: value for key, value in (parameters or {}).items() if value is not None}
    finite = all(map(math.isfinite, options.values())) and options.get("steps", 0) >= 0
    if [*options] != [parameter] * (parameter is not None) or not finite:
        kinds = {"threshold": "a finite threshold", "steps": "steps of 0 or more"}
        needs = f"needs {kinds[parameter]}, and no more" if parameter else "takes no number"
        raise InputError(f"the chunk filter {name} {needs}; it has {options or 'none'}")
    return functools.partial(function, **options)


def _keep(row: Row, steps: Sequence[int]) -> Row:
    # Rows that were not played (those of `gt`) have no Q values to cut.
    columns = ("pred_idx", "pred_texts", "q_values") if row.q_values else ("pred_idx", "pred_texts")
    cut: Any = {name: [getattr(row, name)[step] for step in steps] for name in columns}
    return scored(dataclasses.replace(row, **cut))


def scored(row: Row) -> Row:
    """The row with its own F1 and EM; None where no facts are known."""
    if not row.sf_idx:
        return dataclasses.replace(row, f1=None, em=None)
    both = row.sf_idx, row.pred_idx
    return dataclasses.replace(row, f1=fact_f1(*both), em=fact_em(*both))


FULL_BUDGET, UNTIL_FOUND = "full budget", "until found"


def until_found(row: Row) -> Row:
    """The row of the episode that ends, and returns 1.0, once all supporting facts are found.

    Else the row has all its steps and the return 0.0.
    """
    missing, steps = set(row.sf_idx), 0
    for index in row.pred_idx:
        if not missing:
            break
        missing.discard(index)
        steps += 1
    return dataclasses.replace(retrieval_step(row, steps), ret=float(not missing))


# ---------------------------------------------------------------------------- comparisons

NAMES = ("untrained", "single_step", "single_step_trained", "trained")  # as the table has them
UNTRAINED, SINGLE, SINGLE_TRAINED, TRAINED = NAMES
PLANNED = "planned"  # the trained one, with beam search or a stopping rule


def compared(played: Mapping[str, list[Row]], *, in_full: bool) -> dict[str, Any]:
    """The scores of retrievers that were asked the same questions.

    Both modes come from one play. If play ended at the last fact, there is no full budget; without
    supporting facts, there is nothing else.
    """
    cut = {name: [until_found(row) for row in rows if row.sf_idx] for name, rows in played.items()}
    known = all(cut.values())
    in_full = in_full or not known
    summary: dict[str, Any] = {"mode": FULL_BUDGET if in_full else UNTIL_FOUND}
    summary |= {"main": TRAINED, "scores": {name: summarise(rows) for name, rows in played.items()}}
    with_facts = sum(bool(row.sf_idx) for row in played[TRAINED])
    if with_facts < len(played[TRAINED]):
        summary["with_facts"] = with_facts  # questions
    if known:
        summary["until_found"] = {name: summarise(rows) for name, rows in cut.items()}
    # Trained minus each other retriever, over the same questions.
    columns = {name: score_columns(rows) for name, rows in (played if in_full else cut).items()}
    scores = ("fact_em", "fact_f1", "answer_found")
    shown = {name: columns[TRAINED][name] for name in scores if name in columns[TRAINED]}
    others = (name for name in NAMES if name != TRAINED)
    summary["gains"] = {name: gains(shown, columns[name]) for name in others}
    return summary


def table(summary: dict[str, Any]) -> str:
    """The scores as text, one line per mode and retriever."""
    cut = summary.get("until_found", {})
    text = []
    if summary["mode"] == FULL_BUDGET:
        whole = summary["scores"]
        every = {column for scores in whole.values() for column in scores}
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
    for other, differs in summary["gains"].items():
        differences = [f"{name} {interval_text(gain, sign=True)}" for name, gain in differs.items()]
        text.append(f"trained - {other.replace('_', ' ')}: {', '.join(differences)}")
    text.append("{samples} questions, {checkpoint} checkpoint of step {step}".format_map(summary))
    if summary["best_is_untrained"]:
        text.append("best = untrained: the best checkpoint is step 0; --checkpoint=last is trained")
    return "\n".join(text)


def _lines(title: str, summaries: dict[str, Any], ranked: Sequence[str]) -> list[str]:
    """The table of one mode; `ranked` lists its columns of recall@k."""
    names = [name for name in (*NAMES, PLANNED) if name in summaries]
    there = summaries[names[0]]  # all were asked the same questions
    columns = [c for c in ("fact_em", "fact_f1", "answer_found", "return") if c in there]
    bare = [column for column in ("fact_precision", "fact_recall", "steps") if column in there]
    means = {column.removeprefix("fact_"): f"{{{column}[mean]:.3f}}" for column in bare}
    lines = []
    for name in names:
        scores = summaries[name]
        # A retriever that stops early may never take k chunks; then all its chunks count.
        every = {**dict.fromkeys(ranked, scores.get("fact_recall")), **scores}
        lines.append((name.replace("_", " "), every))
    return score_table(lines, [*columns, *ranked], means, title=title)
