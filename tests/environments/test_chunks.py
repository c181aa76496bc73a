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
import tokenizers

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
        self.plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer = TextTokenizer.load(folder)
        self.encoder = rows_of((tokenizer.cls_id,), tokenizer.sep_id, tokenizer.pad_id)
        limits = {"max_question_tokens": 10_000, "max_chunk_tokens": 10_000}
        store = tokenise(SAMPLES, tokenizer, **limits, cache=folder / "cache")
        shape = EpisodeShape.holding([store])
        (self.batch,) = evaluation_batches(store, shape, len(SAMPLES), range(len(SAMPLES)))

    def ids(self, text: str) -> list[int]:
        return self.plain.encode(text).ids


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Texts:
    return Texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("sort_by_index", [False, True])
def test_rows_are_the_tokens_of_the_joined_text(texts: Texts, sort_by_index: bool) -> None:
    settings = {"chunk_tokens": 10_000, "sort_by_index": sort_by_index}
    rows = jax.jit(partial(env.state_rows, encoder=texts.encoder, **settings))
    for order in ([0, 1, 2, 3], [4, 2, 0], [3], [1, 0], []):
        orders = order, [i for i in order if i < 2]
        taken = np.array([one + [env.NOT_TAKEN] * (4 - len(one)) for one in orders], np.int32)
        tokens, lengths = map(np.asarray, rows(texts.batch, taken))
        for row, length, sample, one in zip(tokens, lengths, SAMPLES, orders, strict=True):
            shown = [sample.chunks[i] for i in (sorted(one) if sort_by_index else one)]
            assert row[:length].tolist() == texts.ids(" [SEP] ".join([sample.question, *shown]))
            assert (row[length:] == texts.encoder.pad_id).all()
    tokens, lengths = map(np.asarray, env.chunk_rows(texts.batch, texts.encoder, row_tokens=10_000))
    for b, sample in enumerate(SAMPLES):
        for i, chunk in enumerate(sample.chunks):
            assert tokens[b, i, : lengths[b, i]].tolist() == texts.ids(chunk)
            assert (tokens[b, i, lengths[b, i] :] == texts.encoder.pad_id).all()
        assert (lengths[b, len(sample.chunks) :] == 0).all()


@pytest.mark.parametrize(("opening", "kept"), [((), 3), ((2, 7, 8), 4)])
def test_rows_open_as_the_encoder_asks_and_each_part_is_cut_alone(texts, opening, kept) -> None:
    form = rows_of(opening, texts.encoder.sep_id, texts.encoder.pad_id)
    taken = np.array([[2, 0], [1, env.NOT_TAKEN]], np.int32)
    tokens, lengths = jax.jit(
        partial(env.state_rows, encoder=form, chunk_tokens=kept, sort_by_index=False)
    )(texts.batch, taken)
    width = env.state_width(len(opening), texts.batch.question.shape[1], kept, 2)
    assert tokens.shape[1] == width
    most = len(opening) + 1 + kept
    rows, row_lengths = env.chunk_rows(texts.batch, form, row_tokens=most)
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
    relative = jax.jit(positions.relative)
    for taken, count in (([], 50), ([9, 4], 10), ([0, 1, 2], 3), ([5, 30, 6], 99)):
        padded = jnp.asarray([*taken, *[-1] * (6 - len(taken))])
        got = relative(jnp.arange(count), padded, jnp.int32(count))
        assert got.tolist() == relative_positions(taken, count)
    rng = np.random.default_rng(0)
    chunks = np.array([40, 23])
    taken = np.array([[7, -1, 21], [-1, -1, 3]])
    index = jnp.asarray(rng.integers(0, 23, size=(2, 5)))
    got = positions.relative(index, jnp.asarray(taken), jnp.asarray(chunks))
    for row in range(2):
        whole = relative_positions([t for t in taken[row] if t >= 0], chunks[row])
        assert got[row].tolist() == [whole[i] for i in index[row].tolist()]


def test_absolute_counts_and_random_indents_leave_gaps():
    assert positions.absolute(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2
    drawn = positions.absolute(jax.random.split(jax.random.key(0), 3), 3, 200)
    assert (drawn[:, 0] == 0).all()
    gaps = np.diff(np.asarray(drawn), axis=1)
    assert set(np.unique(gaps)) == set(range(1, positions.MOST_INDENT + 1))
    assert (drawn[0] != drawn[1]).any()
    assert int(drawn.max()) <= positions.last_position("random", 200, 2)
    assert positions.last_position("absolute", 200, 2) == 199
    assert positions.last_position("none", 200, 2) == 0


@pytest.mark.parametrize("chunks", [1, 6, 2000])
def test_published_indents_move_five_parts(chunks: int) -> None:
    last = positions.last_position("random_published", chunks, 2)
    assert last == 1999
    keys = jax.random.split(jax.random.key(chunks), 20)
    indents = positions.draw_indents(keys, jnp.full(20, chunks))
    for place in indents.positions(np.arange(chunks)[None].repeat(20, 0)).tolist():
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
