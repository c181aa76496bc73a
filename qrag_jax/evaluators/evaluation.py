"""One evaluation during training: its scores, and the few of its episodes that are kept."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.errors import FeedbackLost
from qrag_jax.evaluators.episode_views import KINDS, Episode, Found, episodes_of
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime import hosts
from qrag_jax.runtime.interrupt import Stopped

LONGEST = 300  # characters that are shown of a text
_MOST_FOUND = 10  # passages of a search
_MARKS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>])")


class EpisodeSample(NamedTuple):
    """Some episodes of an evaluation."""

    kind: str  # name of its log, see `episode_views.KINDS`
    rows: list[dict[str, Any]]  # each as its log has it in JSON
    text: str  # the same for people, in Markdown


# (most episodes) → a sample of so many; of several hosts the first one calls it.
Sampler = Callable[[int], EpisodeSample]


def sampler(log: RowLog, rows: Callable[[Sequence[int]], Sequence[Any]], count: int) -> Sampler:
    """The sampler of an evaluation.

    It takes the same places of each evaluation, spread evenly. An episode with a number that is not
    finite, as of weights that are broken, is left out: no log can hold it.

    Args:
        log: of the rows.
        rows: gives the rows at some places; they are made only if they are asked for.
        count: number of all rows.
    """

    def sample(most: int) -> EpisodeSample:
        kept = [row for row in rows(spread(count, most)) if _is_finite(row)]
        text = markdown_of(log.name, kept)
        return EpisodeSample(log.name, [log.to_json(row) for row in kept], text)

    return sample


def spread(count: int, most: int) -> list[int]:
    """At most so many of the places 0 … count − 1, spread evenly."""
    if most >= count:
        return [*range(count)]
    return np.linspace(0, count - 1, most).round().astype(int).tolist()


def markdown_of(kind: str, rows: Sequence[Any]) -> str:
    """Rows for TensorBoard's texts, one section each; all that is of data or models is escaped."""
    words = KINDS[kind].named_words
    return "\n\n".join("\n".join(_lines(each, words)) for each in episodes_of(kind, rows))


def _lines(episode: Episode, words: Any) -> Iterator[str]:
    told = [f"{name}: {_text(text)}" for name, text in episode.facts]
    if episode.score is not None:
        told.insert(0, f"{words['score']} {episode.score:.3f}")
    if episode.answered is not None:
        told.append(f"answered: {_text(episode.answered)}")
    if episode.answers:
        told.append(f"right: {_text(' / '.join(episode.answers))}")
    yield f"### {_text(episode.question)}\n"
    yield "; ".join(told) + "\n"
    # The first text that is observed is the prompt, the same in all episodes.
    steps = [each for n, each in enumerate(episode.steps) if n or each.kind != "observed"]
    for number, step in enumerate(steps, start=1):
        parts = [_text(", ".join(step.head))] if step.head else []
        if step.query is not None:
            parts.append(f"**{_text(step.query) or '(no query)'}**")
        parts += [_text(step.text)] if step.text else []
        parts += [_found(each, words["found"]) for each in step.found[:_MOST_FOUND]]
        yield f"{number}. {'; '.join(parts)}"
    for each in episode.missed:
        yield f"- not found, {_found(each, words['found'])}"


def _found(found: Found, score: str) -> str:
    gold = "**GOLD** " if found.gold else ""
    score = "" if found.score is None else f"{score} {found.score:.3f}, ".lstrip()
    text = f": {_text(found.text)}" if found.text else ""
    return f"{gold}{score}{_text(found.name)}{text}"


def _text(text: str) -> str:
    """The text on one line, cut, with nothing in it that Markdown or HTML would read."""
    line = " ".join(text.split())
    line = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    return _MARKS.sub(r"\\\1", html.escape(line, quote=False))


def _is_finite(row: Any) -> bool:
    try:
        json.dumps(dataclasses.asdict(row), allow_nan=False)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------- evaluations


class Evaluation(NamedTuple):
    """What one evaluation found."""

    metrics: dict[str, float]  # values by the names they are written under
    # Metrics that later evaluations repeat if this one is of the untrained weights
    baselines: dict[str, float]
    line: str  # one line for the screen
    score: float  # the score that chooses the best checkpoint
    # All scores of multi-step play, kept with the checkpoint if it is the best
    scores: dict[str, float]
    # Gives some of the episodes, on the first host; None: none are kept to look at
    episodes: Sampler | None = None
    each: Sequence[float] = ()  # `score` of each question that has one; (): these are not told
    q_spread: float | None = None  # see `runtime.not_learning.Evaluated`

    @classmethod
    def of(cls, line: str, scores: Mapping[str, float], best_by: str, **more: Any) -> Evaluation:
        """An evaluation; `more`: further attributes."""
        return cls(
            metrics={f"eval/{name}": value for name, value in scores.items()},
            baselines={f"untrained/{name}": value for name, value in scores.items()},
            line=line,
            score=scores[best_by],
            scores=dict(scores),
            **more,
        )


def lost_text(scores: Mapping[str, float], words: Mapping[str, str]) -> str:
    """Of the shares that are not 0, what they are of, for the line on the screen."""
    shares = ((scores.get(name, 0.0), told) for name, told in words.items())
    return "".join(f", {share:.0%} {told}" for share, told in shares if share)


def of_all_hosts(count: int, width: int, ask: Callable[[Sequence[int]], np.ndarray]) -> np.ndarray:
    """float64 `[count, width]`: what is found of all questions, of which each host asks its part.

    It is in the order of the questions, so that a mean does not depend on the number of hosts.

    Args:
        ask: places of questions → their rows; all hosts fail together if one is stopped or has
            lost its feedback.
    """
    index, number = jax.process_index(), jax.process_count()
    places = range(count)[index::number]
    rows = np.full((-(-count // number), width), np.nan)  # as many on each host
    failure: Exception | None = None
    try:
        rows[: len(places)] = ask(places)
    except (Stopped, FeedbackLost) as why:
        failure = why
    hosts.fail_together(failure, FeedbackLost)
    return hosts.of_each(rows).transpose(1, 0, 2).reshape(-1, width)[:count]
