"""Samples tokens on the device that trains: prompts are read in parts, then a token at a time.

Rows of one call are drawn together. When three quarters of them have ended, the others go
on alone. Equal prompts, such as those of a group, are read once, and so is a long prefix that
prompts share, such as instructions or examples. Of an episode's next turn only what is new is read.
A draw depends on the row's key and the token's position, so it is the same whatever else is in the
call.

Of several devices each has rows of its own, and all parameters in the form in which they are used.
None waits for another while it draws.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.errors import InputError
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.embedding import LanguageModel
from qrag_jax.models.trunks import qwen3_cache
from qrag_jax.models.trunks.qwen3_cache import APART, Cache, DecodeCache, extend
from qrag_jax.models.trunks.transformer import WORDS, Params, Transformer
from qrag_jax.rollouts.trajectories import LENGTH, STOP, Sampled, SampleRequest, SamplingConfig
from qrag_jax.runtime.mesh import AXES
from qrag_jax.runtime.platform import compiler_options

_FEWEST = 4  # rows that are computed, at least
_STEP = 4  # there are programs for so many rows, and for so many times fewer
_PREFIXES = 4  # of a device's prompts, at most
_FEWEST_LEFT = 8  # rows that go on alone, at least: each number of rows is compiled, too


class DeviceSampler:
    """Samples turns; see `rollouts.trajectories`.

    Programs are compiled for each number of a device's rows, `SamplingConfig.rows` and this divided
    by 4, 16 and so on, and of prompts: as many as rows, or a quarter. More requests are drawn in
    parts. Rows are split over all axes of the mesh; None: one device of this process.
    """

    def __init__(
        self, model: LanguageModel, config: SamplingConfig, mesh: Mesh | None = None
    ) -> None:
        self.config, self.devices = config, mesh.size if mesh else 1
        trunk, by_row, whole = model.trunk, PartitionSpec(AXES), PartitionSpec()
        of_places: Any = PartitionSpec(None, None, AXES)
        of_cache = Cache(of_places, of_places, by_row)  # type: ignore[arg-type]
        options = shared = None
        if mesh is not None:
            # Else XLA computes products by two equal blocks of the cache as one, of their copy.
            options = compiler_options(mesh, adapters=True)
            shared = NamedSharding(mesh, whole) if mesh.size > 1 else None

        def program(run: Callable[..., Any], takes: Any, gives: Any, **how: Any) -> Any:
            """Each device has rows of its own, and all parameters."""
            if mesh is not None and mesh.size > 1:
                specs = {"in_specs": takes, "out_specs": gives}
                run = jax.shard_map(run, mesh=mesh, **specs, check_vma=False)
            return jax.jit(run, compiler_options=options, **how)

        def prepare(params: Params | Adapted) -> Params:
            return trunk.prepare(attach(params, model.lora_scale), trunk.precision.products)

        def rows(cache: Cache, which: jax.Array, lengths: jax.Array) -> Cache:
            return cache.rows(which)._replace(lengths=lengths)

        @functools.cache
        def empty(rows: int) -> Any:
            return program(partial(qwen3_cache.empty_cache, trunk, rows, config.room), (), of_cache)

        # Parameters as all other programs take them, gathered once for all tokens.
        self.prepare = jax.jit(prepare, out_shardings=shared, compiler_options=options)
        self.empty = empty  # so many rows of each device, without tokens
        # (cache, which rows `[U]`, how many tokens of each `[U]`) → their cache
        self.rows = program(rows, (of_cache, by_row, by_row), of_cache)
        # (prepared, cache, (tokens `[U, P]`, lengths `[U]`)) → cache, last hidden states `[U, H]`
        read, takes = partial(_read, model, config), (whole, of_cache, by_row)
        self.read = program(read, takes, (of_cache, by_row), donate_argnums=1)
        # (prepared, what `read` gives, `_Rows`) → `_Drawn`
        draw, seen = partial(_drawn, model, config), (whole, (of_cache, by_row), by_row)
        self.draw = program(draw, seen, by_row, out_shardings=shared)


class RoundSampler:
    """A device sampler with the weights that it samples by; see `trajectories.Sampler`.

    `reuse`: the keys and values of prompts are kept from one call to the next. A prompt that begins
    as one of the last call, such as the next turn of its episode, is read from there on.
    """

    in_rounds, version = True, ""

    def __init__(
        self, sampler: DeviceSampler, params: Params | Adapted, *, reuse: bool = False
    ) -> None:
        self._sampler, self._reuse = sampler, reuse
        self._prepared = sampler.prepare(params)
        self._last: tuple[Cache, _Prompts] | None = None  # what the last call read

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled]]:
        done: list[Future[Sampled]] = [Future() for _ in requests]
        for future, sampled in zip(done, self.sample(requests), strict=True):
            future.set_result(sampled)
        return done

    def read(self, request: SampleRequest, result: Sampled) -> Sampled:
        return result

    def sample(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """The turns, in the order of the requests, whose contexts have room for a token behind."""
        # Equal prompts lie side by side, and those that share a prefix.
        order = sorted(range(len(requests)), key=lambda number: requests[number].ids.tobytes())
        results, most = dict[int, Sampled](), self._sampler.config.rows * self._sampler.devices
        for first in range(0, len(order), most):
            part = order[first : first + most]
            drawn = self._side_by_side([requests[number] for number in part])
            results |= zip(part, drawn, strict=True)
        return [results[number] for number in range(len(requests))]

    def _side_by_side(self, requests: Sequence[SampleRequest]) -> list[Sampled]:
        config, devices = self._sampler.config, self._sampler.devices
        size = math.ceil(len(requests) / devices)
        shares = [range(len(requests))[size * n : size * (n + 1)] for n in range(devices)]
        texts = [{requests[n].ids.tobytes(): requests[n].ids for n in part} for part in shares]
        # Few shapes, which depend on the config alone and on numbers of rows.
        rows = _tier(size, config.rows)
        few = max(rows // _STEP, 1)
        count = few if max(map(len, texts)) <= few else rows
        source, most = np.zeros((2, devices * rows), np.int32)
        keys, row_of = np.zeros((devices * rows, 2), np.uint32), list[int]()
        for device, numbers in enumerate(shares):
            place_of = {text: place for place, text in enumerate(texts[device])}
            for row, number in enumerate(numbers, device * rows):
                ids, keys[row], asked = requests[number]
                source[row], most[row] = place_of[ids.tobytes()], min(asked, config.room - len(ids))
                row_of.append(row)
        prompts = [[*of_device.values()] for of_device in texts]
        read = self._cache_of(prompts, count)
        turns = self._sampler.draw(self._prepared, read, _Rows(source, most, keys))
        self._last = (read[0], prompts) if self._reuse else None
        drawn: _Drawn = jax.device_get(turns)
        results = []
        for row in row_of:
            end = drawn.counts[row]
            ids, log_probs = drawn.ids[row, :end], drawn.log_probs[row, :end]
            if not np.isfinite(log_probs).all():
                raise InputError(
                    "the language model's logits are not finite; use weights (config.model.path) "
                    "without NaN, or set config.model.dtype to float32."
                )
            results.append(Sampled(ids, log_probs, STOP if drawn.stopped[row] else LENGTH))
        return results

    def _cache_of(self, prompts: _Prompts, count: int) -> tuple[Cache, jax.Array]:
        """The cache of all prompts, and the hidden states of their last tokens.

        A prompt is read behind what the last call had of it, or behind a prefix that it shares,
        whichever leaves less to read. `count`: rows of each device.
        """
        chunk, few = self._sampler.config.chunk, min(max(count // _STEP, 1), _PREFIXES)
        runs = [shared_prefixes(texts, few, chunk) for texts in prompts]
        behind_prefix = [
            [(n, prefix) for n, (members, prefix) in enumerate(run) for _ in range(members)]
            for run in runs
        ]
        last, self._last = self._last, None
        if last is not None:
            behind_last = [_longest(*both) for both in zip(prompts, last[1], strict=True)]
            if _left(prompts, behind_last) <= _left(prompts, behind_prefix):
                return self._extended(last[0], prompts, behind_last, count)
        cache = self._sampler.empty(few)()
        if any(prefix for run in runs for _, prefix in run):
            shared = [
                [*{n: ids[:prefix] for ids, (n, prefix) in zip(*both, strict=True)}.values()]
                for both in zip(prompts, behind_prefix, strict=True)
            ]
            cache, _ = self._extended(cache, shared, [[(0, 0)] * len(run) for run in runs], few)
        return self._extended(cache, prompts, behind_prefix, count)

    def _extended(
        self, cache: Cache, prompts: _Prompts, behind: _Behind, count: int
    ) -> tuple[Cache, jax.Array]:
        """Reads prompts behind what a cache has of them; `count`: rows of each device."""
        config, rows = self._sampler.config, self._sampler.devices * count
        tokens = np.zeros((rows, config.chunk * math.ceil(config.room / config.chunk)), np.int32)
        which, known, lengths = np.zeros((3, rows), np.int32)
        for device, (texts, places) in enumerate(zip(prompts, behind, strict=True)):
            for row, (ids, at) in enumerate(zip(texts, places, strict=True), device * count):
                which[row], known[row] = at
                lengths[row] = len(ids) - known[row]
                tokens[row, : lengths[row]] = ids[known[row] :]
        begun = self._sampler.rows(cache, which, known)
        return self._sampler.read(self._prepared, begun, (tokens, lengths))


# Of each device, its different prompts; and for each of them, in which row of a cache it begins,
# and with how many tokens.
_Prompts = Sequence[Sequence[np.ndarray]]
_Behind = Sequence[Sequence[tuple[int, int]]]


def _longest(texts: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """For each prompt the place of the other one that begins most alike, and how many tokens are.

    A token is left to be read.
    """
    return [
        max(
            ((n, min(_common(ids, other), len(ids) - 1)) for n, other in enumerate(others)),
            key=lambda place: place[1],
            default=(0, 0),
        )
        for ids in texts
    ]


def _left(prompts: _Prompts, behind: _Behind) -> int:
    """Tokens of the longest part of a prompt that is to be read."""
    return max(
        len(ids) - known
        for texts, places in zip(prompts, behind, strict=True)
        for ids, (_, known) in zip(texts, places, strict=True)
    )


class _Rows(NamedTuple):
    """B rows that are drawn."""

    source: Any  # `[B]`, the prompt of a row among its device's
    most: Any  # `[B]`, 0 for no row
    keys: Any  # uint32 `[B, 2]`


class _Drawn(NamedTuple):
    ids: Any  # `[B, S]`
    log_probs: Any  # `[B, S]`
    counts: Any  # `[B]`, tokens of each row
    stopped: Any  # `[B]`


# Words of new tokens `[B, H]`, whether each row gets one `[B]`, and the cache → the hidden states
# `[B, H]`, and the longer cache.
_Append = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class _Loop(NamedTuple):
    """Rows while they are drawn; hidden `[B, H]` is the state before the next token."""

    cache: Cache | DecodeCache
    hidden: jax.Array
    keys: jax.Array
    most: jax.Array
    drawn: _Drawn

    @property
    def is_open(self) -> jax.Array:
        """bool `[B]`: whether a token of the row is still to be drawn."""
        return ~self.drawn.stopped & (self.drawn.counts < self.most)

    def rows(self, which: jax.Array) -> _Loop:
        cache, rest = self.cache.rows(which), (self.hidden, self.keys, self.most, self.drawn)
        return _Loop(cache, *jax.tree.map(lambda leaf: leaf[which], rest))


def _drawn(
    model: LanguageModel,
    config: SamplingConfig,
    prepared: Params,
    read: tuple[Cache, jax.Array],
    rows: _Rows,
) -> _Drawn:
    trunk, (cache, hidden) = model.trunk, read
    head = model.head(prepared).astype(trunk.precision.products)
    count, room = len(rows.source), config.room
    ids, log_probs = (jnp.zeros((count, room), dtype) for dtype in (jnp.int32, jnp.float32))
    drawn = _Drawn(ids, log_probs, jnp.zeros(count, jnp.int32), jnp.zeros(count, bool))
    stop_ids = jnp.array(model.stop_ids, jnp.int32)

    def one_token(behind: _Append, loop: _Loop) -> _Loop:
        cache, hidden, keys, most, drawn = loop
        open_ = loop.is_open
        ids, log_probs = _draw(
            model.logits_of(hidden, head), keys, cache.lengths, config.temperature
        )
        place = jnp.where(open_, drawn.counts, room)
        row = jnp.arange(len(ids))
        drawn = _Drawn(
            drawn.ids.at[row, place].set(ids, **APART),
            drawn.log_probs.at[row, place].set(log_probs, **APART),
            drawn.counts + open_.astype(jnp.int32),
            drawn.stopped | (open_ & (ids[:, None] == stop_ids[None]).any(axis=1)),
        )
        # The last token of a row is never read: nothing comes behind it.
        more = loop._replace(drawn=drawn).is_open
        hidden, cache = behind(prepared[WORDS][ids], more, cache)
        return _Loop(cache, hidden, keys, most, drawn)

    def to_the_end(loop: _Loop, stages: Sequence[tuple[int, _Append]]) -> _Drawn:
        """All tokens. Most rows end early, and then the few others go on without them."""
        fewer = len(loop.most) // _STEP
        if fewer < _FEWEST_LEFT:
            fewer = 0
        for end, behind in stages:

            def goes_on(loop: _Loop, end: int = end) -> jax.Array:
                longest = jnp.where(loop.is_open, loop.cache.lengths, 0).max()
                return (loop.is_open.sum() > fewer) & (longest < end)

            loop = jax.lax.while_loop(goes_on, partial(one_token, behind), loop)
        if not fewer:
            return loop.drawn
        which = jnp.argsort(~loop.is_open, stable=True)[:fewer]
        # The last stage serves all lengths: few rows cost little, and each stage is compiled.
        rest = to_the_end(loop.rows(which), stages[-1:])
        return jax.tree.map(
            lambda whole, part: whole.at[which].set(part, unique_indices=True), loop.drawn, rest
        )

    of_rows, stages = _stages(trunk, prepared, cache, rows.source)
    start = _Loop(of_rows, hidden[rows.source], rows.keys, rows.most, drawn)
    return to_the_end(start, stages)


def _stages(
    trunk: Transformer, prepared: Params, cache: Cache, source: jax.Array
) -> tuple[Cache | DecodeCache, Sequence[tuple[int, _Append]]]:
    """The cache of the rows, and how tokens are appended while they stand before some place."""
    if trunk.scanned:
        of_rows = qwen3_cache.decode_cache(cache, source)
        layers = qwen3_cache.layers_of(trunk, prepared)
        return of_rows, [
            (end, partial(qwen3_cache.append, (trunk, prepared, layers, blocks)))
            for blocks, end in enumerate(of_rows.ends, 1)
        ]

    def append_one(words: jax.Array, is_new: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        hidden, cache = extend(trunk, prepared, words[:, None], is_new.astype(jnp.int32), cache)
        return hidden[:, 0], cache

    return cache.rows(source), [(cache.room, append_one)]


def _read(
    model: LanguageModel,
    config: SamplingConfig,
    prepared: Params,
    cache: Cache,
    new: tuple[jax.Array, jax.Array],
) -> tuple[Cache, jax.Array]:
    """Appends tokens to the rows of a cache, a part at a time; see `_Programs`."""
    trunk, chunk, (tokens, lengths) = model.trunk, config.chunk, new

    def part(number: Any, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, last = carry
        chunk_tokens = jax.lax.dynamic_slice_in_dim(tokens, number * chunk, chunk, 1)
        counts = jnp.clip(lengths - number * chunk, 0, chunk)
        hidden, cache = extend(trunk, prepared, prepared[WORDS][chunk_tokens], counts, cache)
        ends = jnp.maximum(counts - 1, 0)[:, None, None]
        new = jnp.take_along_axis(hidden, ends, axis=1)[:, 0]
        return cache, jnp.where((counts > 0)[:, None], new, last)

    nothing = jnp.zeros((len(tokens), trunk.config.hidden_size), trunk.precision.activations)
    parts = (lengths.max() + chunk - 1) // chunk
    return jax.lax.fori_loop(0, parts, part, (cache, nothing))


def _draw(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """A token of each row and its log-probability; logits `[B, V]`, keys `[B, 2]`, positions `[B]`.

    The token is where the cumulated probability passes one uniform number. With float32 numbers,
    tokens whose probability is below 1e-7 come a little too often or too seldom.
    """
    if not temperature:
        ids = _first(logits == logits.max(axis=-1, keepdims=True))
        return ids, jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, None], 1)[:, 0]
    log_probs = jax.nn.log_softmax(logits / temperature)

    def uniform(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position))

    reached = jnp.cumsum(jnp.exp(log_probs), axis=-1)
    total = reached[:, -1]
    mark = jnp.minimum(jax.vmap(uniform)(keys, positions) * total, jnp.nextafter(total, 0.0))
    # The first token that reaches beyond the mark has a probability above 0.
    ids = _first(reached > mark[:, None])
    return ids, jnp.take_along_axis(log_probs, ids[:, None], 1)[:, 0]


def _first(is_it: jax.Array) -> jax.Array:
    """int32 `[B]`: the first place of each row `[B, V]` that is; a CPU is slow in `argmax`."""
    last = is_it.shape[-1] - 1
    return jnp.where(is_it, jnp.arange(last + 1, dtype=jnp.int32), last).min(axis=-1)


def _tier(number: int, most: int) -> int:
    """The fewest rows, of `most` and this divided by 4, 16 and so on, that hold so many."""
    rows = most
    while rows >= _STEP * _FEWEST and rows // _STEP >= number:
        rows //= _STEP
    return rows


# ---------------------------------------------------------------- prefixes that prompts share


def shared_prefixes(prompts: Sequence[np.ndarray], most: int, chunk: int) -> list[tuple[int, int]]:
    """Cuts sorted, different prompts into runs, each with a prefix that all of its prompts have.

    Prefixes are read side by side, and then the rests of all prompts, `chunk` tokens at a time, so
    the longest of each count. The longest rest gets as few chunks as so many runs (`most`) allow.
    Returns for each run its number of prompts and the length of its prefix; each prompt has a token
    behind it. Where prefixes would save nothing, one run without a prefix.
    """
    lengths = [len(prompt) for prompt in prompts]
    common = [_common(one, two) for one, two in itertools.pairwise(prompts)]
    whole = -(-max(lengths, default=0) // chunk)
    for few in range(1, whole):
        runs = _runs(lengths, common, few * chunk)
        if len(runs) <= most:
            shared = -(-max(prefix for _, prefix in runs) // chunk)
            if most * shared + len(prompts) * few < len(prompts) * whole:
                return runs
            break
    return [(len(prompts), 0)] if prompts else []


def _runs(lengths: Sequence[int], common: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """The fewest runs whose rests have at most so many tokens."""
    runs, first = list[tuple[int, int]](), 0
    while first < len(lengths):
        # A part of a run has no longer rests than the run, so the longest runs are the fewest.
        end, prefix, reach = first + 1, lengths[first] - 1, lengths[first]
        while end < len(lengths):
            shorter = min(prefix, common[end - 1], lengths[end] - 1)
            if max(reach, lengths[end]) - shorter > longest:
                break
            prefix, reach, end = shorter, max(reach, lengths[end]), end + 1
        runs.append((end - first, prefix))
        first = end
    return runs


def _common(one: np.ndarray, two: np.ndarray) -> int:
    shorter = min(len(one), len(two))
    differs = np.flatnonzero(one[:shorter] != two[:shorter])
    return int(differs[0]) if len(differs) else shorter
