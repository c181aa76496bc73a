"""A policy over a few passages: an encoder that adds up one vector for each word."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Sequence

import numpy as np

from qrag_jax.environments.rag.state_text import StateText
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.retrieval.tower_rows import Rows
from qrag_jax.rollouts.pool_search import PoolSearch, QueryRows
from tests.retrieval.array_index import of_texts

WORDS, WIDTH = 1000, 16
OPENING, SEP = (WORDS,), WORDS + 1


class WordIds:
    """A tokenizer: each word is its own token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [zlib.crc32(word.encode()) % WORDS for word in re.findall(r"\w+", text.lower())]
            for text in texts
        ]


@dataclasses.dataclass
class BagTower:
    """Rows → the direction of the sum of their words' vectors; remembers how many it was given."""

    calls: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, rows: Rows) -> np.ndarray:
        self.calls.append(len(rows))
        table = np.random.default_rng(0).normal(size=(WORDS + 2, WIDTH))
        summed = np.stack([table[list(row)[1:-1]].sum(axis=0) for row in rows])
        return (summed / np.linalg.norm(summed, axis=1, keepdims=True)).astype(np.float32)


def pool_search(
    texts: Sequence[str],
    config: PlackettLuceConfig,
    *,
    max_tokens: int = 64,
    is_greedy: bool = False,
    stateful: bool = True,
) -> PoolSearch:
    """Searches passages p0, p1 and so on with these texts."""
    tower = BagTower()
    rows = QueryRows(WordIds(), OPENING, SEP, max_tokens)
    vectors = BagTower()([[0, *ids, 0] for ids in WordIds().encode(texts)])
    states = StateText(stateful, instruction="", max_tokens=rows.room, count=rows.count)
    return PoolSearch(tower, of_texts(texts, vectors), states, rows, config, is_greedy)
