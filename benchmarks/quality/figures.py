"""Means with 95 % intervals and paired differences, over questions and trainings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.quality.logs import Scores
from benchmarks.quality.parts import Part
from benchmarks.report import Case
from qrag_jax.metrics.bootstrap import crossed_interval

Results = Mapping[str, Mapping[str, Any]]  # part with its seed → result


class Interval(NamedTuple):
    """A mean and its bootstrap interval over trainings and questions."""

    mean: float
    low: float
    high: float
    questions: int


def interval(runs: Sequence[Scores], score: str) -> Interval | None:
    """The mean of a score over trainings and the questions that all of them have; None: no such."""
    table = _table(runs, score, _common(runs, score))
    return Interval(*crossed_interval(table), table.shape[1]) if table.size else None


def paired(runs: Sequence[Scores], others: Sequence[Scores], score: str) -> Interval | None:
    """The first less the second, by question, and by seed where both have as many trainings.

    Otherwise the one with fewer trainings counts by its mean over them, so that trainings are drawn
    from the larger number.
    """
    questions = _common([*runs, *others], score)
    first, second = (_table(scores, score, questions) for scores in (runs, others))
    if not first.size or not second.size:
        return None
    if len(first) < len(second):
        first = first.mean(axis=0, keepdims=True)
    elif len(second) < len(first):
        second = second.mean(axis=0, keepdims=True)
    difference = first - second
    return Interval(*crossed_interval(difference), difference.shape[1])


def _common(runs: Sequence[Scores], score: str) -> list[str]:
    """The questions that have this score in all trainings, in the first one's order."""
    known = [{name for name, scores in run.items() if score in scores} for run in runs]
    return [name for name in (runs[0] if runs else ()) if all(name in names for names in known)]


def _table(runs: Sequence[Scores], score: str, questions: Sequence[str]) -> np.ndarray:
    return np.array([[run[name][score] for name in questions] for run in runs])


# ---------------------------------------------------------------- cases


def cases(parts: Sequence[Part], results: Results) -> Iterator[Case]:
    """The cases of all parts that have a result.

    Args:
        parts: all that a part may be compared with.
    """
    by_name = {part.name: part for part in parts}
    for part in parts:
        if finished := part_results(part, results):
            yield from _means(part, finished)
            yield from _gains(part, finished, by_name, results)
            yield from _minutes(part, finished)


def part_results(part: Part, results: Results) -> dict[str, Mapping[str, Any]]:
    """The results of a part's finished seeds."""
    return {name: results[name] for name in part.runs if name in results}


def _means(part: Part, finished: Results) -> Iterator[Case]:
    for way in _ways(finished):
        runs = _scores(finished, way)
        for score in part.scores:
            if (mean := interval(runs, score)) is None:
                continue
            by_seed = " ".join(f"{one.mean:.3f}" for run in runs if (one := interval([run], score)))
            details: dict[str, float | str] = {
                **_bounds(mean),
                "trainings": float(len(runs)),
                "each training": by_seed,
                "measured": "; ".join(sorted({_measured(result) for result in finished.values()})),
            }
            about = dict.fromkeys(r["about"] for r in finished.values() if r["about"])
            if about:
                details["about"] = "; ".join(about)
            is_main = way == part.main and score == part.scores[0]
            peer = part.published if is_main else None
            yield Case(
                f"{part.name}: {score}, {way}",
                mean.mean,
                "share",
                peer=peer,
                ratio=mean.mean / peer if peer else None,
                details=details,
            )


def _gains(
    part: Part, finished: Results, by_name: Mapping[str, Part], results: Results
) -> Iterator[Case]:
    """The part's main way less each baseline; a target is asked of the first score and baseline."""
    for place, baseline in enumerate(part.compared):
        other, _, way = baseline.rpartition(":")
        its = part_results(by_name[other], results) if other else finished
        runs, others = _matched(_runs(finished, part.main), _runs(its, way))
        for score in part.scores:
            gain = paired(runs, others, score)
            if gain is None:
                continue
            peer = interval(others, score)
            asked = part.gain if place == 0 and score == part.scores[0] else None
            met = gain.mean >= asked and gain.low > 0 if asked is not None else None
            yield Case(
                f"{part.name}: {score}, {part.main} - {baseline.replace(':', ', ')}",
                gain.mean,
                "share",
                peer=peer.mean if peer else None,
                target=None if asked is None else f">= {asked:g}, interval above 0",
                holds=met,
                details=_bounds(gain) | {"trainings": f"{len(runs)}, {len(others)}"},
            )


def _minutes(part: Part, finished: Results) -> Iterator[Case]:
    minutes = [result["minutes"] for result in finished.values() if result["minutes"] is not None]
    if minutes:
        most = part.minutes
        yield Case(
            f"{part.name}: training",
            float(np.mean(minutes)),
            "minutes",
            target=None if most is None else f"<= {most:g} each",
            holds=None if most is None else max(minutes) <= most,
            details={"each training": " ".join(f"{m:.1f}" for m in minutes)},
        )


def _ways(finished: Results) -> list[str]:
    return list(dict.fromkeys(way for result in finished.values() for way in result["ways"]))


def _runs(finished: Results, way: str) -> list[tuple[int, Scores]]:
    """The seed and the scores of each training."""
    return [(r["seed"], r["ways"][way]) for r in finished.values() if way in r["ways"]]


def _scores(finished: Results, way: str) -> list[Scores]:
    return [scores for _, scores in _runs(finished, way)]


def _matched(
    runs: Sequence[tuple[int, Scores]], others: Sequence[tuple[int, Scores]]
) -> tuple[list[Scores], list[Scores]]:
    """Of two rows with several trainings those of the seeds that both have, in one order."""
    common = [seed for seed, _ in runs if seed in dict(others)]
    if len(runs) > 1 and len(others) > 1 and common:
        return [dict(runs)[seed] for seed in common], [dict(others)[seed] for seed in common]
    return [scores for _, scores in runs], [scores for _, scores in others]


def _measured(result: Mapping[str, Any]) -> str:
    return f"{result['date']}, {result['machine']}"


def _bounds(mean: Interval) -> dict[str, float | str]:
    return {"low": mean.low, "high": mean.high, "questions": float(mean.questions)}


def table(parts: Sequence[Part], results: Results) -> list[list[str]]:
    """Lines for reading: part, way, and its scores with intervals."""
    lines = []
    for part in parts:
        finished = part_results(part, results)
        for way in _ways(finished):
            runs = _scores(finished, way)
            cells = [
                f"{score} {mean.mean:.3f} [{mean.low:.3f}, {mean.high:.3f}]"
                for score in part.scores
                if (mean := interval(runs, score))
            ]
            lines.append([part.name, way, str(len(runs)), "; ".join(cells)])
    return lines
