"""The few episodes of each evaluation during training that are kept, and the same as Markdown."""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.evaluators.episode_views import KINDS, Episode, Found, episodes_of
from qrag_jax.metrics.row_log import RowLog

LONGEST = 300  # characters that are shown of a text
_MOST_FOUND = 10  # passages of a search
_MARKS = re.compile(r"([\\`*_{}\[\]()#+\-.!|~>])")


class EpisodeSample(NamedTuple):
    """Some episodes of an evaluation.

    Attributes:
        kind: name of its log, see `episode_views.KINDS`.
        rows: each as its log has it in JSON.
        text: the same for people, in Markdown.
    """

    kind: str
    rows: list[dict[str, Any]]
    text: str


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
