"""Hand-made tries of a query writer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from qrag_jax.environments.query_writing.state import EMPTY, SEARCHED
from qrag_jax.feedback.tries import Try


def made(query: str, reward: float | None, **fields: Any) -> Try:
    """A try; its AP is its reward, and its other scores follow from this."""
    ap = fields.pop("ap", reward or 0.0)
    scores = {"ap": ap, "recall": float(ap > 0), "all_gold": float(ap == 1)}
    unscored = {"outcome": EMPTY, "scores": {}}
    given = {"outcome": SEARCHED, "scores": scores} if reward is not None else unscored
    start: dict[str, Any] = {"question": 5, "hop": 1, "state": 0, "variant": 0, "draw": 0}
    turn: dict[str, Any] = {"sampled": (7, 2), "log_probs": (-0.5, -0.25), "finish": "stop"}
    return Try(**{**start, **turn, **given, "query": query, "reward": reward, **fields})


def state(*queries: tuple[str, float | None], **fields: Any) -> list[Try]:
    """The tries of one state, each by the next prompt."""
    return [
        made(text, reward, variant=number, **fields)
        for number, (text, reward) in enumerate(queries)
    ]


def drawn(draw: random.Random, levels: Sequence[float | None], count: int) -> list[Try]:
    """A random state of up to `count` tries, in which queries, rewards and pools repeat."""
    keys = [(variant, number) for variant in range(4) for number in range(3)]
    return [
        made(
            draw.choice("abcdefgh"),
            draw.choice(levels),
            variant=variant,
            draw=number,
            pool=(draw.choice("pq"),),
        )
        for variant, number in draw.sample(keys, draw.randint(0, count))
    ]
