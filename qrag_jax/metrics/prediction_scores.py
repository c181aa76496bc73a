"""Scores of predictions: means over questions with their intervals, by hops, and votes.

A question's score is the mean over its episodes. An episode that failed has none: it is counted,
never scored as 0. `weighted_em` and `weighted_f1` are `em` and `f1` times h/2 for a question of h
hops, the factor of RLVR's rewards (github.com/bdsaglam/rlvr), so that they may be above 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qrag_jax.metrics import answers
from qrag_jax.metrics.agent_log import pass_at
from qrag_jax.metrics.answers import normalise
from qrag_jax.metrics.bootstrap import columns_text, interval_text, paired_interval
from qrag_jax.metrics.facts import with_intervals
from qrag_jax.metrics.predictions import OF_PARTS, ScoredEpisode

ALL = "all"
SHARES = ("completed", "malformed", "truncated")
SCORES = (*OF_PARTS, "reward", "weighted_em", "weighted_f1", *SHARES, "turns", "searches")
_SHOWN = ("em", "f1", "recall", "precision", "citation", "reward")
_INDENT = "  "

Questions = dict[str, list[ScoredEpisode]]  # by id, in the order of the file


def by_question(episodes: Sequence[ScoredEpisode]) -> Questions:
    """The episodes of each question, in the order of their draws."""
    found: Questions = {}
    for each in episodes:
        found.setdefault(each.id, []).append(each)
    return found


def columns_of(questions: Questions) -> dict[str, dict[str, float]]:
    """`SCORES` of each question that has an episode with a reward: by the id, then by the name."""
    return {
        name: {score: float(np.mean([row[score] for row in rows])) for score in SCORES}
        for name, own in questions.items()
        if (rows := [_row(each) for each in own if each.reward is not None])
    }


def summarised(episodes: Sequence[ScoredEpisode]) -> dict[str, dict[str, Any]]:
    """Scores by group: "all", then numbers of hops ("2 hops") if there are several.

    Returns:
        For each group: `SCORES`, `vote_em@k`, `vote_f1@k` and `pass@k` as {"mean", "low", "high"}
        with a 95 % bootstrap interval over questions, if there are values; `hops`, the mean; and
        the counts `questions`, `episodes`, `failed` (episodes) and `failed_share`. k counts
        episodes that have not failed; questions that have fewer are left out.
    """
    questions = by_question(episodes)
    found = {ALL: _group(questions)}
    hops = sorted({own[0].hops for own in questions.values()})
    for number in hops if len(hops) > 1 else ():
        own = {name: rows for name, rows in questions.items() if rows[0].hops == number}
        found[f"{number} hop{'s' * (number != 1)}"] = _group(own)
    return found


def gains(
    episodes: Sequence[ScoredEpisode], others: Sequence[ScoredEpisode]
) -> dict[str, dict[str, float]]:
    """Mean differences over the questions that both have scores of, paired, with intervals."""
    a, b = columns_of(by_question(episodes)), columns_of(by_question(others))
    both = [name for name in a if name in b]
    found = {}
    for score in _SHOWN if both else ():
        interval = paired_interval([a[n][score] for n in both], [b[n][score] for n in both])
        found[score] = dict(zip(("mean", "low", "high"), interval))
    return found


def score_lines(scores: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The cells of a table, a line for each group; "-" where a group has no such score."""
    lines = []
    for name, group in scores.items():
        cells = [interval_text(group[c]) if c in group else "-" for c in _SHOWN]
        shares = [_share(group, share) for share in SHARES]
        failed = f"{group['failed']} of {group['episodes']}"
        label = name if name == ALL else _INDENT + name
        lines.append([label, *cells, *shares, failed, _mean(group, "turns")])
    return lines


def gain_line(label: str, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The cells of differences, under `HEAD`."""
    cells = [interval_text(found[c], sign=True) if c in found else "" for c in _SHOWN]
    return [label, *cells, *[""] * (len(HEAD) - 1 - len(cells))]


HEAD = ["", *_SHOWN, *SHARES, "failed", "turns"]


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of cells under `HEAD` as text."""
    return columns_text([HEAD, *lines])


def draws_text(group: Mapping[str, Any]) -> list[str]:
    """Lines on votes and passes, if there are several draws."""
    lines = []
    for name in ("vote_em@", "vote_f1@", "pass@"):
        values = {k.removeprefix(name): v for k, v in group.items() if k.startswith(name)}
        if len(values) > 1:
            told = ", ".join(f"{k}: {value['mean']:.3f}" for k, value in values.items())
            lines.append(f"{name}k: {told}")
    return lines


def _row(each: ScoredEpisode) -> dict[str, float]:
    parts, tally = each.parts, each.tally
    assert each.reward is not None
    return {
        **{name: parts[name] for name in OF_PARTS},
        "reward": each.reward,
        "weighted_em": parts["em"] * each.hops / 2,
        "weighted_f1": parts["f1"] * each.hops / 2,
        "completed": float(tally["completed"]),
        "malformed": float(tally["malformed"] + tally["unknown_tool"] > 0),
        "truncated": float(tally["truncated"]),
        "turns": float(tally["turns"]),
        "searches": float(tally["searches"]),
    }


def _group(questions: Questions) -> dict[str, Any]:
    columns: dict[str, list[float]] = {}
    for row in columns_of(questions).values():
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    columns |= _of_draws(questions)
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


def _of_draws(questions: Questions) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    most = max(map(len, questions.values()), default=0)
    for k in numbers_of_draws(most):
        for own in questions.values():
            scored = [each for each in own if each.reward is not None]
            if len(scored) < k:
                continue
            said = voted([each.prediction for each in scored[:k]])
            em, f1 = answers.musique(said, own[0].answers) if said else (0.0, 0.0)
            right = sum(each.parts["em"] > 0 for each in scored)
            passed = pass_at(k, right, len(scored))
            for name, value in (("vote_em", em), ("vote_f1", f1), ("pass", passed)):
                columns.setdefault(f"{name}@{k}", []).append(value)
    return columns


def _share(group: Mapping[str, Any], name: str) -> str:
    return f"{group[name]['mean']:.0%}" if name in group else "-"


def _mean(group: Mapping[str, Any], name: str) -> str:
    return f"{group[name]['mean']:.2f}" if name in group else "-"


def voted(answers: Sequence[str]) -> str:
    """The answer that most episodes give, by normal forms; of equally many, the one given first.

    An episode whose answer has no token in its normal form has no vote.

    Returns:
        The answer as the first of its episodes wrote it; "" if no episode has a vote.
    """
    counts: dict[str, int] = {}  # by normal form, in the order of first sight
    texts: dict[str, str] = {}
    for answer in answers:
        if form := normalise(answer):
            counts[form] = counts.get(form, 0) + 1
            texts.setdefault(form, answer)
    if not counts:
        return ""
    return texts[max(counts, key=lambda form: counts[form])]  # the first of equal ones


def numbers_of_draws(most: int) -> list[int]:
    """The k of vote@k and pass@k: 1, 2, 4, … and the number of draws itself."""
    powers = [1 << place for place in range(most.bit_length())]
    return sorted({*powers, most} - {0})
