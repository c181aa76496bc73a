"""Q-RAG's updates in PyTorch, on whole batches: the peer of our step.

Hugging Face's BERT as both towers, the same weights, AdamW. Written from the papers (Q-RAG, arXiv
2511.07328; PQN, arXiv 2407.04811) and sharing no formula with ours.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import pad
from transformers import BertConfig as TorchBertConfig
from transformers import BertModel

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.feedback.facts import FactReward
from qrag_jax.learners.config import PQNConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule
from qrag_jax.models.embedding import Params, TextEncoder
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.trunks.families import BERT_TABLE, BertConfig
from qrag_jax.rollouts.chunks import CHUNK, STATE, RolloutConfig
from tests.support.torch_encoder import pool

MASKED = -1e30
SCHEDULED = 1000  # optimizer steps with a learning rate of their own; later ones have the last
ROWS = {"cpu": 32, "cuda": 1024}  # of a mini-batch of chunks, which are sorted by length

# ------------------------------------------------------------------------------ formulas


def twin_q(state: torch.Tensor, chunks: torch.Tensor) -> torch.Tensor:
    """state `[N, 2D]`, chunks `[N, C, 2D]` → the two critics' values `[N, C, 2]`."""
    return torch.einsum(
        "nhd,nchd->nch", state.unflatten(-1, (2, -1)), chunks.unflatten(-1, (2, -1))
    )


def draw(
    q: torch.Tensor, available: torch.Tensor, alpha: float, top_k: int, uniform: bool
) -> torch.Tensor:
    """One action per row from softmax(q / α) over the top k available actions; `[N, C]` → `[N]`.

    With `uniform`, all available actions are equally likely.
    """
    q = torch.where(available, q, MASKED)
    worst = q.topk(min(top_k, q.shape[1]), dim=1).values[:, -1:]
    logits = torch.where(available & (q >= worst), (q - q.amax(1, keepdim=True)) / alpha, MASKED)
    probabilities = available.float() if uniform else logits.softmax(1)
    return torch.multinomial(probabilities, 1)[:, 0]


def soft_value(
    twin: torch.Tensor, available: torch.Tensor, alpha: float, top_k: int
) -> torch.Tensor:
    """`Σ_i α·logsumexp(q_i / α)` over the top k of each critic; `[N, C, 2]` → `[N]`."""
    q = torch.where(available[..., None], twin, MASKED)
    best = q.topk(min(top_k, q.shape[1]), dim=1).values
    top = best[:, :1]
    value = top[:, 0] + alpha * ((best - top) / alpha).logsumexp(1)
    return torch.where(available.any(1), value.sum(1), 0.0)


def ground_truth(
    support: torch.Tensor, actions: torch.Tensor, valid: torch.Tensor, penalize: bool, fact: float
) -> torch.Tensor:
    """Rewards `[B, T]`: 1 (or less for extra steps) when the last missing fact is taken.

    Each fact taken adds `fact`.
    """
    hit = support.gather(1, actions) & valid
    facts = support.sum(1, keepdim=True)
    completes = hit & (hit.cumsum(1) == facts)
    steps = torch.arange(1, actions.shape[1] + 1, device=actions.device, dtype=torch.float32)
    reward = 0.5 + 0.5 * facts / (steps + 1e-5) if penalize else torch.ones_like(hit).float()
    return torch.where(completes, reward, 0.0) + fact * hit


def lambda_returns(
    rewards: torch.Tensor, discount: torch.Tensor, values: torch.Tensor, lambda_: float
) -> torch.Tensor:
    """λ-returns; all arrays are `[B, T]`, `values[:, t]` is the value of the state at step t."""
    returns = torch.zeros_like(rewards)
    following = value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        mixed = (1 - lambda_) * value + lambda_ * following
        following = returns[:, t] = rewards[:, t] + discount[:, t] * mixed
        value = values[:, t]
    return returns


# ------------------------------------------------------------------------------ towers


class Rows(NamedTuple):
    """tokens `[N, L]` padded on the right, lengths `[N]`: int64 tensors on the tower's device."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    def pick(self, index: torch.Tensor) -> Rows:
        """The rows of `index`, without the columns that none of them reaches."""
        lengths = self.lengths[index]
        return Rows(self.tokens[index, : int(lengths.max())], lengths)


class Tower(torch.nn.Module):
    """BERT under our encoder's pooling; autocast if ours is in bfloat16."""

    def __init__(self, encoder: TextEncoder, params: Params, device: torch.device) -> None:
        super().__init__()
        assert isinstance(encoder.module.config, BertConfig)
        none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        theirs = TorchBertConfig(**dataclasses.asdict(encoder.module.config), **none)
        theirs._attn_implementation = "sdpa"
        self.model = BertModel(theirs, add_pooling_layer=False).eval()
        tensors = tensors_from_params(BERT_TABLE, params)
        self.model.load_state_dict({name: torch.tensor(array) for name, array in tensors.items()})
        self.model.to(device)
        self.encoder, self.device = encoder, device

    def forward(self, rows: Rows) -> torch.Tensor:
        """Rows of at least one token → float32 embeddings `[N, D]`."""
        inside = torch.arange(rows.tokens.shape[1], device=self.device) < rows.lengths[:, None]
        half = self.encoder.module.precision.products == jnp.bfloat16
        # A new context per call: weights that were cast under no_grad must not be reused with grad.
        with torch.autocast(self.device.type, torch.bfloat16) if half else nullcontext():
            hidden = self.model(input_ids=rows.tokens, attention_mask=inside).last_hidden_state
        return pool(self.encoder, hidden, inside)

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights under Hugging Face's names."""
        return {name: p.detach().cpu().numpy() for name, p in self.model.named_parameters()}


class Pair(torch.nn.Module):
    """The state tower and the chunk tower of one role (online or target)."""

    def __init__(self, encoder: TextEncoder, params: Params, device: torch.device) -> None:
        super().__init__()
        self.state = Tower(encoder, tower_params(params, STATE), device)
        self.chunk = Tower(encoder, tower_params(params, CHUNK), device)


def tower_params(params: Params, tower: int) -> Params:
    """One of the two towers stacked on axis 0, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[tower]), params)


# ------------------------------------------------------------------------------ updates


class StepResult(NamedTuple):
    """Figures of one update; `transitions`: the states that it learned in."""

    loss: float
    grad_norm: float
    transitions: int


class BatchedPeer:
    """Trains on whole batches; `params` are the first ones of both towers, stacked on axis 0."""

    def __init__(
        self,
        encoder: TextEncoder,
        params: Params,
        rollout: RolloutConfig,
        pqn: PQNConfig,
        optimizer: OptimizerConfig,
        reward: FactReward,
        device: str = "cpu",
    ) -> None:
        assert not rollout.stop_action, "the peer has no action STOP"
        assert rollout.positions == "none", "the peer has no positions"
        assert not reward.step_cost, "the peer has no cost of a step"
        self.encoder, self.rollout, self.pqn, self.reward = encoder, rollout, pqn, reward
        self.constants, self.device = optimizer, torch.device(device)
        self.online = Pair(encoder, params, self.device)
        self.target = Pair(encoder, params, self.device).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.online.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        schedule = learning_rate_schedule(optimizer)
        self.rates = np.asarray(jax.vmap(schedule)(jnp.arange(SCHEDULED))).tolist()
        self.steps = self.env_steps = 0

    def step(self, batch: EpisodeBatch, actions: np.ndarray | None = None) -> StepResult:
        """One PQN update on a batch of NumPy arrays; `actions` `[B, T]` replace the policy's."""
        pqn, rollout = self.pqn, self.rollout
        rate = self.rates[min(self.steps, SCHEDULED - 1)]
        alpha = pqn.alpha * max(rate / self.constants.learning_rate, 1e-6)
        uniform, k = self.env_steps < 2 * pqn.learning_start, rollout.top_k_actions
        episodes, chunks = self._prepare(batch)
        with torch.no_grad():
            online, target = (
                self._embed_chunks(pair, chunks, batch) for pair in (self.online, self.target)
            )
        available = episodes.chunk_mask.clone()
        shape = len(available), rollout.max_steps
        taken = torch.zeros(shape, dtype=torch.long, device=self.device)
        if actions is not None:
            taken = torch.tensor(actions, device=self.device).long()
        valid, done = torch.zeros_like(taken).bool(), torch.ones_like(taken).bool()
        values = torch.zeros(shape, device=self.device)  # of the states after the first
        states, places = [], []
        ended = ~available.any(1)
        for step in range(rollout.max_steps):
            live = (~ended).nonzero()[:, 0]
            if not len(live):
                continue
            rows = self._state_rows(episodes, taken[live, :step], live)
            states.append(self.online.state(rows))
            places.append((live, torch.full_like(live, step)))
            with torch.no_grad():
                free = available[live]
                q = torch.where(free, twin_q(states[-1], online[live]).sum(-1), MASKED)
                if actions is None:
                    taken[live, step] = draw(q, free, alpha, k, uniform)
                if step > 0:  # nothing bootstraps from the first state
                    twin = twin_q(self.target.state(rows), target[live])
                    values[live, step] = soft_value(twin, free, alpha, k)
            available[live, taken[live, step]], valid[live, step] = False, True
            ended = ended | ~available.any(1)
            if not rollout.never_terminate:
                ended = ended | ~(episodes.support & available).any(1)
            done[:, step] = ended | (step + 1 == rollout.max_steps)
        facts = self.reward.penalize_extra_steps, self.reward.per_fact_reward
        rewards = ground_truth(episodes.support, taken, valid, *facts)
        returns = lambda_returns(rewards, pqn.gamma * (~done).float(), values, pqn.lambda_)
        episode, t = (torch.cat(part) for part in zip(*places, strict=True))
        chosen = episode * batch.chunk_mask.shape[1] + taken[episode, t]
        acted = self.online.chunk(chunks.pick(chosen))[:, None]
        twin = twin_q(torch.cat(states), acted)[:, 0]
        loss = 0.5 * (2.0 * twin - returns[episode, t][:, None]).square().sum() / len(episode)
        norm = self._update(loss, rate)
        self.env_steps += len(episode)
        return StepResult(float(loss.detach()), float(norm), len(episode))

    def _update(self, loss: torch.Tensor, rate: float) -> torch.Tensor:
        """One optimizer step, then `target ← (1-τ)·target + τ·online`.

        Returns:
            The gradient norm before clipping.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        online: list[torch.Tensor] = list(self.online.parameters())
        norm = torch.nn.utils.clip_grad_norm_(online, self.constants.clip_norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        with torch.no_grad():
            target: list[torch.Tensor] = list(self.target.parameters())
            torch._foreach_lerp_(target, online, self.pqn.tau)
        self.steps += 1
        return norm

    def _prepare(self, batch: EpisodeBatch) -> tuple[EpisodeBatch, Rows]:
        """The batch on the device, and every chunk place as a row `[B·C, W]`."""
        device, encoder = self.device, self.encoder
        tensors = (torch.as_tensor(np.asarray(leaf)).to(device) for leaf in batch)
        episodes = EpisodeBatch(*(x if x.dtype == torch.bool else x.long() for x in tensors))
        most = self.rollout.max_chunk_tokens - len(encoder.chunk_opening) - 1
        kept = min(episodes.chunks.shape[2], most)
        longest = min(int(np.max(batch.chunk_lengths)), kept)  # known on the host
        parts = episodes.chunks[:, :, :longest].flatten(0, 1)
        lengths = episodes.chunk_lengths.flatten().clamp(max=kept)
        return episodes, _join([parts], [lengths], encoder.chunk_opening, encoder)

    def _embed_chunks(self, pair: Pair, chunks: Rows, batch: EpisodeBatch) -> torch.Tensor:
        """Every chunk's embedding `[B, C, D]`, zeros where there is no chunk."""
        mask = np.asarray(batch.chunk_mask)
        present = torch.as_tensor(np.flatnonzero(mask), device=self.device)
        present = present[chunks.lengths[present].argsort(descending=True)]
        parts = present.split(ROWS[self.device.type])
        found = torch.cat([pair.chunk(chunks.pick(some)) for some in parts])
        every = found.new_zeros(mask.size, found.shape[1])
        every[present] = found
        return every.unflatten(0, mask.shape)

    def _state_rows(self, episodes: EpisodeBatch, taken: torch.Tensor, live: torch.Tensor) -> Rows:
        """States of the episodes `live` `[N]`, with their chunks `taken` `[N, t]`."""
        rollout, encoder = self.rollout, self.encoder
        if rollout.sort_by_index:
            taken = taken.sort(1).values
        kept = min(rollout.max_chunk_tokens_in_state, episodes.chunks.shape[2])
        parts, lengths = [episodes.question[live]], [episodes.question_length[live]]
        for index in taken.unbind(1):
            parts.append(episodes.chunks[live, index, :kept])
            lengths.append(episodes.chunk_lengths[live, index].clamp(max=kept))
        rows = _join(parts, lengths, encoder.state_opening, encoder)
        return rows.pick(torch.arange(len(live), device=live.device))


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
