"""Scores of language models: with tools, in an environment, as query writers, as rewriters."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.environments.episode import Document, Failed, ToolTask
from qrag_jax.environments.queries import (
    EMPTY,
    OUTCOMES,
    REWRITTEN,
    STOPPED,
    TOO_LONG,
    QueryState,
    RewriteTask,
    read_output,
)
from qrag_jax.environments.queries import Searched as Found
from qrag_jax.evaluators.evaluation import Evaluation, lost_text, sampler
from qrag_jax.feedback.llm import Unscored
from qrag_jax.feedback.pairs import ALL_GOLD, AP, RECALL, Try
from qrag_jax.feedback.rewrite import GUARD_MEASURES, guard_measures
from qrag_jax.feedback.rubric import PARTS, Rubric, reward_of, score
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.bootstrap import (
    columns_text,
    gains,
    interval_text,
    means,
    score_table,
    with_intervals,
)
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.metrics.rows import (
    HOPS,
    PREDICTIONS,
    REWRITES,
    Hop,
    Prediction,
    RewriteRow,
    Searched,
)
from qrag_jax.metrics.summaries import hop_columns
from qrag_jax.rollouts.environment_play import Scored
from qrag_jax.rollouts.token_episodes import Speech, TokenEpisode
from qrag_jax.runtime.own_code import OwnCode

REWARD = "reward"
_OF_TOOLS = (*PARTS, REWARD, "turns", "searches", "completed", "truncated", "malformed")
_SHOWN = ("em", "f1", "recall", "citation", REWARD)

# Places of questions → rows to look at.
Logged = Callable[[Sequence[int]], Sequence[Prediction]]


# ---------------------------------------------------------------- with tools, in an environment


def tool_evaluation(
    step: int,
    tasks: Sequence[ToolTask],
    episodes: Sequence[TokenEpisode],
    *,
    rubric: Rubric | OwnCode,
    best_by: str,
    logged: Logged,
) -> Evaluation:
    """Scores an episode for each of the fixed questions of a training."""
    rows = score_rows(tasks, episodes, rubric)
    scores = _means(rows, len(tasks), (*_OF_TOOLS, "sampled_tokens"))
    malformed = f", {n:.2f} malformed calls" if (n := scores["malformed"]) else ""
    parts = ", ".join(f"{name} {scores[name]:.3f}" for name in _SHOWN)
    line = (
        f"step {step}: {parts}, {scores['turns']:.2f} turns, {scores['completed']:.0%} completed"
        f"{malformed}{lost_text(scores, {'failed_share': 'failed'})} on {len(tasks)} questions"
    )
    kept, each = sampler(PREDICTIONS, logged, len(tasks)), [row[best_by] for row in rows]
    return Evaluation.of(line, scores, best_by, episodes=kept, each=each)


def environment_evaluation(
    step: int, episodes: Sequence[TokenEpisode], logged: Logged
) -> Evaluation:
    """Scores an episode for each of the fixed tasks of an environment with its own rewards."""
    rows = [
        {
            **episode.ended.parts,
            REWARD: episode.ended.reward,
            "turns": float(sum(len(segment) for segment in episode.segments)),
            "truncated": float(episode.ended.tally.truncated),
            "sampled_tokens": float(_sampled_tokens(episode)),
        }
        for episode in episodes
        if isinstance(episode.ended, Scored)
    ]
    scores = _means(rows, len(episodes), (REWARD,))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
    line = f"step {step}: {parts} on {len(episodes)} tasks"
    kept, each = sampler(PREDICTIONS, logged, len(episodes)), [row[REWARD] for row in rows]
    return Evaluation.of(line, scores, REWARD, episodes=kept, each=each)


def score_rows(
    tasks: Sequence[ToolTask], episodes: Sequence[TokenEpisode], rubric: Rubric | OwnCode
) -> list[dict[str, float]]:
    """Scores of each question whose episode did not fail, nor its reward."""
    rows: list[dict[str, float]] = []
    for task, episode in zip(tasks, episodes, strict=True):
        ended = episode.ended
        if isinstance(ended, Failed):
            continue
        parts, tally = score(ended, task), ended.tally
        reward = reward_of(rubric, ended, task, parts)
        if isinstance(reward, Unscored):
            continue
        counts = {"turns": tally.turns, "searches": tally.searches, REWARD: reward}
        counts |= {"completed": float(tally.completed), "truncated": float(tally.truncated)}
        counts["malformed"] = tally.malformed + tally.unknown_tool
        rows.append(parts | counts | {"sampled_tokens": _sampled_tokens(episode)})
    return rows


def _sampled_tokens(episode: TokenEpisode) -> int:
    return sum(len(turn.sampled) for segment in episode.segments for turn in segment)


def _means(
    rows: Sequence[Mapping[str, float]], episodes: int, names: Sequence[str]
) -> dict[str, float]:
    """Means over the rows, of these names 0 if there are none; and the share without a row."""
    every = dict.fromkeys((*names, *(name for row in rows for name in row)))
    scores = means({name: [row[name] for row in rows if name in row] for name in every})
    return scores | {"failed_share": 1 - len(rows) / episodes if episodes else 0.0}


# ---------------------------------------------------------------- query writers


@dataclasses.dataclass(frozen=True, slots=True)
class HopRow:
    """A question after a hop."""

    scores: dict[str, float]  # of its pool
    query: str  # of this hop; "" if there was none
    before: QueryState  # before, after: the states around it
    after: QueryState
    # The try of this hop; None: the search had ended before, or no model wrote the query
    made: Try | None = None
    read: int = 0  # tokens of the prompt; 0 if no model read any
    outcome: str = ""  # of the try, or the cause by which a rule's search failed; "": none of these


def query_evaluation(step: int, rows: Sequence[Searched], best_by: str) -> Evaluation:
    """Scores the played questions of a training."""
    scores, last = hop_scores(rows), len(rows[0].hops)
    of_hop = "hop {0}: recall {1:.3f}, AP {2:.3f}, all gold {3:.3f}"
    shown = [[scores[f"hop{n}/{x}"] for x in (RECALL, AP, ALL_GOLD)] for n in range(1, last + 1)]
    parts = [of_hop.format(n, *values) for n, values in enumerate(shown, 1)]
    lost = scores["empty_share"] + scores["too_long_share"] + scores["failed_share"]
    without = f"; {lost:.1%} without a query" if lost else ""
    line = f"step {step}: {'; '.join(parts)}{without}; {len(rows)} questions"
    kept = sampler(HOPS, lambda at: [rows[place] for place in at], len(rows))
    each = [row.hops[-1].scores[best_by] for row in rows if not row.failed]
    return Evaluation.of(line, scores, f"hop{last}/{best_by}", episodes=kept, each=each)


def hop_scores(rows: Sequence[Searched]) -> dict[str, float]:
    """Means over the questions: `hopN/SCORE` after each hop, and what the queries took.

    A query that is empty or too long finds nothing: the pool stays as it was. A question with a hop
    that failed is left out of the scores.
    """
    columns = hop_columns([row for row in rows if not row.failed])
    scores = {name: float(np.mean(columns.get(name) or 0.0)) for name in hop_columns(rows)}
    hops = [hop for row in rows for hop in row.hops]
    outcomes = Counter(hop.outcome for hop in hops if hop.outcome)  # of what a model wrote
    count = max(outcomes.total(), 1)
    known = {"empty_share": EMPTY, "too_long_share": TOO_LONG, "stopped_share": STOPPED}
    failed = sum(number for outcome, number in outcomes.items() if outcome not in OUTCOMES)
    return {
        **scores,
        **{name: outcomes[outcome] / count for name, outcome in known.items()},
        "failed_share": failed / count,
        "sampled_tokens": sum(hop.sampled for hop in hops) / len(rows),
        "read_tokens": sum(hop.read for hop in hops) / len(rows),
    }


def logged(shown: Sequence[QueryState], hops: Sequence[Sequence[HopRow]]) -> list[Searched]:
    """Played questions as rows of a log."""
    return [
        Searched(s.id, s.question, s.answers, s.pages, tuple(map(_logged, rows)), s.source)
        for s, *rows in zip(shown, *hops, strict=True)
    ]


def _logged(row: HopRow) -> Hop:
    made, pool = row.made, tuple(each.id for each in row.after.pool)
    if made is None:
        return Hop(row.query, row.outcome, pool, row.scores, row.read)
    sampled = len(made.sampled)
    return Hop(row.query, row.outcome, pool, row.scores, row.read, sampled, made.found)


# ---------------------------------------------------------------- query rewriters

Rankings = Sequence[Sequence[str] | None]  # of each query, best first; None: its search failed


def rewrite_evaluation(
    step: int,
    tasks: Sequence[RewriteTask],
    rows: Sequence[RewriteRow],
    *,
    originals: Rankings,
    measures: Sequence[str],
    best_by: str,
) -> Evaluation:
    """Scores the played queries of a training."""
    original = means(measured(tasks, originals, measures))
    columns = measured(tasks, rankings_of(rows), measures)
    scores = means(columns)
    told = [f"{x} {scores[x]:.3f} ({original[x]:.3f} by the originals)" for x in measures]
    scores |= {name: value or 0.0 for name, value in shape_of_rows(tasks, rows).items()}
    scores.pop("readable")
    scores["failed_share"] = sum(row.failed for row in rows) / max(len(rows), 1)
    told += [f"{scores['format']:.0%} readable", f"{scores['query_words']:.1f} words"]
    lost = lost_text(scores, {"failed_share": "failed"})
    line = f"step {step}: {', '.join(told)}{lost} on {len(tasks)} queries"
    kept = sampler(REWRITES, lambda at: [rows[place] for place in at], len(rows))
    found = Evaluation.of(line, scores, best_by, episodes=kept, each=columns[best_by])
    found.baselines.update({f"original/{name}": value for name, value in original.items()})
    return found


def rankings_of(rows: Sequence[RewriteRow]) -> list[tuple[str, ...] | None]:
    """What each query found, best first; () if there is no query, None if its search failed."""
    return [None if row.failed else row.ranking for row in rows]


def measured(
    tasks: Sequence[RewriteTask], rankings: Rankings, measures: Sequence[str]
) -> dict[str, list[float]]:
    """Each measure of each query whose search has not failed, in order."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": ranking for n, ranking in enumerate(rankings) if ranking is not None}
    if not ranked:
        return {measure: [] for measure in measures}
    qrels = {name: dict(tasks[int(name)].grades) for name in ranked}
    columns = ranking_columns(ranked, qrels, measures)
    return {measure: [column[name] for name in ranked] for measure, column in columns.items()}


def shape_of_rows(
    tasks: Sequence[RewriteTask], rows: Sequence[RewriteRow]
) -> dict[str, float | None]:
    """Means over the queries that did not fail; None: of nothing.

    `format` is the share with a query, even one that the search cannot read, as in the reward, and
    `readable` that with a query that was searched for. `GUARD_MEASURES` are over those with one.
    """
    kept = [(task, row) for task, row in zip(tasks, rows, strict=True) if not row.failed]
    written = [(task, row) for task, row in kept if row.query]
    guards = [guard_measures(row.original, row.query, task.answers) for task, row in written]
    columns: dict[str, list[float]] = {
        "format": [bool(row.query) for _, row in kept],
        "readable": [row.outcome == REWRITTEN for _, row in kept],
        "sampled_tokens": [row.sampled for _, row in kept],
        **{name: [each[name] for each in guards] for name in GUARD_MEASURES},
    }
    return {name: float(np.mean(x)) if x else None for name, x in columns.items()}


# ---------------------------------------------------------------------------- rows


def played_row(
    task: RewriteTask, episode: TokenEpisode, speech: Speech, form: str = ""
) -> RewriteRow:
    """The row of an episode."""
    ended = episode.ended
    turn = next((turn for segment in episode.segments for turn in segment), None)
    text = "" if turn is None else speech.text(turn.sampled)
    sampled = 0 if turn is None else len(turn.sampled)
    row = RewriteRow(task.id, task.collection, task.question, "", text=text, sampled=sampled)
    if isinstance(ended, Failed):
        cut_off = turn is None or turn.finish == "length"
        query = read_output(text, form, cut_off=cut_off)[0] if form else ""
        return dataclasses.replace(row, query=query, outcome=ended.cause)
    assert isinstance(ended, Found)
    found = _scored(ended.found)
    return dataclasses.replace(row, query=ended.answer, outcome=ended.outcome, found=found)


def searched_row(task: RewriteTask, query: str, found: Sequence[Document] | Failure) -> RewriteRow:
    """The row of a query that no model wrote."""
    row = RewriteRow(task.id, task.collection, task.question, query)
    if isinstance(found, Failure):
        return dataclasses.replace(row, outcome=found.cause)
    return dataclasses.replace(row, found=_scored(found))


def _scored(documents: Sequence[Document]) -> tuple[tuple[str, float], ...]:
    return tuple((each.id, float(each.score)) for each in documents)


# ---------------------------------------------------------------- ways beside each other

# A search that failed tells nothing of its query. So a query that failed in one of the ways is left
# out of the means of all, which then are over the same queries; and a difference between two ways
# is over the queries that failed in neither.

# Of one way: measure → float `[queries]`, NaN where the query failed.
WayScores = Mapping[str, np.ndarray]


def way_scores(
    tasks: Sequence[RewriteTask], rows: Sequence[RewriteRow], measures: Sequence[str]
) -> WayScores:
    """Scores the rows of one way, one for each query."""
    scored = np.array([not row.failed for row in rows])
    columns = {name: np.full(len(rows), np.nan) for name in measures}
    for name, values in measured(tasks, rankings_of(rows), measures).items():
        columns[name][scored] = values
    return columns


def compared(
    ways: Mapping[str, WayScores], main: str, places: Sequence[int], by: str
) -> dict[str, Any]:
    """Compares the main way with all others on some queries.

    Returns:
        `queries`, their number; `scored`, how many of them failed in no way (a way in which all
        failed does not count); `failed`, how many in each way; `scores`, of each way each measure's
        interval over the scored ones; and `gains`, of each other way the paired differences, the
        main one's less its own, with `queries`.
    """
    lost = {told: np.isnan(way[by][places]) for told, way in ways.items()}
    usable = {told: way for told, way in ways.items() if not lost[told].all()}

    def at(told: str, kept: np.ndarray) -> dict[str, np.ndarray]:
        return {name: column[places][kept] for name, column in ways[told].items()}

    common = ~np.any([lost[told] for told in usable] or [np.ones(len(places))], axis=0)
    columns = {told: at(told, common) for told in usable} if common.any() else {}
    differences = {}
    for told in ways:
        both = ~(lost[main] | lost[told])
        if told != main and both.any():
            found = gains(at(main, both), at(told, both))
            differences[told] = {"queries": int(both.sum()), **found}
    return {
        "queries": len(places),
        "scored": int(common.sum()),
        "failed": {told: int(each.sum()) for told, each in lost.items()},
        "scores": {told: with_intervals(own) for told, own in columns.items()},
        "gains": differences,
    }


def lines(name: str, found: Mapping[str, Any], main: str, by: str) -> list[str]:
    """The table of one collection, and how far the main way is from the others."""
    left_out = found["queries"] - found["scored"]
    told = f"; {left_out} more failed in one of the ways and are left out" if left_out else ""
    text = [f"{name}: {found['scored']} queries{told}"]
    scores = found["scores"]
    measures = [*next(iter(scores.values()), {})]
    rows = ((way, scores.get(way, {}) | {"failed": n}) for way, n in found["failed"].items())
    text += score_table(rows, measures, {"failed": "{failed}"})
    for way, gain in found["gains"].items():
        pairs = f" ({gain['queries']} queries)" if gain["queries"] < found["queries"] else ""
        text.append(f"{main} - {way}, {by}: {interval_text(gain[by], sign=True)}{pairs}")
    return text


def shape_lines(shapes: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The table of what the queries of each model look like."""
    names = [*next(iter(shapes.values()), {})]
    rows = [["", *names]]
    for told, shape in shapes.items():
        cells = [shape[name] for name in names]
        rows.append([told, *("-" if cell is None else f"{cell:.3g}" for cell in cells)])
    return columns_text(rows)
