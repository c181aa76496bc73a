"""The few episodes of each evaluation during training that are kept for people to look at."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.evaluators.episode_markdown import markdown_of
from qrag_jax.metrics import retrieval_log

# Kinds of episodes, by the log whose rows they are: `retrieval_log`, `predictions`, `hop_log`,
# `agent_log`, `rewrite_log`.
CHUNKS, TOKENS, HOPS, AGENTS, REWRITES = KINDS = ("chunks", "tokens", "hops", "agents", "rewrites")


class EpisodeSample(NamedTuple):
    """Some episodes of an evaluation.

    Attributes:
        kind: one of `KINDS`.
        rows: each as its log has it in JSON.
        text: the same for people, in Markdown.
    """

    kind: str
    rows: list[dict[str, Any]]
    text: str


# (most episodes) → a sample of so many; of several hosts the first one calls it.
Sampler = Callable[[int], EpisodeSample]


def sampler(kind: str, rows: Callable[[Sequence[int]], Sequence[Any]], count: int) -> Sampler:
    """The sampler of an evaluation.

    It takes the same places of each evaluation, spread evenly. An episode with a number that is not
    finite, as of weights that are broken, is left out: no log can hold it.

    Args:
        kind: of the rows, one of `KINDS`.
        rows: gives the rows, which are dataclasses, at some places.
        count: number of all rows.
    """

    def sample(most: int) -> EpisodeSample:
        places = spread(count, most)
        kept = [row for row in rows(places) if _is_finite(row)]
        return EpisodeSample(kind, list(map(_as_json, kept)), markdown_of(kept))

    return sample


def played_sampler(
    kind: str,
    logged: Callable[[Sequence[int], Sequence[Any]], Sequence[Any]] | None,
    played: Sequence[Any],
) -> Sampler | None:
    """As `sampler`, of played episodes of which rows are made only if they are asked for.

    Args:
        logged: (places, the episodes there) → their rows; None: there is no sampler.
    """
    if logged is None:
        return None
    return sampler(kind, lambda at: logged(at, [played[place] for place in at]), len(played))


def spread(count: int, most: int) -> list[int]:
    """At most so many of the places 0 … count − 1, spread evenly."""
    if most >= count:
        return [*range(count)]
    return np.linspace(0, count - 1, most).round().astype(int).tolist()


def _as_json(row: Any) -> dict[str, Any]:
    if isinstance(row, retrieval_log.Row):
        return retrieval_log.as_json(row)
    return dataclasses.asdict(row)


def _is_finite(row: Any) -> bool:
    try:
        json.dumps(dataclasses.asdict(row), allow_nan=False)
    except ValueError:
        return False
    return True
