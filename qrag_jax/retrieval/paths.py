"""Beam search over actions: which paths through passages stay at each step ("Plan Q-RAG").

The passages may be the chunks of a document or a corpus. The Q-values are the learned ones (Q-RAG,
arXiv 2511.07328). This module knows neither jax nor where the values come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from qrag_jax.runtime.retriever_config import LAST, SUM, Search


@dataclasses.dataclass(frozen=True)
class Path:
    taken: tuple[int, ...] = ()  # passages
    q: tuple[float, ...] = ()  # theirs
    score: float = 0.0  # that paths are ranked by
    ended: bool = False

    def longer(self, action: int, q: float, score: float) -> Path:
        return Path((*self.taken, action), (*self.q, q), score)


# The best actions that a path may take next, each once: their Q, float32 `[n]`; and they, int [n].
Choices = tuple[np.ndarray, np.ndarray]


def best_first(values: np.ndarray, actions: np.ndarray) -> Choices:
    """In order of Q; of equal ones the first stays first, as with argmax."""
    order = np.argsort(-values, kind="stable")
    return values[order], actions[order]


def best_paths(
    beam: Sequence[Path],
    choices: Sequence[Choices | None],
    config: Search,
    stop: int,
    support: Sequence[int] = (),
) -> list[Path]:
    """The W best continuations of the paths of one question, best first.

    Of several paths that took the same passages, in any order, only the best one stays.

    Args:
        choices: of each path; those of a path that has ended are not read.
        stop: the action that ends a path, and is no passage.
        support: passages that end a path that has taken them all; (): none do.
    """
    paths = [path for path in beam if path.ended]
    for path, choice in zip(beam, choices, strict=True):
        if path.ended or choice is None:
            continue
        values, actions = best_first(*choice)
        if not len(values) or values[0] <= config.threshold:
            paths.append(dataclasses.replace(path, ended=True))
            continue
        scores = _scores(config, path, values.astype(np.float64))
        for action, q, score in zip(actions, values, scores, strict=True):
            if action == stop and q > config.threshold:
                paths.append(dataclasses.replace(path, score=float(score), ended=True))
            elif q > config.threshold:
                longer = path.longer(int(action), float(q), float(score))
                ended = bool(support) and {*support} <= {*longer.taken}
                paths.append(dataclasses.replace(longer, ended=ended))
    paths.sort(key=lambda path: -path.score)
    distinct: dict[tuple[frozenset[int], bool], Path] = {}
    for path in paths:
        distinct.setdefault((frozenset(path.taken), path.ended), path)
    return list(distinct.values())[: config.beam]


def _scores(config: Search, path: Path, q: np.ndarray) -> np.ndarray:
    """Ranking scores `[n]` of the path with one more action, from the actions' Q `[n]`."""
    if config.beam_score == LAST:
        return q
    if config.beam_score == SUM:
        return path.score + config.gamma ** len(path.taken) * q
    logits = q / config.alpha
    return path.score + logits - np.logaddexp.reduce(logits)
