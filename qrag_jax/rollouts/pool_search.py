"""Searches of a policy: an index gives a pool of passages, the policy draws some of them in order.

The pool's passages are scored by their own float32 vectors and by the query vector of the weights
that act, whatever the index stores. From these scores the action is drawn, and its log-probability
is theirs: the policy that acts is the policy that learns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import numpy as np
from pydantic import PlainValidator

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.environments.episode import Hop, Retrieve
from qrag_jax.llm.outcomes import Failure, well_formed
from qrag_jax.llm.text.prompts import least, one_line
from qrag_jax.policies import plackett_luce
from qrag_jax.policies.plackett_luce import NOTHING, PlackettLuceConfig
from qrag_jax.retrieval.protocol import NONE, Passage, Queries, VectorIndex, padded_batch
from qrag_jax.rollouts.trajectories import Ids, Numbers
from qrag_jax.runtime.bounded_json import plain, typed

if TYPE_CHECKING:
    from qrag_jax.retrieval.towers import RowEncoder

# ---------------------------------------------------------------- the text of a state
# What the query encoder reads before it scores passages. Stateful, as in HARR (Zhang et al., 2026):
#
#     Instruct: INSTRUCTION
#     Original Question: …
#     History: [{"sub_query": …, "status": …, "answer": …}, …]
#     Query: the sub-query
#
# Stateless it is the instruction and the query alone. A text that is too long loses the oldest
# hops, and then the end of the original question, never a part of the sub-query.

STATELESS = "Given a question, retrieve the passages that answer it."
STATEFUL = (
    "A question is answered in several searches. Given the original question, the searches so far "
    "with what they found, and the query of this search, retrieve the passages that answer the "
    "query."
)


@dataclasses.dataclass(frozen=True)
class StateRows:
    """How the state of a search becomes text, and text a row `opening text [SEP]`."""

    tokenizer: TextTokenizer  # of the query encoder
    opening: tuple[int, ...]  # ids that every row begins with
    sep_id: int  # id behind the text
    max_tokens: int  # longest row
    stateful: bool = True  # with the original question and the history, or the query alone
    # a first line "Instruct: …"; False for encoders that were trained without
    instruction: bool = True

    def text(self, question: str, step: Retrieve) -> str | Failure:
        """The text of the state in which a search is made.

        A `Failure` with the cause "too_long" if even the instruction and the sub-query do not fit.
        """
        words = question.split() if self.stateful else []
        history = step.history if self.stateful else ()
        room = self.max_tokens - len(self.opening) - 1

        def text(dropped: int, cut: int) -> str:
            return self._text(words[: len(words) - cut], history[dropped:], step.sub_query)

        def fits(dropped: int, cut: int) -> bool:
            return len(self.tokenizer.encode([text(dropped, cut)])[0]) <= room

        dropped = least(0, len(history), lambda hops: fits(hops, 0))
        cut = 0
        if not fits(dropped, 0):
            if not fits(dropped, len(words)):
                why = f"the sub-query and the instruction are longer than {room} tokens."
                return Failure("too_long", why, attempts=0)
            cut = least(0, len(words), lambda number: fits(dropped, number))
        return text(dropped, cut)

    def rows(self, texts: Sequence[str]) -> list[list[int]]:
        return [[*self.opening, *ids, self.sep_id] for ids in self.tokenizer.encode(texts)]

    def _text(self, words: list[str], history: tuple[Hop, ...], sub_query: str) -> str:
        lines = []
        if self.instruction:
            lines.append(f"Instruct: {STATEFUL if self.stateful else STATELESS}")
        if self.stateful:
            lines += [f"Original Question: {' '.join(words)}", f"History: {as_json(history)}"]
        return well_formed("\n".join([*lines, f"Query: {one_line(sub_query)}"]))


def as_json(history: tuple[Hop, ...]) -> str:
    """A list of objects with `sub_query`, `status` (if there is one) and `answer`, one a hop."""
    hops = []
    for hop in history:
        status = {"status": hop.status} if hop.status else {}
        hops.append({"sub_query": hop.sub_query, **status, "answer": hop.answer})
    return json.dumps(hops, ensure_ascii=False)


# ---------------------------------------------------------------- searches


class Ask(NamedTuple):
    question: str  # the original question
    step: Retrieve  # what the agent asks
    # uint32 `[2]`, the episode's own; searches of one episode differ in their number
    key: np.ndarray


class Drawn(NamedTuple):
    """What the policy did in one search."""

    row: Ids  # the token ids of the state
    # `[K]`, the passages' numbers, best first; `NONE` where there are no more
    pool: Annotated[np.ndarray, PlainValidator(lambda numbers: np.array(numbers, np.int64))]
    vectors: Numbers  # `[K, D]`, theirs; 0 where there is none
    # `[k]`, places in the pool in the order drawn, then `NOTHING`
    actions: Ids
    log_prob: float  # of the ordered draw
    passages: tuple[Passage, ...] = ()  # those drawn, which the agent sees

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the passages drawn."""
        return tuple(passage.name for passage in self.passages)


@dataclasses.dataclass(frozen=True)
class PoolSearch:
    """Searches an index as the policy does."""

    tower: RowEncoder  # the query encoder with the weights that act
    index: VectorIndex  # over the documents; their vectors do not change
    states: StateRows
    config: PlackettLuceConfig  # K, k and τ
    is_greedy: bool = False  # take the best k instead of drawing, as in evaluation

    def __call__(self, asks: Sequence[Ask]) -> list[Drawn | Failure]:
        """What is found for each; a `Failure` where not even the sub-query fits into a state."""
        texts = [self.states.text(ask.question, ask.step) for ask in asks]
        able = [(ask, text) for ask, text in zip(asks, texts) if not isinstance(text, Failure)]
        drawn = iter(self._found(*zip(*able)) if able else ())
        return [text if isinstance(text, Failure) else next(drawn) for text in texts]

    def _found(self, asks: Sequence[Ask], texts: Sequence[str]) -> list[Drawn]:
        rows = self.states.rows(texts)
        queries = self.tower(rows)
        numbers = self.index.search(Queries(texts, queries), self.config.pool).numbers
        present = numbers != NONE
        pool = np.zeros((*numbers.shape, queries.shape[1]), np.float32)
        pool[present] = self.index.vectors(numbers[present])
        keys = np.stack([ask.key for ask in asks])
        hops = np.array([len(ask.step.history) for ask in asks], np.uint32)
        # Batches are padded to few sizes.
        count, pad = len(asks), padded_batch(len(asks)) - len(asks)
        padded = (
            np.pad(array, ((0, pad), *[(0, 0)] * (array.ndim - 1)))
            for array in (queries, pool, present, keys, hops)
        )
        draw = _draw(self.config, self.is_greedy)
        actions, log_probs = (np.asarray(array)[:count] for array in draw(*padded))
        results = []
        for i, row in enumerate(rows):
            taken = numbers[i, actions[i][actions[i] != NOTHING]]
            passages = tuple(self.index.corpus.passages(taken))
            ids = np.array(row, np.int32)
            drawn = Drawn(ids, numbers[i], pool[i], actions[i], float(log_probs[i]), passages)
            results.append(drawn)
        return results


@functools.lru_cache
def _draw(config: PlackettLuceConfig, is_greedy: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """Makes the jitted `(queries, pool, present, keys, hops) → (actions, log-probabilities)`."""

    def one(logits: jax.Array, key: jax.Array, hop: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key), hop)
        return plackett_luce.draw(key, logits, config.passages)

    def all_of_them(queries, pool, present, keys, hops):
        logits = plackett_luce.pool_logits(queries, pool, present, config.tau)
        if is_greedy:
            actions = plackett_luce.greedy(logits, config.passages)
        else:
            actions = jax.vmap(one)(logits, keys, hops)
        return actions, plackett_luce.log_prob(logits, actions)

    return jax.jit(all_of_them)


# ---------------------------------------------------------------- episodes as arrays


class HopShape(NamedTuple):
    hops: int  # T, most searches of an episode
    tokens: int  # L, longest state
    width: int  # D, of vectors
    episode_rewards: int  # E, number of rewards of a whole episode
    hop_rewards: int  # H, of rewards of a search


class HopBatch(NamedTuple):
    """N episodes of at most T searches; those of one group are neighbours."""

    tokens: jax.Array  # `[N, T, L]` int32, the states
    lengths: jax.Array  # `[N, T]` int32, 0 where there was no search
    pool: jax.Array  # `[N, T, K, D]` float32, vectors of the pools' passages
    present: jax.Array  # `[N, T, K]` bool, whether there is a passage
    actions: jax.Array  # `[N, T, k]` int32, places in the pool in the order drawn
    log_probs: jax.Array  # `[N, T]` float32, by the weights that acted
    scored: jax.Array  # `[N]` bool, whether the episode has rewards; others are not learned from
    episode_rewards: jax.Array  # `[N, E]` float32, without weights
    hop_rewards: jax.Array  # `[N, T, H]` float32, without weights


class Rewarded(NamedTuple):
    """What is learned from one episode."""

    searches: Sequence[Drawn]  # what the policy did; no more than `HopShape.hops`
    episode: Sequence[float] | None  # `[E]` rewards of the episode; None: it has none and is masked
    hops: Sequence[Sequence[float]] = ()  # `[T][H]` rewards of its searches


def hop_batch(
    episodes: Sequence[Rewarded], shape: HopShape, config: PlackettLuceConfig
) -> HopBatch:
    searches = len(episodes), shape.hops
    arrays: dict[str, Any] = {
        "tokens": np.zeros((*searches, shape.tokens), np.int32),
        "lengths": np.zeros(searches, np.int32),
        "pool": np.zeros((*searches, config.pool, shape.width), np.float32),
        "present": np.zeros((*searches, config.pool), bool),
        "actions": np.full((*searches, config.passages), NOTHING, np.int32),
        "log_probs": np.zeros(searches, np.float32),
        "scored": np.zeros(len(episodes), bool),
        "episode_rewards": np.zeros((len(episodes), shape.episode_rewards), np.float32),
        "hop_rewards": np.zeros((*searches, shape.hop_rewards), np.float32),
    }
    for row, episode in enumerate(episodes):
        for hop, drawn in enumerate(episode.searches):
            at = row, hop
            arrays["tokens"][at][: len(drawn.row)] = drawn.row
            arrays["lengths"][at] = len(drawn.row)
            arrays["pool"][at], arrays["present"][at] = drawn.vectors, drawn.pool != NONE
            arrays["actions"][at], arrays["log_probs"][at] = drawn.actions, drawn.log_prob
        if episode.episode is not None and len(episode.searches):
            arrays["scored"][row] = True
            arrays["episode_rewards"][row] = episode.episode
            for hop, rewards in enumerate(episode.hops):
                arrays["hop_rewards"][row, hop] = rewards
    return HopBatch(**arrays)


def saved(episode: Rewarded) -> Any:
    """What was done in an episode and its rewards, as JSON; the index has the vectors."""
    none = np.zeros(0, np.float32)
    searches = [search._replace(vectors=none, passages=()) for search in episode.searches]
    return plain(episode._replace(searches=searches))


def restored(kept: Any, vectors: Callable[[np.ndarray], np.ndarray]) -> Rewarded:
    """The inverse of `saved`; `vectors` gives float32 `[n, D]` of passages by their numbers."""
    episode, searches = typed(Rewarded, kept), []
    for search in episode.searches:
        present = search.pool != NONE
        known = vectors(search.pool[present])
        stored = np.zeros((len(present), known.shape[1]), np.float32)
        stored[present] = known
        searches.append(search._replace(vectors=stored))
    return episode._replace(searches=searches)
