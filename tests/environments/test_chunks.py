"""Rows of tokens against a tokenizer that reads the joined text; steps; positions."""

from __future__ import annotations

import types
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from qrag_jax.data.episodes import EpisodeShape, evaluation_batches
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, tokenise
from qrag_jax.environments import chunks as env
from qrag_jax.environments import positions
from qrag_jax.models.first_encoder import ScratchConfig, make_scratch_folder
from tests.reference import relative_positions

SIZES = ScratchConfig(layers=1, hidden=16, heads=2, vocab=300, positions=64)
CHUNKS = (
    "Dusk: Dusk is a painting by Ada Berg, 1901.",
    "Ada Berg was a painter; she was born in Oslo.",
    "Été à Oslo (1950) is a film — unrelated.",
    "",
    "Dawn",
)
SAMPLES = [
    Sample("a", "Where was the painter of Dusk born?", CHUNKS, (0, 1), ("Oslo",), "made"),
    Sample("b", "Who?", ("It was Ada Berg's sister.", "Bergen"), (0,), (), "made"),
]


def rows_of(opening: tuple[int, ...], sep_id: int, pad_id: int) -> Any:
    """What rows take of an encoder."""
    return types.SimpleNamespace(
        state_opening=opening, chunk_opening=opening, sep_id=sep_id, pad_id=pad_id
    )


class Texts:
    """Samples as a batch, and the plain tokenizer that the batch's rows are compared with."""

    def __init__(self, folder: Path) -> None:
        said = [text for s in SAMPLES for text in (s.question, *s.chunks)]
        make_scratch_folder(folder, said, SIZES, seed=0)
        plain, tokenizer = AutoTokenizer.from_pretrained(folder), TextTokenizer.load(folder)
        self.ids = plain.encode
        self.encoder = rows_of((tokenizer.cls_id,), tokenizer.sep_id, tokenizer.pad_id)
        limits = {"max_question_tokens": 10_000, "max_chunk_tokens": 10_000}
        store = tokenise(SAMPLES, tokenizer, **limits, cache=folder / "cache")
        shape = EpisodeShape.holding([store])
        (self.batch,) = evaluation_batches(store, shape, len(SAMPLES), range(len(SAMPLES)))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Texts:
    return Texts(tmp_path_factory.mktemp("texts"))


def test_sorted_rows_are_the_tokens_of_the_joined_text(texts: Texts) -> None:
    settings = {"chunk_tokens": 10_000, "sort_by_index": True}
    rows = jax.jit(partial(env.state_rows, encoder=texts.encoder, **settings))
    for order in ([4, 2, 0], [3], [1, 0], []):
        orders = order, [i for i in order if i < 2]
        taken = np.array([one + [env.NOT_TAKEN] * (4 - len(one)) for one in orders], np.int32)
        tokens, lengths = map(np.asarray, rows(texts.batch, taken))
        for row, length, sample, one in zip(tokens, lengths, SAMPLES, orders, strict=True):
            shown = [sample.chunks[i] for i in sorted(one)]
            assert row[:length].tolist() == texts.ids(" [SEP] ".join([sample.question, *shown]))
            assert (row[length:] == texts.encoder.pad_id).all()
    rows = jax.jit(partial(env.chunk_rows, encoder=texts.encoder, row_tokens=10_000))
    tokens, lengths = map(np.asarray, rows(texts.batch))
    for b, sample in enumerate(SAMPLES):
        for i, chunk in enumerate(sample.chunks):
            assert tokens[b, i, : lengths[b, i]].tolist() == texts.ids(chunk)
            assert (tokens[b, i, lengths[b, i] :] == texts.encoder.pad_id).all()
        assert (lengths[b, len(sample.chunks) :] == 0).all()


@pytest.mark.parametrize("opening", [(), (2, 7, 8)])
def test_rows_open_as_the_encoder_asks_and_parts_are_cut_alone(texts, opening) -> None:
    kept = 3
    form = rows_of(opening, texts.encoder.sep_id, texts.encoder.pad_id)
    most = len(opening) + 1 + kept
    taken = np.array([[2, 0], [1, env.NOT_TAKEN]], np.int32)

    @jax.jit
    def both(batch: Any, taken: Any) -> Any:
        states = env.state_rows(batch, taken, form, chunk_tokens=kept, sort_by_index=False)
        return states, env.chunk_rows(batch, form, row_tokens=most)

    (tokens, lengths), (rows, row_lengths) = both(texts.batch, taken)
    assert tokens.shape[1] == env.state_width(len(opening), texts.batch.question.shape[1], kept, 2)
    assert rows.shape[2] <= most
    for b, sample in enumerate(SAMPLES):
        parts = [[*texts.ids(chunk)[1:-1][:kept], form.sep_id] for chunk in sample.chunks]
        expected = [*opening, *texts.ids(sample.question)[1:]]
        expected += [token for i in taken[b][taken[b] >= 0] for token in parts[i]]
        assert np.asarray(tokens)[b, : lengths[b]].tolist() == expected
        assert (np.asarray(tokens)[b, lengths[b] :] == form.pad_id).all()
        for i, part in enumerate(parts):
            assert np.asarray(rows)[b, i, : row_lengths[b, i]].tolist() == [*opening, *part]


def test_relative_is_as_defined_also_of_a_slice_and_of_a_batch():
    index = np.random.default_rng(0).integers(0, 99, (4, 200))
    cases = ([], 50), ([9, 4], 10), ([0, 1, 2], 3), ([5, 30, 6], 99)
    taken = np.array([[*each, *[-1] * (6 - len(each))] for each, _ in cases])
    chunks = np.array([count for _, count in cases])
    index %= chunks[:, None]
    relative = jax.jit(positions.relative)
    batched = relative(*map(jnp.asarray, (index, taken, chunks)))
    for row, (each, count) in enumerate(cases):
        whole = relative_positions(each, count)
        assert batched[row].tolist() == [whole[i] for i in index[row]]
        found = relative(jnp.arange(99), jnp.asarray(taken[row]), jnp.int32(count))
        assert found[:count].tolist() == whole


def test_absolute_counts_and_random_indents_leave_gaps():
    assert positions.absolute(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2
    drawn = positions.absolute(jax.random.split(jax.random.key(0), 3), 3, 200)
    assert (drawn[:, 0] == 0).all()
    gaps = np.diff(np.asarray(drawn), axis=1)
    assert set(np.unique(gaps)) == set(range(1, positions.MOST_INDENT + 1))
    assert (drawn[0] != drawn[1]).any()
    assert int(drawn.max()) <= positions.last_position("random", 200, 2)


@pytest.mark.parametrize("chunks", [1, 6])
def test_published_indents_move_five_parts(chunks: int) -> None:
    @jax.jit
    def drawn(keys: jax.Array) -> jax.Array:
        index = jnp.arange(chunks)[None].repeat(20, 0)
        return positions.draw_indents(keys, jnp.full(20, chunks)).positions(index)

    last = positions.last_position("random_published", chunks, 2)
    assert last == 1999
    for place in drawn(jax.random.split(jax.random.key(chunks), 20)).tolist():
        gaps = np.diff(place)
        assert (gaps >= 1).all()
        assert 0 <= place[0] < max(2000 - chunks, 1)
        assert place[-1] - (chunks - 1) < max(2000 - chunks, 1)
        assert place[-1] <= last
        # A part begins at four chunks at most, none of them the first or the last one.
        assert np.count_nonzero(gaps > 1) <= min(4, max(chunks - 2, 0))
        assert chunks < 3 or gaps[-1] == 1


def test_the_keys_of_an_evaluation_are_those_of_the_question() -> None:
    rows = np.array([[5, 6, 7, 0], [5, 6, 8, 0], [7, 6, 5, 0], [5, 6, 7, 9], [5, 6, 0, 0]])
    lengths = np.array([3, 3, 3, 3, 2])
    keys = jax.random.key_data(positions.evaluation_keys(rows, lengths)).tolist()
    wider = np.pad(rows, ((0, 0), (0, 3)), constant_values=1)
    assert jax.random.key_data(positions.evaluation_keys(wider, lengths)).tolist() == keys
    assert keys[0] == keys[3]  # what lies beyond is not read
    assert len({tuple(key) for key in keys}) == 4
