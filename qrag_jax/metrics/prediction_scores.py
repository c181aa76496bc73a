"""Scores of predictions: means over questions with their intervals, by hops, and votes.

A question's score is the mean over its episodes. An episode that failed has none: it is counted,
never scored as 0. `weighted_em` and `weighted_f1` are `em` and `f1` times h/2 for a question of h
hops, the factor of RLVR's rewards (github.com/bdsaglam/rlvr), so that they may be above 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.metrics import answers, bootstrap
from qrag_jax.metrics.answers import normalise
from qrag_jax.metrics.bootstrap import score_table, with_intervals
from qrag_jax.metrics.rows import OF_PARTS, Prediction
from qrag_jax.metrics.summaries import ALL, grouped, indented, pass_at

SHARES = ("completed", "malformed", "truncated")
SCORES = (*OF_PARTS, "reward", "weighted_em", "weighted_f1", *SHARES, "turns", "searches")
_SHOWN = ("em", "f1", "recall", "precision", "citation", "reward")

Questions = dict[str, list[Prediction]]  # by id, in the order of the file


def by_question(episodes: Sequence[Prediction]) -> Questions:
    """The episodes of each question, in the order of their draws."""
    questions: Questions = {}
    for each in episodes:
        questions.setdefault(each.id, []).append(each)
    return questions


def columns_of(questions: Questions) -> dict[str, dict[str, float]]:
    """`SCORES` of each question that has an episode with a reward: by the id, then by the name."""
    return {
        name: {score: float(np.mean([row[score] for row in rows])) for score in SCORES}
        for name, own in questions.items()
        if (rows := [_row(each, each.reward) for each in own if each.reward is not None])
    }


def summarised(episodes: Sequence[Prediction]) -> dict[str, dict[str, Any]]:
    """Scores by group: "all", then numbers of hops ("2 hops") if there are several.

    Returns:
        For each group: `SCORES`, `vote_em@k`, `vote_f1@k` and `pass@k` as {"mean", "low", "high"}
        over questions, if there are values; `hops`, the mean; and the counts `questions`,
        `episodes`, `failed` (episodes) and `failed_share`. k counts episodes that have not failed;
        questions that have fewer are left out.
    """
    return {name: _group(by_question(own)) for name, own in grouped(episodes, "hops").items()}


def gains(
    episodes: Sequence[Prediction], others: Sequence[Prediction]
) -> dict[str, dict[str, float]]:
    """Mean differences over the questions that both have scores of, paired, with intervals."""
    a, b = columns_of(by_question(episodes)), columns_of(by_question(others))
    both = [name for name in a if name in b]
    ours, theirs = ({s: [side[n][s] for n in both] for s in _SHOWN} for side in (a, b))
    return bootstrap.gains(ours, theirs)


def table(
    scores: Mapping[str, Mapping[str, Any]], differences: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """The scores as text, a line for each group; "-": no such score. Then votes and passes."""

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
    return [*score_table(lines, _SHOWN, counts, differences.items()), *draws]


def _row(each: Prediction, reward: float) -> dict[str, float]:
    parts, tally = each.parts, each.trajectory["facts"]["tally"]
    return {
        **{name: parts[name] for name in OF_PARTS},
        "reward": reward,
        "weighted_em": parts["em"] * each.hops / 2,
        "weighted_f1": parts["f1"] * each.hops / 2,
        "malformed": float(tally["malformed"] + tally["unknown_tool"] > 0),
        **{n: float(tally[n]) for n in ("completed", "truncated", "turns", "searches")},
    }


def _group(questions: Questions) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for row in (*columns_of(questions).values(), *_of_draws(questions)):
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    episodes = sum(map(len, questions.values()))
    failed = sum(each.reward is None for own in questions.values() for each in own)
    return {
        **with_intervals(columns),
        "hops": float(np.mean([own[0].hops for own in questions.values()])) if questions else 0.0,
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
        for own in questions.values():
            scored = [each for each in own if each.reward is not None]
            if len(scored) < k:
                continue
            said = voted([each.prediction for each in scored[:k]])
            em, f1 = answers.musique(said, own[0].answers) if said else (0.0, 0.0)
            passed = pass_at(k, sum(each.parts["em"] > 0 for each in scored), len(scored))
            rows.append({f"vote_em@{k}": em, f"vote_f1@{k}": f1, f"pass@{k}": passed})
    return rows


def voted(predictions: Sequence[str]) -> str:
    """The answer that most episodes give, by normal forms; of equally many, the one given first.

    It is as the first of its episodes wrote it; "" if no answer has a token in its normal form.
    """
    forms = [normalise(each) for each in predictions]
    counts = Counter(filter(None, forms))  # in the order of first sight
    return predictions[forms.index(counts.most_common(1)[0][0])] if counts else ""
