"""Peer `torch`: the whole PQN step in batches, as a competent PyTorch program computes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from benchmarks.peers import soft_q
from benchmarks.peers.learner import Learner, Settings, StepResult, check_positions
from benchmarks.peers.towers import Pair, Rows, Tower
from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.heads.embedding import Params, TextEncoder

SORTED_ROWS = 32  # rows per mini-batch if rows are sorted by length


class _Played(NamedTuple):
    """Played episodes. A step is live in the episodes that have not ended before it.

    Attributes:
        actions: chunk taken at each step, `[B, T]`.
        valid: whether the step happened, `[B, T]`.
        done: whether the episode has ended after the step, `[B, T]`.
        values: the target towers' soft values of the states after the first, `[B, T]`.
        states: state embeddings of each step's live episodes, for steps that have any.
        lengths: tokens of these states.
        live: numbers of the live episodes, for every step.
    """

    actions: torch.Tensor
    valid: torch.Tensor
    done: torch.Tensor
    values: torch.Tensor
    states: list[torch.Tensor]
    lengths: list[torch.Tensor]
    live: list[torch.Tensor]


class BatchedPeer:
    """Trains and evaluates whole batches; with `sort`, chunks are embedded sorted by length.

    Raises:
        InputError: chunks have positions, or there is an action STOP.
    """

    def __init__(
        self, settings: Settings, params: Params, device: str = "cpu", *, sort: bool = False
    ) -> None:
        check_positions(settings.rollout, ("none",))
        self.learner = Learner(settings, params, device)
        self.settings = settings
        self.sort = sort

    def step(self, batch: EpisodeBatch, actions: np.ndarray | None = None) -> StepResult:
        """One PQN update on a batch of NumPy arrays; `actions` `[B, T]` replace the policy's."""
        learner = self.learner
        episodes, chunks = self._prepare(batch)
        pairs = learner.online, learner.target
        online, target = (self._embed_chunks(pair, chunks, batch) for pair in pairs)
        forced = None if actions is None else torch.tensor(actions, device=learner.device).long()
        played = self._play(episodes, online, target, forced, greedy=False)
        returns = learner.returns(episodes.support, *played[:4])
        places = [
            (rows, torch.full_like(rows, t)) for t, rows in enumerate(played.live) if len(rows)
        ]
        episode, t = (torch.cat(part) for part in zip(*places, strict=True))
        chosen = episode * batch.chunk_mask.shape[1] + played.actions[episode, t]
        chosen_rows = _cut(chunks.pick(chosen))
        loss = learner.loss(
            torch.cat(played.states), learner.online.chunk(chosen_rows), returns[episode, t]
        )
        norm = learner.update(loss, len(episode))
        return StepResult(
            loss=float(loss.detach()),
            grad_norm=float(norm),
            transitions=len(episode),
            state_lengths=torch.cat(played.lengths).cpu().numpy(),
            chunk_lengths=chosen_rows.lengths.cpu().numpy(),
            steps=t.cpu().numpy(),
        )

    @torch.no_grad()
    def play(self, batch: EpisodeBatch) -> tuple[np.ndarray, np.ndarray]:
        """Greedy episodes: actions `[B, T]` and whether each step happened."""
        episodes, chunks = self._prepare(batch)
        online = self._embed_chunks(self.learner.online, chunks, batch)
        played = self._play(episodes, online, None, None, greedy=True)
        return played.actions.cpu().numpy(), played.valid.cpu().numpy()

    def _prepare(self, batch: EpisodeBatch) -> tuple[EpisodeBatch, Rows]:
        """The batch on the device, and every chunk place as a row `[B·C, W]`."""
        device, encoder = self.learner.device, self.settings.encoder
        tensors = (torch.as_tensor(np.asarray(leaf)).to(device) for leaf in batch)
        episodes = EpisodeBatch(*(x if x.dtype == torch.bool else x.long() for x in tensors))
        most = self.settings.rollout.max_chunk_tokens - len(encoder.chunk_opening) - 1
        kept = min(episodes.chunks.shape[2], most)
        longest = min(int(np.max(batch.chunk_lengths)), kept)  # known on the host
        parts = episodes.chunks[:, :, :longest].flatten(0, 1)
        lengths = episodes.chunk_lengths.flatten().clamp(max=kept)
        return episodes, _join([parts], [lengths], encoder.chunk_opening, encoder)

    @torch.no_grad()
    def _embed_chunks(self, pair: Pair, chunks: Rows, batch: EpisodeBatch) -> torch.Tensor:
        """Every chunk's embedding `[B, C, D]`, zeros where there is no chunk."""
        mask = np.asarray(batch.chunk_mask)
        present = torch.as_tensor(np.flatnonzero(mask), device=self.learner.device)
        rows = chunks.pick(present)
        found = _embed_sorted(pair.chunk, rows) if self.sort else pair.chunk(rows)
        every = found.new_zeros(mask.size, found.shape[1])
        every[present] = found
        return every.unflatten(0, mask.shape)

    def _play(
        self,
        episodes: EpisodeBatch,
        online: torch.Tensor,
        target: torch.Tensor | None,
        forced: torch.Tensor | None,
        *,
        greedy: bool,
    ) -> _Played:
        learner, rollout = self.learner, self.settings.rollout
        available = episodes.chunk_mask.clone()
        shape = len(available), rollout.max_steps
        actions = torch.zeros(shape, dtype=torch.long, device=learner.device)
        valid, done = torch.zeros_like(actions).bool(), torch.ones_like(actions).bool()
        values = torch.zeros(shape, device=learner.device)
        states, lengths, every_live = [], [], []
        ended = ~available.any(1)
        for t in range(rollout.max_steps):
            live = (~ended).nonzero()[:, 0]
            every_live.append(live)
            if not len(live):
                continue
            rows = self._state_rows(episodes, actions[:, :t], live)
            embeddings = learner.online.state(rows)
            states.append(embeddings)
            lengths.append(rows.lengths)
            with torch.no_grad():
                free = available[live]
                q = soft_q.twin_q(embeddings, online[live]).sum(-1)
                q = torch.where(free, q, soft_q.MASKED)
                if forced is not None:
                    action = forced[live, t]
                elif greedy:
                    action = q.argmax(1)
                else:
                    alpha, k = learner.alpha, rollout.top_k_actions
                    action = soft_q.draw(q, free, alpha, k, learner.uniform)
                if target is not None and t > 0:  # nothing bootstraps from the first state
                    twin = soft_q.twin_q(learner.target.state(rows), target[live])
                    values[live, t] = soft_q.soft_value(
                        twin, free, learner.alpha, rollout.top_k_actions
                    )
            available[live, action] = False
            actions[live, t], valid[live, t] = action, True
            ended = ended | ~available.any(1)
            if not rollout.never_terminate:
                ended = ended | ~(episodes.support & available).any(1)
            done[:, t] = ended | (t + 1 == rollout.max_steps)
        return _Played(actions, valid, done, values, states, lengths, every_live)

    def _state_rows(self, episodes: EpisodeBatch, taken: torch.Tensor, live: torch.Tensor) -> Rows:
        rollout, encoder = self.settings.rollout, self.settings.encoder
        taken = taken[live]
        if rollout.sort_by_index:
            taken = taken.sort(1).values
        kept = min(rollout.max_chunk_tokens_in_state, episodes.chunks.shape[2])
        parts, lengths = [episodes.question[live]], [episodes.question_length[live]]
        for index in taken.unbind(1):
            parts.append(episodes.chunks[live, index, :kept])
            lengths.append(episodes.chunk_lengths[live, index].clamp(max=kept))
        return _cut(_join(parts, lengths, encoder.state_opening, encoder))


def _join(
    parts: list[torch.Tensor],
    lengths: list[torch.Tensor],
    opening: tuple[int, ...],
    encoder: TextEncoder,
) -> Rows:
    """`opening part [SEP] part [SEP] …` of parts `[N, P]` with their lengths `[N]`."""
    width = len(opening) + sum(part.shape[1] + 1 for part in parts)
    # One extra column takes the tokens beyond a part's end.
    tokens = parts[0].new_full((len(parts[0]), width + 1), encoder.pad_id)
    tokens[:, : len(opening)] = tokens.new_tensor(opening)
    start = torch.full_like(lengths[0], len(opening))
    for part, length in zip(parts, lengths, strict=True):
        column = torch.arange(part.shape[1] + 1, device=part.device)
        place = torch.where(column <= length[:, None], start[:, None] + column, width)
        text = torch.where(column == length[:, None], encoder.sep_id, pad(part, (0, 1)))
        tokens.scatter_(1, place, text)
        start = start + length + 1
    return Rows(tokens[:, :width], start)


def _cut(rows: Rows) -> Rows:
    """The rows without the columns that no row reaches."""
    return Rows(rows.tokens[:, : int(rows.lengths.max())], rows.lengths)


def _embed_sorted(tower: Tower, rows: Rows) -> torch.Tensor:
    order = rows.lengths.argsort(descending=True)
    found = torch.cat([tower(_cut(rows.pick(some))) for some in order.split(SORTED_ROWS)])
    result = torch.empty_like(found)
    result[order] = found
    return result
