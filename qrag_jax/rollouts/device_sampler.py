"""Samples tokens on the device that trains: prompts are read in parts, then a token at a time.

Rows of one call are drawn together. When three quarters of them have ended, the others go
on alone. Equal prompts, such as those of a group, are read once, and so is a long prefix that
prompts share, such as instructions or examples. A draw depends on the row's key and the token's
position, so it is the same whatever else is in the call.

Of several devices each has rows of its own, and all parameters in the form in which they are used.
None waits for another while it draws.
"""

from __future__ import annotations

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
from qrag_jax.models.trunks.qwen3_cache import (
    APART,
    Cache,
    DecodeCache,
    append,
    decode_cache,
    empty_cache,
    extend,
    layers_of,
)
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

    A program is compiled for each number of a device's rows, `SamplingConfig.rows` and this divided
    by 4, 16 and so on, and of prompts: as many as rows, or a quarter. More requests are drawn in
    parts. Rows are split over all axes of the mesh; None: one device of this process.
    """

    def __init__(
        self, model: LanguageModel, config: SamplingConfig, mesh: Mesh | None = None
    ) -> None:
        self.model, self.config = model, config
        self.devices = mesh.size if mesh else 1
        self._program = _program(model, config, mesh)

    def sample(self, params: Params | Adapted, requests: Sequence[SampleRequest]) -> list[Sampled]:
        """The turns, in the order of the requests, whose contexts have room for a token behind."""
        # Equal prompts lie side by side, and those that share a prefix.
        order = sorted(range(len(requests)), key=lambda number: requests[number].ids.tobytes())
        results, most = dict[int, Sampled](), self.config.rows * self.devices
        for first in range(0, len(order), most):
            part = order[first : first + most]
            drawn = self._side_by_side(params, [requests[number] for number in part])
            results |= zip(part, drawn, strict=True)
        return [results[number] for number in range(len(requests))]

    def _side_by_side(
        self, params: Params | Adapted, requests: Sequence[SampleRequest]
    ) -> list[Sampled]:
        config, devices = self.config, self.devices
        size = math.ceil(len(requests) / devices)
        shares = [range(len(requests))[size * n : size * (n + 1)] for n in range(devices)]
        prompts = [{requests[n].ids.tobytes(): requests[n].ids for n in part} for part in shares]
        # Few shapes, which depend on the config alone and on numbers of rows.
        rows = _tier(size, config.rows)
        few = max(rows // _STEP, 1)
        count = few if max(map(len, prompts)) <= few else rows
        most = min(max(count // _STEP, 1), _PREFIXES)
        width = config.chunk * math.ceil(config.room / config.chunk)
        inputs = Inputs(
            prefixes=np.zeros((devices * most, width), np.int32),
            prefix_lengths=np.zeros(devices * most, np.int32),
            tokens=np.zeros((devices * count, width), np.int32),
            lengths=np.zeros(devices * count, np.int32),
            prefix_of=np.zeros(devices * count, np.int32),
            source=np.zeros(devices * rows, np.int32),
            most=np.zeros(devices * rows, np.int32),
            keys=np.zeros((devices * rows, 2), np.uint32),
        )
        row_of = {}
        for device, (numbers, texts) in enumerate(zip(shares, prompts, strict=True)):
            places = {prompt: n for n, prompt in enumerate(texts)}
            for row, number in enumerate(numbers, device * rows):
                ids, key, asked = requests[number]
                inputs.source[row], inputs.keys[row] = places[ids.tobytes()], key
                inputs.most[row] = min(asked, config.room - len(ids))
                row_of[number] = row
            left, at = iter(texts.values()), device * count
            runs = shared_prefixes([*texts.values()], most, config.chunk)
            for run, (members, prefix) in enumerate(runs):
                inputs.prefix_lengths[device * most + run] = prefix
                for prompt in itertools.islice(left, members):
                    inputs.prefixes[device * most + run, :prefix] = prompt[:prefix]
                    inputs.lengths[at] = length = len(prompt) - prefix
                    inputs.tokens[at, :length] = prompt[prefix:]
                    inputs.prefix_of[at] = run
                    at += 1
        drawn: _Drawn = jax.device_get(self._program(params, inputs))
        results = []
        for number in range(len(requests)):
            row = row_of[number]
            ids, log_probs = (
                leaf[row, : drawn.counts[row]] for leaf in (drawn.ids, drawn.log_probs)
            )
            if not np.isfinite(log_probs).all():
                raise InputError(
                    "the language model gives logits that are not numbers: its weights "
                    "(config.model.path) hold NaN, or its activations overflow; use weights that "
                    "are finite, or set config.model.dtype to float32."
                )
            results.append(Sampled(ids, log_probs, STOP if drawn.stopped[row] else LENGTH))
        return results


class RoundSampler:
    """A device sampler with the weights that it samples by; see `trajectories.Sampler`."""

    in_rounds, version = True, ""

    def __init__(self, sampler: DeviceSampler, params: Params | Adapted) -> None:
        self._sampler, self._params = sampler, params

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled]]:
        done: list[Future[Sampled]] = [Future() for _ in requests]
        drawn = self._sampler.sample(self._params, requests)
        for future, sampled in zip(done, drawn, strict=True):
            future.set_result(sampled)
        return done

    def read(self, request: SampleRequest, result: Sampled) -> Sampled:
        return result


class Inputs(NamedTuple):
    """G prefixes, U prompts and B rows."""

    prefixes: Any  # `[G, P]`
    prefix_lengths: Any  # `[G]`, 0 for none
    tokens: Any  # `[U, P]`, what follows the prefix in a prompt
    lengths: Any  # `[U]`, 0 for no prompt
    prefix_of: Any  # `[U]`, a prompt's prefix among its device's
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


def _program(
    model: LanguageModel, config: SamplingConfig, mesh: Mesh | None
) -> Callable[[Params | Adapted, Inputs], _Drawn]:
    trunk, run = model.trunk, partial(_sampled, model, config)
    shardings = options = None
    if mesh is not None:
        # XLA would also compute products by two equal blocks of the cache as one, of their copy.
        options = compiler_options(mesh, adapters=True)
    if mesh is not None and mesh.size > 1:
        shardings = NamedSharding(mesh, PartitionSpec())
        by_row = PartitionSpec(AXES)
        # Parameters are gathered as they are used, once for all tokens.
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(PartitionSpec(), by_row), out_specs=by_row, check_vma=False
        )

    def sampled(params: Params | Adapted, inputs: Inputs) -> _Drawn:
        whole = attach(params, model.lora_scale)
        return run(trunk.prepare(whole, trunk.precision.products), inputs)

    return jax.jit(sampled, out_shardings=shardings, compiler_options=options)


def _sampled(
    model: LanguageModel, config: SamplingConfig, prepared: Params, inputs: Inputs
) -> _Drawn:
    trunk = model.trunk
    head = model.head(prepared).astype(trunk.precision.products)
    cache, hidden = _read(model, config, prepared, inputs)
    rows, room = len(inputs.source), config.room
    ids, log_probs = (jnp.zeros((rows, room), dtype) for dtype in (jnp.int32, jnp.float32))
    drawn = _Drawn(ids, log_probs, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))
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

    of_rows, stages = _stages(trunk, prepared, cache, inputs.source)
    start = of_rows, hidden[inputs.source], inputs.keys, inputs.most
    return to_the_end(_Loop(*start, drawn), stages)


def _stages(
    trunk: Transformer, prepared: Params, cache: Cache, source: jax.Array
) -> tuple[Cache | DecodeCache, Sequence[tuple[int, _Append]]]:
    """The cache of the rows, and how tokens are appended while they stand before some place."""
    if trunk.scanned:
        of_rows, layers = decode_cache(cache, source), layers_of(trunk, prepared)
        return of_rows, [
            (end, partial(append, (trunk, prepared, layers, blocks)))
            for blocks, end in enumerate(of_rows.ends, 1)
        ]

    def append_one(words: jax.Array, is_new: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        hidden, cache = extend(trunk, prepared, words[:, None], is_new.astype(jnp.int32), cache)
        return hidden[:, 0], cache

    return cache.rows(source), [(cache.room, append_one)]


def _read(
    model: LanguageModel, config: SamplingConfig, prepared: Params, inputs: Inputs
) -> tuple[Cache, jax.Array]:
    """The cache of all prompts, and the hidden states `[U, H]` of their last tokens."""
    trunk, chunk = model.trunk, config.chunk

    def read(cache: Cache, tokens: jax.Array, lengths: jax.Array) -> tuple[Cache, jax.Array]:
        """Appends tokens `[n, P]` to a cache of n rows, a part at a time."""

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

    empty = empty_cache(trunk, len(inputs.prefixes), config.room)
    shared, _ = read(empty, inputs.prefixes, inputs.prefix_lengths)
    return read(shared.rows(inputs.prefix_of), inputs.tokens, inputs.lengths)


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
