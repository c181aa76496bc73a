"""The training loop's formulas, slow and obvious: NumPy in float64, one state at a time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.data.episodes import EpisodeBatch
from qrag_jax.models.compute.packing import padded_layout
from qrag_jax.models.embedding import LanguageModel, TextEncoder
from qrag_jax.models.trunks.transformer import WORDS
from qrag_jax.rollouts.chunks import CHUNK, STATE, RolloutConfig
from tests.episodes_maker import CLS, PAD, SEP


def join(parts: Sequence[Sequence[int]]) -> list[int]:
    """[CLS] part [SEP] part [SEP] …"""
    row = [CLS]
    for part in parts:
        row += [*part, SEP]
    return row


def question(batch: EpisodeBatch, episode: int) -> list[int]:
    return list(batch.question[episode, : batch.question_length[episode]])


def chunk(batch: EpisodeBatch, episode: int, index: int, most: int) -> list[int]:
    length = min(most, batch.chunk_lengths[episode, index])
    return list(batch.chunks[episode, index, :length])


def state_row(
    batch: EpisodeBatch, episode: int, taken: Sequence[int], config: RolloutConfig
) -> list[int]:
    shown = sorted(taken) if config.sort_by_index else taken
    most = config.max_chunk_tokens_in_state
    return join([question(batch, episode), *(chunk(batch, episode, i, most) for i in shown)])


def chunk_row(batch: EpisodeBatch, episode: int, index: int, config: RolloutConfig) -> list[int]:
    return join([chunk(batch, episode, index, config.max_chunk_tokens - 2)])


def padded(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as tokens `[N, width]` and lengths `[N]`."""
    tokens = np.full((len(rows), width), PAD, np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def rotated(embedding: np.ndarray, position: int) -> np.ndarray:
    """Each half's neighbouring pairs as complex numbers, turned by p·theta^(-2j/D)."""
    result = []
    for half in np.split(embedding.astype(np.float64), 2):
        pairs = half[0::2] + 1j * half[1::2]
        turned = pairs * np.exp(
            1j * position * 10_000.0 ** (-2 * np.arange(len(pairs)) / len(half))
        )
        result.append(np.stack([turned.real, turned.imag], -1).ravel())
    return np.concatenate(result)


def relative_positions(taken: Sequence[int], chunks: int) -> list[int]:
    """The integer parts of linspace(0, 18) in each segment, 20 more in each next segment."""
    cuts = [0, *sorted(taken), chunks]
    result: list[int] = []
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        inside = np.linspace(0.0, 18.0, end - start) if end > start else []
        result += [20 * number + int(np.floor(p + 1e-9)) for p in inside]
    return result


def chunk_positions(kind: str, taken: Sequence[int], chunks: int) -> list[int]:
    """Positions of all chunks of a document if they are not drawn at random."""
    if kind == "relative":
        return relative_positions(taken, chunks)
    return [0] * chunks if kind == "none" else list(range(chunks))


def log_sum_exp(values: np.ndarray) -> float:
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))


def log_policy(q: np.ndarray, available: np.ndarray, alpha: float, top_k: int) -> np.ndarray:
    """`[C]` → `[C]`, -inf for actions that are not drawn; ties with the k-th best are."""
    result = np.full(len(q), -np.inf)
    left = np.flatnonzero(available)
    if len(left):
        q = np.asarray(q, np.float64)
        kth = np.sort(q[left])[::-1][: min(top_k, len(left))][-1]
        drawable = [i for i in left if q[i] >= kth]
        result[drawable] = q[drawable] / alpha - log_sum_exp(q[drawable] / alpha)
    return result


def entropy(log_probabilities: np.ndarray) -> float:
    drawable = log_probabilities[np.isfinite(log_probabilities)]
    return float(-(np.exp(drawable) * drawable).sum())


def soft_value(twin: np.ndarray, available: np.ndarray, alpha: float, top_k: int) -> float:
    """`[C, 2]` → α·logsumexp(q/α) over the k best available, summed over halves."""
    total = 0.0
    for half in range(2):
        best = np.sort(np.asarray(twin, np.float64)[available, half])[::-1][:top_k]
        if len(best):
            total += alpha * log_sum_exp(best / alpha)
    return total


def lambda_returns(
    rewards: np.ndarray, discounts: np.ndarray, next_values: np.ndarray, lambda_: float
) -> np.ndarray:
    """The recursion `G_t = r_t + d_t·((1-λ)·v_{t+1} + λ·G_{t+1})`, backwards in time."""
    following = next_values[-1]
    result = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        mixed = (1 - lambda_) * next_values[t] + lambda_ * following
        following = result[t] = rewards[t] + discounts[t] * mixed
    return result


@dataclasses.dataclass
class Episode:
    """One played episode; every list has one entry per step that happened."""

    actions: list[int] = dataclasses.field(default_factory=list)
    done: list[bool] = dataclasses.field(default_factory=list)
    q: list[float] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    entropy: list[float] = dataclasses.field(default_factory=list)
    first_q: np.ndarray | None = None


def embed(encoder: TextEncoder, params: Any, tokens: Any, lengths: Any) -> jax.Array:
    """Rows `[B, L]` padded on the right → `[B, D]`; zeros for a row of length 0."""
    prepared, layout = encoder.module.prepare(params), padded_layout(lengths, tokens.shape[1])
    return encoder.embed_words(prepared, prepared[WORDS][tokens.reshape(-1)], layout)


def logits(model: LanguageModel, params: Any, tokens: Any, lengths: Any) -> jax.Array:
    """Rows `[B, L]` padded on the right → `[B, L, V]`; behind a row's end without meaning."""
    return model.logits_of(model.trunk.hidden_states(params, tokens, lengths), model.head(params))


class Player:
    """Plays one episode at a time, encoding one row at a time."""

    def __init__(self, encoder: TextEncoder, width: int) -> None:
        self.width = width
        self._embed = jax.jit(
            lambda params, tower, tokens, lengths: embed(
                encoder, jax.tree.map(lambda leaf: leaf[tower], params), tokens, lengths
            )[0]
        )

    def embed(self, params: Any, tower: int, row: Sequence[int]) -> np.ndarray:
        return np.asarray(self._embed(params, tower, *padded([row], self.width)), np.float64)

    def twin(
        self,
        params: Any,
        row: Sequence[int],
        chunks: Sequence[Sequence[int]],
        where: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Both critics of every chunk, rotated at the positions `where`, `[C, 2]`."""
        state = self.embed(params, STATE, row).reshape(2, -1)
        embedded = [self.embed(params, CHUNK, chunk) for chunk in chunks]
        if where is not None:
            embedded = [rotated(vector, p) for vector, p in zip(embedded, where, strict=True)]
        return np.array([(state * vector.reshape(2, -1)).sum(-1) for vector in embedded])

    def play(
        self,
        config: RolloutConfig,
        params: Any,
        target_params: Any,
        batch: EpisodeBatch,
        episode: int,
        alpha: float,
        choose: Callable[[int, np.ndarray], int] | None = None,
        uniform: bool = False,
    ) -> Episode:
        """Plays one episode; `choose(t, log_policy [C])` draws an action, None takes the best Q."""
        result = Episode()
        count, columns = int(batch.chunk_mask[episode].sum()), batch.chunk_mask.shape[1]
        facts = set(np.flatnonzero(batch.support[episode]))
        chunks = [chunk_row(batch, episode, i, config) for i in range(count)]
        names = list(range(count))  # the column of each action
        if config.stop_action:
            chunks.append(join([[]]))
            names.append(columns)
        while count and len(result.actions) < config.max_steps:
            row = state_row(batch, episode, result.actions, config)
            where = chunk_positions(config.positions, result.actions, count)
            where += [0] * (len(chunks) - count)  # STOP has no position
            twin = self.twin(params, row, chunks, where)
            left = np.array([name not in result.actions for name in names])
            q = twin.sum(-1)
            policy = log_policy(q, left, alpha, config.top_k_actions)
            if uniform:
                policy = np.where(left, -np.log(left.sum()), -np.inf)
            if choose is None:
                place = int(np.where(left, q, -np.inf).argmax())
            else:
                by_column = np.full(names[-1] + 1, -np.inf)
                by_column[names] = policy
                place = names.index(choose(len(result.actions), by_column))
            target_twin = self.twin(target_params, row, chunks, where)
            value = soft_value(target_twin, left, alpha, config.top_k_actions)
            if result.first_q is None:
                result.first_q = q
            result.q.append(q[place])
            result.values.append(value)
            result.entropy.append(entropy(policy))
            result.actions.append(names[place])
            found = facts <= set(result.actions)
            none_left = len(result.actions) == len(chunks)
            last = len(result.actions) == config.max_steps
            over = last or none_left or names[place] == columns
            result.done.append(over or (found and not config.never_terminate))
            if result.done[-1]:
                break
        return result


def categorical(key: jax.Array, chunks: int) -> Callable[[int, np.ndarray], int]:
    """Draws with an episode's key, the step folded in, over all `chunks` of the batch."""

    def choose(t: int, policy: np.ndarray) -> int:
        logits = np.full(chunks, -1e30, np.float32)
        logits[: len(policy)] = np.maximum(policy, -1e30)
        return int(jax.random.categorical(jax.random.fold_in(key, t), jnp.asarray(logits)))

    return choose
