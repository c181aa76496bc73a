"""Turns that branch, as the segments of one episode: each sampled token trains once.

An environment may ask for several turns behind one prefix, rewrite what was said, or change the
system's message. What was played then is a forest of pieces of tokens. A row of a batch is a path
from a root to a leaf; what an earlier row has trained is read in a later one, and not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from qrag_jax.rollouts.token_sampler import STOP
from qrag_jax.rollouts.trajectories import Segment, Turn


class Piece(NamedTuple):
    """Tokens behind those of another piece.

    Attributes:
        parent: the number of that piece, lower than its own; -1: none.
        ids: int32.
        log_probs: float32, of ids that were sampled and train; None: they are only read.
        finish: how a sampled piece ended.
        version: of the weights that sampled it.
    """

    parent: int
    ids: np.ndarray
    log_probs: np.ndarray | None = None
    finish: str = STOP
    version: str = ""


def segments_of(pieces: Sequence[Piece]) -> tuple[Segment, ...]:
    """The segments of an episode; tokens that no sampled ones follow are left out.

    Raises:
        ValueError: a piece has a parent that is not before it.
    """
    inner = set[int]()
    for number, piece in enumerate(pieces):
        if not -1 <= piece.parent < number:
            raise ValueError(f"piece {number} has the parent {piece.parent}, which is not before")
        inner.add(piece.parent)
    trained, segments = set[int](), []
    for leaf in range(len(pieces)):
        if leaf in inner:
            continue
        path, number = list[int](), leaf
        while number >= 0:
            path.append(number)
            number = pieces[number].parent
        turns, read = list[Turn](), list[np.ndarray]()
        for number in reversed(path):
            piece = pieces[number]
            if piece.log_probs is None or number in trained or not len(piece.ids):
                read.append(piece.ids)
                continue
            trained.add(number)
            observed = np.concatenate(read).astype(np.int32) if read else np.zeros(0, np.int32)
            read = []
            turns.append(Turn(observed, piece.ids, piece.log_probs, piece.finish, piece.version))
        if turns:
            segments.append(tuple(turns))
    return tuple(segments)
