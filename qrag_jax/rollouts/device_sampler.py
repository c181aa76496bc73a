"""Samples tokens on the device that trains: prompts are read in parts, then a token at a time.

Rows of one call are drawn beside each other until the last one has ended. Equal prompts, such as
those of a group, are read once. A draw depends on the row's key and the token's position, so it
is the same whatever else is in the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.llm.outcomes import Failure
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.heads.language_model import LanguageModel
from qrag_jax.models.trunks.qwen3_cache import Cache, empty_cache, extend
from qrag_jax.models.trunks.trunk import WORDS, Params
from qrag_jax.rollouts.token_sampler import (
    LENGTH,
    STOP,
    Sampled,
    SampleRequest,
    SamplingConfig,
    rooms,
)

_FEWEST = 8  # rows that are computed, at least
_ROOMS = 64  # places of rows are a multiple of this
_UNROLLED = 4  # parts of prompts, at most, that are read one by one in the program


class DeviceSampler:
    """See `rollouts.token_sampler`.

    A program is compiled for each number of rows, a power of two, and of prompts: as many, or few.

    Args:
        model: the language model; its trunk computes on one device, or by XLA's own partitioning
            where the parameters lie on several.
    """

    def __init__(self, model: LanguageModel, config: SamplingConfig) -> None:
        self.model, self.config = model, config
        self._program = jax.jit(partial(_sampled, model, config), static_argnums=0)

    def sample(self, params: Params | Adapted, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """The turns, in the order of the requests.

        Args:
            params: of the model, stacked; or a base and adapters.

        Raises:
            ValueError: a context is empty, or has no room for a token behind it.
        """
        if not requests:
            return []
        asked = rooms(requests, self.config.room)
        prompts = {request.ids.tobytes(): request.ids for request in requests}
        places = {prompt: place for place, prompt in enumerate(prompts)}
        rows = max(_power(len(requests)), _FEWEST)
        # Few shapes: either a prompt for each row, or one for several, as in a group's first turn.
        few = _power(len(prompts))
        count = few if 4 * few <= rows else rows
        longest = max(map(len, prompts.values()))
        # Each token that is drawn looks at all places, so there are not many more than needed.
        needed = max(len(each.ids) + most for each, most in zip(requests, asked, strict=True))
        room = min(_ROOMS * _rung(math.ceil(needed / _ROOMS)), self.config.room)
        chunks = math.ceil(longest / self.config.chunk)
        width = self.config.chunk * _power(chunks)
        tokens = np.zeros((count, width), np.int32)
        lengths = np.zeros(count, np.int32)
        for place, ids in enumerate(prompts.values()):
            tokens[place, : len(ids)], lengths[place] = ids, len(ids)
        source, most = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        keys = np.zeros((rows, 2), np.uint32)
        for row, request in enumerate(requests):
            source[row] = places[request.ids.tobytes()]
            most[row] = asked[row]
            keys[row] = request.key
        given = _Given(tokens, lengths, source, most, keys)
        drawn: _Drawn = jax.device_get(self._program(room, params, given))
        found = []
        for row in range(len(requests)):
            end = int(drawn.counts[row])
            finish = STOP if drawn.stopped[row] else LENGTH
            found.append(Sampled(drawn.ids[row, :end], drawn.log_probs[row, :end], finish))
        return found


class RoundSampler:
    """A device sampler with the weights that it samples by; see `token_episodes.Sampler`.

    Args:
        sampler: the programs.
        params: as in `DeviceSampler.sample`.
        version: of these.
    """

    in_rounds = True

    def __init__(self, sampler: DeviceSampler, params: Params | Adapted, version: str = "") -> None:
        self.version = version
        self._sampler, self._params = sampler, params

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        """The turns, which are there when this returns."""
        done: list[Future[Sampled | Failure]] = []
        for sampled in self._sampler.sample(self._params, requests):
            done.append(Future())
            done[-1].set_result(sampled)
        return done


class _Given(NamedTuple):
    """U prompts and B rows.

    tokens `[U, P]` and lengths `[U]`, 0 for no prompt; source `[B]`, the prompt of a row; most
    `[B]`, 0 for no row; keys uint32 `[B, 2]`.
    """

    tokens: Any
    lengths: Any
    source: Any
    most: Any
    keys: Any


class _Drawn(NamedTuple):
    """ids, log_probs `[B, S]`; counts `[B]`, tokens of each row; stopped `[B]`."""

    ids: Any
    log_probs: Any
    counts: Any
    stopped: Any


class _Loop(NamedTuple):
    """Rows while they are drawn; hidden `[B, H]` is the state before the next token."""

    cache: Cache
    hidden: jax.Array
    drawn: _Drawn


def _sampled(
    model: LanguageModel,
    config: SamplingConfig,
    room: int,
    params: Params | Adapted,
    given: _Given,
) -> _Drawn:
    whole = attach(params, model.lora_scale) if isinstance(params, Adapted) else params
    trunk = model.trunk
    prepared = trunk.prepare(whole, trunk.precision.products)
    head = model.head(prepared)
    cache, hidden = _read(model, config.chunk, room, prepared, given)
    rows = len(given.source)
    nothing = jnp.zeros((rows, room), jnp.int32)
    drawn = _Drawn(
        nothing,
        nothing.astype(jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, bool),
    )
    stop_ids = jnp.array(model.stop_ids, jnp.int32)

    def is_open(drawn: _Drawn) -> jax.Array:
        return ~drawn.stopped & (drawn.counts < given.most)

    def one_token(loop: _Loop) -> _Loop:
        cache, hidden, drawn = loop
        open_ = is_open(drawn)
        ids, log_probs = _draw(
            model.logits_of(hidden, head), given.keys, cache.lengths, config.temperature
        )
        place = jnp.where(open_, drawn.counts, room)
        row = jnp.arange(rows)
        drawn = _Drawn(
            drawn.ids.at[row, place].set(ids, mode="drop"),
            drawn.log_probs.at[row, place].set(log_probs, mode="drop"),
            drawn.counts + open_.astype(jnp.int32),
            drawn.stopped | (open_ & (ids[:, None] == stop_ids[None]).any(axis=1)),
        )
        # The last token of a row is never read: nothing comes behind it.
        more = is_open(drawn).astype(jnp.int32)
        hidden, cache = extend(trunk, prepared, prepared[WORDS][ids][:, None], more, cache)
        return _Loop(cache, hidden[:, 0], drawn)

    start = _Loop(cache.rows(given.source), hidden[given.source], drawn)
    return jax.lax.while_loop(lambda loop: is_open(loop.drawn).any(), one_token, start).drawn


def _read(
    model: LanguageModel, chunk: int, room: int, prepared: Params, given: _Given
) -> tuple[Cache, jax.Array]:
    """The cache of all prompts, and the hidden states `[U, H]` of their last tokens."""
    trunk = model.trunk
    count, width = given.tokens.shape

    def part(number: Any, carry: tuple[Cache, jax.Array], window: int = 0):
        cache, last = carry
        tokens = jax.lax.dynamic_slice_in_dim(given.tokens, number * chunk, chunk, 1)
        counts = jnp.clip(given.lengths - number * chunk, 0, chunk)
        words = prepared[WORDS][tokens]
        hidden, cache = extend(trunk, prepared, words, counts, cache, window=window)
        own = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return cache, jnp.where((counts > 0)[:, None], own, last)

    last = jnp.zeros((count, trunk.config.hidden_size), trunk.precision.activations)
    start = empty_cache(trunk, count, room), last
    parts = width // chunk
    if parts <= _UNROLLED:  # then each part is known to see no more than the parts before it
        for number in range(parts):
            start = part(number, start, (number + 1) * chunk)
        return start
    return jax.lax.fori_loop(0, parts, part, start)


def _draw(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """A token of each row and its log-probability; logits `[B, V]`, keys `[B, 2]`, positions `[B]`.

    The token is where the cumulated probability passes one uniform number. With float32 numbers,
    tokens whose probability is below 1e-7 come a little too often or too seldom.
    """
    if not temperature:
        ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return ids, jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)[:, 0]
    log_probs = jax.nn.log_softmax(logits / temperature)

    def uniform(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    reached = jnp.cumsum(jnp.exp(log_probs), axis=-1)
    total = reached[:, -1]
    mark = jnp.minimum(jax.vmap(uniform)(keys, positions) * total, jnp.nextafter(total, 0.0))
    # The first token that reaches beyond the mark has a probability above 0.
    ids = jnp.argmax(reached > mark[:, None], axis=-1).astype(jnp.int32)
    return ids, jnp.take_along_axis(log_probs, ids[:, None], 1)[:, 0]


def _rung(number: int) -> int:
    """The next of 1, 1.5 and 2 times a power of two."""
    power = _power(number)
    return 3 * power // 4 if power > 2 and 3 * power >= 4 * number else power


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << max(0, number - 1).bit_length()
