"""Summaries of logs: means with 95 % bootstrap intervals over the questions, counts, tables.

What the MODEL broke scores 0 and is counted as `broken`. What the infrastructure broke is left out,
and counted as `failed`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from qrag_jax.metrics import row_log as logs
from qrag_jax.metrics.answers import musique, normalise
from qrag_jax.metrics.bootstrap import (
    Values,
    columns_of,
    columns_text,
    gains,
    score_table,
    with_intervals,
)
from qrag_jax.metrics.ranking import ranking_columns

ALL = "all"
_DIGITS = 9  # of a reward; what follows is the rounding of sums in another order

Item = TypeVar("Item")


def grouped(items: Sequence[Item], *fields: str) -> dict[str, list[Item]]:
    """The items by group: "all", then by each field of which there are several values.

    Numbers are of hops ("2 hops"), and texts are types of question.
    """
    groups = {ALL: [*items]}
    for field in fields:
        values = sorted({getattr(item, field) for item in items})
        for value in values if len(values) > 1 else ():
            name = value or "no type"
            if isinstance(value, int):
                name = f"{value} hop{'s' * (value != 1)}"
            groups[name] = [item for item in items if getattr(item, field) == value]
    return groups


def indented(group: str) -> str:
    return group if group == ALL else f"  {group}"


def row_gains(
    columns: Callable[[Sequence[Any]], Mapping[str, Values]],
    shown: Sequence[str],
    rows: Sequence[Any],
    others: Sequence[Any],
) -> dict[str, dict]:
    """Paired differences of the scores shown, on the questions that failed in neither."""
    both = [pair for pair in zip(rows, others, strict=True) if not any(row.failed for row in pair)]
    ours, theirs = (columns([pair[side] for pair in both]) for side in (0, 1))
    return gains({n: ours[n] for n in ours if n.rpartition("/")[2] in shown}, theirs)


def shares(counts: Mapping[str, int], questions: int) -> dict[str, float]:
    return {f"{name}_share": count / max(questions, 1) for name, count in counts.items()}


# ---------------------------------------------------------------------------- answers


def answer_scores(
    rows: Sequence[logs.AnswerRow],
    misses: Sequence[logs.Miss],
    verdicts: Mapping[str, bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """Scores and counts by group, see `grouped`; `verdicts` of a judge are by id."""
    everything: list[logs.AnswerRow | logs.Miss] = [*rows, *misses]
    summaries = {}
    for group, items in grouped(everything, "hops", "type").items():
        done = [item for item in items if isinstance(item, logs.AnswerRow)]
        failed = sum(isinstance(item, logs.Miss) and item.failed for item in items)
        broken = [0.0] * (len(items) - len(done) - failed)
        columns = {"em": [row.em for row in done] + broken, "f1": [row.f1 for row in done] + broken}
        counts = {"broken": len(broken), "failed": failed}
        counted = {"answered": len(done), **counts, **shares(counts, len(items))}
        if verdicts is not None:
            right = [float(verdicts[row.id]) for row in done if row.id in verdicts]
            columns["judge"] = right + broken
            counted["judged"] = len(right)
        summaries[group] = {**with_intervals(columns), **counted}
    return summaries


def answer_table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The scores as lines of text, one per group; "-" if a group has no such score."""
    judge = any("judged" in group for group in scores.values())
    lines = ((indented(name), group) for name, group in scores.items())
    counts = {count: f"{{{count}}}" for count in ("answered", "broken", "failed")}
    return score_table(lines, ("em", "f1", "judge") if judge else ("em", "f1"), counts)


# ---------------------------------------------------------------------------- agents


def agent_columns(rows: Sequence[logs.AgentRow]) -> dict[str, list[float]]:
    """Scores of an agent; recall is of those whose gold passages are all in the corpus."""
    kept = [row for row in rows if not row.failed]
    return {
        "em": [row.em for row in kept],
        "f1": [row.f1 for row in kept],
        "recall": [row.recall for row in kept if row.recall is not None],
        "hops": [float(len(row.searches)) for row in kept],
    }


def agent_counts(rows: Sequence[logs.AgentRow]) -> dict[str, float]:
    failed = sum(row.failed for row in rows)
    counts = {"broken": sum(bool(row.broken) for row in rows) - failed, "failed": failed}
    return counts | shares(counts, len(rows))


def agent_summary(rows: Sequence[logs.AgentRow]) -> dict[str, Any]:
    return {"questions": len(rows), **agent_counts(rows), **with_intervals(agent_columns(rows))}


agent_gains = partial(row_gains, agent_columns, ("em", "f1", "recall"))


def pass_at(k: int, right: int, sampled: int) -> float:
    """The chance that one of k ≤ n episodes is right, estimated without bias from n sampled ones.

    `1 − C(n − c, k) / C(n, k)` (Chen et al., arXiv 2107.03374, eq. 1).
    """
    return 1.0 - math.comb(sampled - right, k) / math.comb(sampled, k)


# ---------------------------------------------------------------------------- query writers

SHOWN = ("recall", "ap", "all_gold")  # scores of a pool that a table shows


def hop_columns(rows: Sequence[logs.Searched]) -> dict[str, list[float]]:
    """The scores of each question after each hop, `hopN/SCORE`."""
    return {
        f"hop{number}/{score}": [row.hops[number - 1].scores[score] for row in rows]
        for number in range(1, len(rows[0].hops) + 1 if rows else 1)
        for score in rows[0].hops[number - 1].scores
    }


def hop_summary(rows: Sequence[logs.Searched]) -> dict[str, Any]:
    """Scores after each hop; and tokens a question."""
    kept = [row for row in rows if not row.failed]
    counts = {"failed": len(rows) - len(kept)}
    summary: dict[str, Any] = {"questions": len(rows), **counts, **shares(counts, len(rows))}
    summary |= with_intervals(hop_columns(kept))
    for name in ("read", "sampled"):
        total = sum(getattr(hop, name) for row in rows for hop in row.hops)
        summary[f"{name}_tokens"] = total / len(rows)
    outcomes = Counter(hop.outcome for row in rows for hop in row.hops if hop.outcome)
    return summary | {"outcomes": {name: outcomes[name] for name in sorted(outcomes)}}


hop_gains = partial(row_gains, hop_columns, SHOWN)


def hop_table(
    summaries: Mapping[str, Mapping[str, Any]], gains: Mapping[str, Mapping[str, Any]], hops: int
) -> list[str]:
    names = [f"hop{number}/{score}" for number in range(1, hops + 1) for score in SHOWN]
    counts = {
        "tokens read, written": "{read_tokens:.0f}, {sampled_tokens:.0f}",
        "failed": "{failed} of {questions}",
    }
    return score_table(summaries.items(), names, counts, gains.items())


# ---------------------------------------------------------------------------- query rewriters


def measured(rows: Sequence[logs.RewriteRow], measures: Sequence[str]) -> dict[str, np.ndarray]:
    """measure → float `[queries]`, NaN where the search failed; no query has found nothing."""
    # Names, since ids of collections may be alike.
    ranked = {f"{n}": row.ranking for n, row in enumerate(rows) if not row.failed}
    columns = {name: np.full(len(rows), np.nan) for name in measures}
    qrels = {name: rows[int(name)].grades for name in ranked}
    for measure, column in ranking_columns(ranked, qrels, measures).items() if ranked else ():
        columns[measure][[*map(int, column)]] = [*column.values()]
    return columns


# ---------------------------------------------------------------------------- rewards


def reward_row(
    asked: tuple[str, str], rewards: Sequence[float | str], least_std: float = 0.0
) -> logs.RewardRow:
    """The row of a question: its id and text; a reward, or why there is none, of each episode."""
    rounded = [None if isinstance(r, str) else round(r, _DIGITS) for r in rewards]
    known = [r for r in rounded if r is not None]
    row = logs.RewardRow(
        *asked,
        mean=statistics.fmean(known) if known else None,
        std=statistics.pstdev(known) if known else None,
        rewards=rounded,
        scored=len(known),
        broken=[r for r in rewards if isinstance(r, str)],
        kept=False,
    )
    return judged(row, least_std)


def judged(row: logs.RewardRow, least_std: float) -> logs.RewardRow:
    return dataclasses.replace(row, kept=row.std is not None and row.std > least_std)


def reward_lines(rows: Sequence[logs.RewardRow], least_std: float) -> list[str]:
    kept = sum(row.kept for row in rows)
    without = sum(row.std is None for row in rows)
    rewards = [reward for row in rows for reward in row.rewards if reward is not None]
    mean = f"{statistics.fmean(rewards):.3f}" if rewards else "unknown"
    few = "varies too little" if least_std else "all the same"
    lines = [
        ["kept", f"{kept} of {len(rows)} questions, standard deviation above {least_std:g}"],
        [few, f"{len(rows) - kept - without}"],
        ["without reward", f"{without}"],
        ["mean reward", f"{mean} of {len(rewards)} episodes"],
    ]
    if causes := Counter(cause for row in rows for cause in row.broken):
        counts = (f"{causes[cause]} {cause}" for cause in sorted(causes))
        lines.append(["broken episodes", ", ".join(counts)])
    return columns_text(lines)


# ---------------------------------------------------------------------------- token policies
# A question's score is the mean over its episodes. An episode that failed has none: it is counted,
# never scored as 0. `weighted_em` and `weighted_f1` are `em` and `f1` times h/2 for a question of h
# hops, the factor of RLVR's rewards (github.com/bdsaglam/rlvr), so that they may be above 1.

SHARES = ("completed", "malformed", "truncated")
_COUNTS = ("turns", "searches", "calls", "failed_calls")
SCORES = (*logs.OF_PARTS, "reward", "weighted_em", "weighted_f1", *SHARES, *_COUNTS)
_OF_EPISODES = ("em", "f1", "recall", "precision", "citation", "reward")

Questions = dict[str, list[logs.Prediction]]  # by id, in the order of the file


def by_question(episodes: Sequence[logs.Prediction]) -> Questions:
    questions: Questions = {}
    for e in episodes:
        questions.setdefault(e.id, []).append(e)
    return questions


def question_columns(questions: Questions) -> dict[str, dict[str, float]]:
    """`SCORES` of each question that has an episode with a reward: by the id, then by the name."""
    return {
        name: {score: float(np.mean([row[score] for row in rows])) for score in SCORES}
        for name, drawn in questions.items()
        if (rows := [_scored(e, e.reward) for e in drawn if e.reward is not None])
    }


def episode_summary(episodes: Sequence[logs.Prediction]) -> dict[str, dict[str, Any]]:
    """Scores over questions, and counts, by number of hops.

    k of `vote_em@k`, `vote_f1@k` and `pass@k` counts episodes that have not failed; questions that
    have fewer are left out.
    """
    return {name: _group(by_question(part)) for name, part in grouped(episodes, "hops").items()}


def episode_gains(
    episodes: Sequence[logs.Prediction], others: Sequence[logs.Prediction]
) -> dict[str, dict[str, float]]:
    """Paired differences over the questions that both have scores of."""
    a, b = question_columns(by_question(episodes)), question_columns(by_question(others))
    both = [name for name in a if name in b]
    ours, theirs = ({s: [side[n][s] for n in both] for s in _OF_EPISODES} for side in (a, b))
    return gains(ours, theirs)


def episode_table(
    scores: Mapping[str, Mapping[str, Any]], differences: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The scores as text, a line for each group. Then votes and passes."""

    def counted(group: Mapping[str, Any]) -> dict[str, Any]:
        shares = {n: f"{group[n]['mean']:.0%}" if n in group else "-" for n in SHARES}
        turns = f"{group['turns']['mean']:.2f}" if "turns" in group else "-"
        return {**group, **shares, "turns": turns}

    lines, draws = [], []
    for name, groups in scores.items():
        for label, group in groups.items():
            lines.append((name if label == ALL else indented(label), counted(group)))
        for score in ("vote_em@", "vote_f1@", "pass@"):
            of = {k.removeprefix(score): v for k, v in groups[ALL].items() if k.startswith(score)}
            if len(of) > 1:  # several draws
                means = ", ".join(f"{k}: {value['mean']:.3f}" for k, value in of.items())
                draws.append(f"{name}: {score}k: {means}")
    counts = {name: f"{{{name}}}" for name in SHARES}
    counts |= {"failed": "{failed} of {episodes}", "turns": "{turns}"}
    return [*score_table(lines, _OF_EPISODES, counts, differences.items()), *draws]


def _scored(row: logs.Prediction, reward: float) -> dict[str, float]:
    parts, tally = row.parts, row.trajectory["facts"]["tally"]
    return {
        **{name: parts[name] for name in logs.OF_PARTS},
        "reward": reward,
        "weighted_em": parts["em"] * row.hops / 2,
        "weighted_f1": parts["f1"] * row.hops / 2,
        "malformed": float(tally["malformed"] + tally["unknown_tool"] > 0),
        **{n: float(tally[n]) for n in ("completed", "truncated", *_COUNTS)},
    }


def _group(questions: Questions) -> dict[str, Any]:
    columns = columns_of((*question_columns(questions).values(), *_of_draws(questions)))
    hops, episodes = [q[0].hops for q in questions.values()], sum(map(len, questions.values()))
    failed = sum(e.reward is None for q in questions.values() for e in q)
    return {
        **with_intervals(columns),
        "hops": float(np.mean(hops)) if hops else 0.0,
        "questions": len(questions),
        "episodes": episodes,
        "failed": failed,
        "failed_share": failed / episodes if episodes else 0.0,
    }


def _of_draws(questions: Questions) -> list[dict[str, float]]:
    """Votes and passes of each question; k is 1, 2, 4, … and the number of draws itself."""
    most = max(map(len, questions.values()), default=0)
    numbers = sorted({*(1 << place for place in range(most.bit_length())), most} - {0})
    rows = []
    for k in numbers:
        for drawn in questions.values():
            scored = [e for e in drawn if e.reward is not None]
            if len(scored) < k:
                continue
            said = voted([e.prediction for e in scored[:k]])
            em, f1 = musique(said, drawn[0].answers) if said else (0.0, 0.0)
            passed = pass_at(k, sum(e.parts["em"] > 0 for e in scored), len(scored))
            rows.append({f"vote_em@{k}": em, f"vote_f1@{k}": f1, f"pass@{k}": passed})
    return rows


def voted(predictions: Sequence[str]) -> str:
    """The answer that most episodes give, by normal forms; of equally many, the one given first.

    It is as the first of its episodes wrote it; "" if no answer has a token in its normal form.
    """
    forms = [normalise(text) for text in predictions]
    counts = Counter(filter(None, forms))  # in the order of first sight
    return predictions[forms.index(counts.most_common(1)[0][0])] if counts else ""
