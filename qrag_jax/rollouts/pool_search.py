"""Searches of a policy: an index gives a pool of passages, the policy draws some of them in order.

The pool's passages are scored by their own float32 vectors and by the query vector of the weights
that act, whatever the index stores. From these scores the action is drawn, and its log-probability
is theirs: the policy that acts is the policy that learns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from qrag_jax.environments.episode import Retrieve, Seen
from qrag_jax.environments.rag.state_text import Fitted, StateText
from qrag_jax.llm.outcomes import Failure
from qrag_jax.policies import plackett_luce
from qrag_jax.policies.plackett_luce import NOTHING, PlackettLuceConfig
from qrag_jax.retrieval.exact import padded_batch
from qrag_jax.retrieval.protocol import NONE, Queries, VectorIndex
from qrag_jax.retrieval.tower_rows import Encode, RowEncoder


class Ask(NamedTuple):
    """One search of an episode.

    Attributes:
        question: the original question.
        step: what the agent asks.
        key: uint32 `[2]`, the episode's own; searches of one episode differ in their number.
    """

    question: str
    step: Retrieve
    key: np.ndarray


class Drawn(NamedTuple):
    """What the policy did in one search.

    Attributes:
        row: int32, the token ids of the state.
        pool: int64 `[K]`, the passages' numbers, best first; `NONE` where there are no more.
        vectors: float32 `[K, D]`, theirs; 0 where there is none.
        actions: int32 `[k]`, places in the pool in the order drawn, then `NOTHING`.
        log_prob: of the ordered draw.
        entropy: of the first passage drawn, in nats.
        names: the ids of the passages drawn.
        cut: whether the state had to leave out hops or words.
    """

    row: np.ndarray
    pool: np.ndarray
    vectors: np.ndarray
    actions: np.ndarray
    log_prob: float
    entropy: float
    names: tuple[str, ...]
    cut: bool


class Found(NamedTuple):
    """What a search found: what the agent sees, and what the policy did."""

    passages: tuple[Seen, ...]
    drawn: Drawn


@dataclasses.dataclass(frozen=True)
class QueryRows:
    """How the text of a state becomes a row: `opening text [SEP]`.

    Attributes:
        tokenizer: of the query encoder.
        opening: ids that every row begins with.
        sep_id: id behind the text.
        max_tokens: longest row.
    """

    tokenizer: Encode
    opening: tuple[int, ...]
    sep_id: int
    max_tokens: int

    @property
    def room(self) -> int:
        """Tokens that are left for a text."""
        return self.max_tokens - len(self.opening) - 1

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.tokenizer.encode([text])[0])

    def of(self, texts: Sequence[str]) -> list[list[int]]:
        """The rows of texts that fit."""
        ids = self.tokenizer.encode(texts)
        return [[*self.opening, *own, self.sep_id] for own in ids]


@dataclasses.dataclass(frozen=True)
class PoolSearch:
    """Searches an index as the policy does.

    Attributes:
        tower: the query encoder with the weights that act.
        index: over the documents; their vectors do not change.
        states: the text of a state.
        rows: its tokens.
        config: K, k and τ.
        is_greedy: take the best k instead of drawing, as in evaluation.
    """

    tower: RowEncoder
    index: VectorIndex
    states: StateText
    rows: QueryRows
    config: PlackettLuceConfig
    is_greedy: bool = False

    def __call__(self, asks: Sequence[Ask]) -> list[Found | Failure]:
        """What is found for each; a `Failure` where not even the sub-query fits into a state."""
        fitted = [self.states.of(ask.question, ask.step) for ask in asks]
        own = [(a, f) for a, f in zip(asks, fitted, strict=True) if not isinstance(f, Failure)]
        found = iter(self._found(own))
        return [each if isinstance(each, Failure) else next(found) for each in fitted]

    def _found(self, asked: Sequence[tuple[Ask, Fitted]]) -> list[Found]:
        if not asked:
            return []
        asks, fitted = zip(*asked, strict=True)
        texts = [each.text for each in fitted]
        rows = self.rows.of(texts)
        queries = self.tower(rows)
        numbers = self.index.search(Queries(texts, queries), self.config.pool).numbers
        present = numbers != NONE
        pool = np.zeros((*numbers.shape, queries.shape[1]), np.float32)
        pool[present] = self.index.vectors(numbers[present])
        keys = np.stack([ask.key for ask in asks])
        hops = np.array([len(ask.step.history) for ask in asks], np.uint32)
        actions, log_probs, entropies = self._drawn(queries, pool, present, keys, hops)
        found = []
        for i, own in enumerate(fitted):
            taken = numbers[i, actions[i][actions[i] != NOTHING]]
            passages = self.index.corpus.passages(taken)
            drawn = Drawn(
                row=np.array(rows[i], np.int32),
                pool=numbers[i],
                vectors=pool[i],
                actions=actions[i],
                log_prob=float(log_probs[i]),
                entropy=float(entropies[i]),
                names=tuple(passage.name for passage in passages),
                cut=bool(own.hops or own.words),
            )
            found.append(Found(tuple(Seen(p.name, p.text, p.title) for p in passages), drawn))
        return found

    def _drawn(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Actions, log-probabilities and entropies; batches are padded to few sizes."""
        count = len(arrays[0])
        pad = padded_batch(count) - count
        padded = (np.pad(each, ((0, pad), *[(0, 0)] * (each.ndim - 1))) for each in arrays)
        drawn = _draw(self.config, self.is_greedy)(*padded)
        return tuple(np.asarray(each)[:count] for each in drawn)


@functools.lru_cache
def _draw(config: PlackettLuceConfig, is_greedy: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes the jitted `(queries, pool, present, keys, hops) → (actions, log-probs, entropies)`."""

    def one(logits: jax.Array, key: jax.Array, hop: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), hop)
        return plackett_luce.draw(key, logits, config.passages)

    def all_of_them(queries, pool, present, keys, hops):
        logits = plackett_luce.pool_logits(queries, pool, present, config.tau)
        if is_greedy:
            actions = plackett_luce.greedy(logits, config.passages)
        else:
            actions = jax.vmap(one)(logits, keys, hops)
        return (
            actions,
            plackett_luce.log_prob(logits, actions),
            plackett_luce.entropy(logits),
        )

    return jax.jit(all_of_them)


# ---------------------------------------------------------------- episodes as arrays


class HopShape(NamedTuple):
    """Static sizes of a batch.

    Attributes:
        hops: T, most searches of an episode.
        tokens: L, longest state.
        width: D, of vectors.
        episode_rewards: E, number of rewards of a whole episode.
        hop_rewards: H, of rewards of a search.
    """

    hops: int
    tokens: int
    width: int
    episode_rewards: int
    hop_rewards: int


class HopBatch(NamedTuple):
    """N episodes of at most T searches; those of one group are neighbours.

    Attributes:
        tokens: `[N, T, L]` int32, the states.
        lengths: `[N, T]` int32, 0 where there was no search.
        pool: `[N, T, K, D]` float32, vectors of the pools' passages.
        present: `[N, T, K]` bool, whether there is a passage.
        actions: `[N, T, k]` int32, places in the pool in the order drawn.
        log_probs: `[N, T]` float32, by the weights that acted.
        scored: `[N]` bool, whether the episode has rewards; others are not learned from.
        episode_rewards: `[N, E]` float32, without weights.
        hop_rewards: `[N, T, H]` float32, without weights.
    """

    tokens: jax.Array
    lengths: jax.Array
    pool: jax.Array
    present: jax.Array
    actions: jax.Array
    log_probs: jax.Array
    scored: jax.Array
    episode_rewards: jax.Array
    hop_rewards: jax.Array


class Rewarded(NamedTuple):
    """What is learned from one episode.

    Attributes:
        searches: what the policy did; no more than `HopShape.hops`.
        episode: `[E]` rewards of the episode; None: it has none and is masked.
        hops: `[T][H]` rewards of its searches.
    """

    searches: Sequence[Drawn]
    episode: Sequence[float] | None
    hops: Sequence[Sequence[float]] = ()


def hop_batch(
    episodes: Sequence[Rewarded], shape: HopShape, config: PlackettLuceConfig
) -> HopBatch:
    """The arrays of these episodes, on the host."""
    arrays = _empty(len(episodes), shape, config)
    for row, episode in enumerate(episodes):
        for hop, drawn in enumerate(episode.searches):
            at = row, hop
            arrays["tokens"][row, hop, : len(drawn.row)] = drawn.row
            arrays["lengths"][at] = len(drawn.row)
            arrays["pool"][at], arrays["present"][at] = drawn.vectors, drawn.pool != NONE
            arrays["actions"][at], arrays["log_probs"][at] = drawn.actions, drawn.log_prob
        if episode.episode is not None and len(episode.searches):
            arrays["scored"][row] = True
            arrays["episode_rewards"][row] = episode.episode
            for hop, rewards in enumerate(episode.hops):
                arrays["hop_rewards"][row, hop] = rewards
    return HopBatch(**arrays)


def batch_shapes(episodes: int, shape: HopShape, config: PlackettLuceConfig) -> HopBatch:
    """Shapes and dtypes of a batch."""
    arrays = _empty(episodes, shape, config)
    shapes: Any = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()}
    return HopBatch(**shapes)


def _empty(episodes: int, shape: HopShape, config: PlackettLuceConfig) -> dict[str, Any]:
    """A batch of episodes in which nothing happened."""
    searches = episodes, shape.hops
    return {
        "tokens": np.zeros((*searches, shape.tokens), np.int32),
        "lengths": np.zeros(searches, np.int32),
        "pool": np.zeros((*searches, config.pool, shape.width), np.float32),
        "present": np.zeros((*searches, config.pool), bool),
        "actions": np.full((*searches, config.passages), NOTHING, np.int32),
        "log_probs": np.zeros(searches, np.float32),
        "scored": np.zeros(episodes, bool),
        "episode_rewards": np.zeros((episodes, shape.episode_rewards), np.float32),
        "hop_rewards": np.zeros((*searches, shape.hop_rewards), np.float32),
    }


def saved(episode: Rewarded) -> dict[str, Any]:
    """What was done in an episode and its rewards, as JSON."""
    return {
        "searches": [
            {
                "row": each.row.tolist(),
                "pool": each.pool.tolist(),
                "actions": each.actions.tolist(),
                "log_prob": each.log_prob,
            }
            for each in episode.searches
        ],
        "episode": None if episode.episode is None else [*map(float, episode.episode)],
        "hops": [[*map(float, rewards)] for rewards in episode.hops],
    }


def restored(kept: Mapping[str, Any], vectors: Callable[[np.ndarray], np.ndarray]) -> Rewarded:
    """The inverse of `saved`; `vectors` gives float32 `[n, D]` of passages by their numbers."""
    searches = []
    for each in kept["searches"]:
        pool = np.array(each["pool"], np.int64)
        present = pool != NONE
        known = vectors(pool[present])
        found = np.zeros((len(pool), known.shape[1]), np.float32)
        found[present] = known
        row, actions = np.array(each["row"], np.int32), np.array(each["actions"], np.int32)
        searches.append(Drawn(row, pool, found, actions, each["log_prob"], 0.0, (), False))
    return Rewarded(searches, kept["episode"], kept["hops"])
