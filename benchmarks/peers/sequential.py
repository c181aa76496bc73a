"""Peer `torch-sequential`: plays one question at a time and embeds all anew, like public code.

The episodes of a batch are played one after the other. Each batch of rows is padded to the next
power of two of its longest row. The update embeds its states, chunks and next states once more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from benchmarks.peers import soft_q
from benchmarks.peers.learner import Learner, Settings, StepResult, check_positions
from benchmarks.peers.towers import Rows, Tower, pad_rows
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.heads.embedding import Params

SHORTEST, LONGEST = 16, 512  # least and greatest padded length, in tokens
# Positions that greedy episodes compute; in these, "random" is the same as "absolute".
GREEDY_POSITIONS = ("none", "absolute", "random", "relative")
AT_ONCE = 1024  # rows embedded at once


class _Episode(NamedTuple):
    """One question as lists of token ids without special tokens."""

    question: list[int]
    chunks: list[list[int]]
    support: list[int]


class _Played(NamedTuple):
    """One played episode of T' steps.

    Attributes:
        actions: the chunk taken at each step.
        states: the token row of each state.
        chosen: the token row of each chunk taken.
        available: which chunks are available before each step.
        target_chunks: the target tower's embeddings `[C, D]`; None in greedy play.
    """

    actions: list[int]
    states: list[list[int]]
    chosen: list[list[int]]
    available: list[list[bool]]
    target_chunks: torch.Tensor | None


class SequentialPeer:
    """Trains and evaluates one episode at a time.

    Raises:
        InputError: there is an action STOP, or chunks have positions that `play` does not compute.
    """

    def __init__(self, settings: Settings, params: Params, device: str = "cpu") -> None:
        check_positions(settings.rollout, GREEDY_POSITIONS)
        self.learner = Learner(settings, params, device)
        self.settings = settings

    def step(self, batch: EpisodeBatch, actions: np.ndarray | None = None) -> StepResult:
        """One PQN update on a batch of NumPy arrays; `actions` `[B, T]` replace the policy's.

        Raises:
            InputError: chunks have positions, which only `play` computes.
        """
        check_positions(self.settings.rollout, ("none",))
        learner = self.learner
        episodes = {i: _episode(batch, i) for i in np.flatnonzero(batch.chunk_mask.any(1)).tolist()}
        played = [
            self._play(episode, None if actions is None else actions[i].tolist(), greedy=False)
            for i, episode in episodes.items()
        ]
        returns = torch.cat(
            [self._returns(*pair) for pair in zip(episodes.values(), played, strict=True)]
        )
        states = [row for episode in played for row in episode.states]
        chunks = [row for episode in played for row in episode.chosen]
        loss = learner.loss(
            learner.online.state(self._rows(states)),
            learner.online.chunk(self._rows(chunks)),
            returns,
        )
        norm = learner.update(loss, len(states))
        return StepResult(
            loss=float(loss.detach()),
            grad_norm=float(norm),
            transitions=len(states),
            state_lengths=np.array([len(row) for row in states]),
            chunk_lengths=np.array([len(row) for row in chunks]),
            steps=np.concatenate([np.arange(len(episode.states)) for episode in played]),
        )

    def play(self, batch: EpisodeBatch) -> tuple[np.ndarray, np.ndarray]:
        """Greedy episodes: actions `[B, T]` and whether each step happened."""
        shape = len(batch.chunk_mask), self.settings.rollout.max_steps
        actions, valid = np.zeros(shape, np.int64), np.zeros(shape, bool)
        for i in np.flatnonzero(batch.chunk_mask.any(1)).tolist():
            taken = self._play(_episode(batch, i), None, greedy=True).actions
            actions[i, : len(taken)], valid[i, : len(taken)] = taken, True
        return actions, valid

    @torch.no_grad()
    def _play(self, episode: _Episode, forced: list[int] | None, *, greedy: bool) -> _Played:
        learner, rollout = self.learner, self.settings.rollout
        encoder = self.settings.encoder
        most = rollout.max_chunk_tokens - len(encoder.chunk_opening) - 1
        chunk_rows = [self._row(encoder.chunk_opening, [c[:most]]) for c in episode.chunks]
        online = self._embed(learner.online.chunk, chunk_rows)
        target = None if greedy else self._embed(learner.target.chunk, chunk_rows)
        taken: list[int] = []
        states, masks = [], []
        available = [True] * len(chunk_rows)
        for t in range(rollout.max_steps):
            states.append(self._state_row(episode, taken))
            masks.append(list(available))
            free = torch.tensor([available], device=learner.device)
            placed = online
            if rollout.positions != "none":
                where = soft_q.positions(rollout.positions, taken, len(chunk_rows))
                placed = soft_q.rotate(online, where.to(learner.device))
            state = learner.online.state(self._rows(states[-1:]))
            q = soft_q.twin_q(state, placed[None]).sum(-1)
            q = torch.where(free, q, soft_q.MASKED)
            if forced is not None:
                action = forced[t]
            elif greedy:
                action = int(q.argmax(1))
            else:
                k = rollout.top_k_actions
                action = int(soft_q.draw(q, free, learner.alpha, k, learner.uniform))
            taken.append(action)
            available[action] = False
            solved = set(episode.support) <= set(taken)
            if not any(available) or (solved and not rollout.never_terminate):
                break
        return _Played(taken, states, [chunk_rows[a] for a in taken], masks, target)

    @torch.no_grad()
    def _returns(self, episode: _Episode, played: _Played) -> torch.Tensor:
        """λ-returns `[T']` of one episode; embeds later states again for their values."""
        learner, device = self.learner, self.learner.device
        steps = len(played.actions)
        values = torch.zeros(1, steps, device=device)
        if steps > 1:
            assert played.target_chunks is not None
            states = learner.target.state(self._rows(played.states[1:]))
            chunks = played.target_chunks.expand(steps - 1, -1, -1)
            available = torch.tensor(played.available[1:], device=device)
            values[0, 1:] = soft_q.soft_value(
                soft_q.twin_q(states, chunks),
                available,
                learner.alpha,
                self.settings.rollout.top_k_actions,
            )
        support = torch.zeros(1, len(episode.chunks), dtype=torch.bool, device=device)
        support[0, episode.support] = True
        actions = torch.tensor([played.actions], device=device)
        valid = torch.ones_like(actions).bool()
        done = torch.arange(steps, device=device)[None] == steps - 1
        return learner.returns(support, actions, valid, done, values)[0]

    def _embed(self, tower: Tower, rows: list[list[int]]) -> torch.Tensor:
        """Rows → `[N, D]`; at most `AT_ONCE` rows are embedded at once."""
        batches = (rows[i : i + AT_ONCE] for i in range(0, len(rows), AT_ONCE))
        return torch.cat([tower(self._rows(batch)) for batch in batches])

    def _row(self, opening: tuple[int, ...], parts: list[list[int]]) -> list[int]:
        row = [*opening]
        for part in parts:
            row += [*part, self.settings.encoder.sep_id]
        return row

    def _state_row(self, episode: _Episode, taken: list[int]) -> list[int]:
        rollout = self.settings.rollout
        order = sorted(taken) if rollout.sort_by_index else taken
        kept = rollout.max_chunk_tokens_in_state
        parts = [episode.question, *(episode.chunks[i][:kept] for i in order)]
        return self._row(self.settings.encoder.state_opening, parts)

    def _rows(self, rows: list[list[int]]) -> Rows:
        width = SHORTEST
        while width < max(map(len, rows)):
            width *= 2
        encoder = self.settings.encoder
        width = min(width, LONGEST, encoder.max_positions)
        return pad_rows(rows, width, encoder.pad_id, self.learner.device)


def _episode(batch: EpisodeBatch, i: int) -> _Episode:
    count = int(batch.chunk_mask[i].sum())
    sizes = batch.chunk_lengths[i]
    return _Episode(
        question=batch.question[i, : int(batch.question_length[i])].tolist(),
        chunks=[batch.chunks[i, c, : int(sizes[c])].tolist() for c in range(count)],
        support=np.flatnonzero(batch.support[i]).tolist(),
    )
