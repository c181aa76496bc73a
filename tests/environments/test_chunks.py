"""Rows of tokens against a tokenizer that reads the joined text, and what a step does."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, evaluation_batches
from qrag_jax.data.files.records import read_records
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import hotpotqa
from qrag_jax.data.tokens import TextTokenizer, tokenise
from qrag_jax.environments import chunks as env
from tests.data.real_data import real

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SAMPLES = [
    Sample(
        id="a",
        question="Where was the painter of Dusk born?",
        chunks=(
            "Dusk: Dusk is a painting by Ada Berg, 1901.",
            "Ada Berg was a painter; she was born in Oslo.",
            "Été à Oslo (1950) is a film — unrelated.",
            "",
            "Dawn",
        ),
        support=(0, 1),
        answers=("Oslo",),
        source="made",
    ),
    Sample("b", "Who?", ("It was Ada Berg's sister.", "Bergen"), (0,), (), "made"),
]


def write_wordpiece(folder: Path, texts: list[str]) -> None:
    """A WordPiece tokenizer that puts [CLS] and [SEP] around a text, as BERT's does."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Texts:
    """Samples as a batch, and the plain tokenizer that the batch's rows are held against."""

    def __init__(self, samples: list[Sample], folder: Path, most: int = 10_000) -> None:
        write_wordpiece(folder, [text for s in samples for text in (s.question, *s.chunks)])
        self.samples = samples
        self.plain = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer = TextTokenizer.load(folder)
        self.form = env.RowForm((tokenizer.cls_id,), tokenizer.sep_id, tokenizer.pad_id)
        store = tokenise(
            samples,
            tokenizer,
            max_question_tokens=most,
            max_chunk_tokens=most,
            cache=folder / "cache",
        )
        shape = EpisodeShape.holding([store])
        (self.batch,) = evaluation_batches(store, shape, len(samples), range(len(samples)))

    def ids(self, text: str) -> list[int]:
        return self.plain.encode(text).ids

    def state_texts(self, taken: np.ndarray, sort_by_index: bool) -> list[str]:
        texts = []
        for sample, row in zip(self.samples, taken, strict=True):
            shown = [i for i in row if i != env.NOT_TAKEN]
            shown = sorted(shown) if sort_by_index else shown
            texts.append(" [SEP] ".join([sample.question, *(sample.chunks[i] for i in shown)]))
        return texts


def random_taken(rng: np.random.Generator, samples: list[Sample], steps: int) -> np.ndarray:
    taken = np.full((len(samples), steps), env.NOT_TAKEN, np.int32)
    for row, sample in zip(taken, samples, strict=True):
        count = rng.integers(0, min(steps, len(sample.chunks)) + 1)
        row[:count] = rng.permutation(len(sample.chunks))[:count]
    return taken


def check_state_rows(texts: Texts, taken: np.ndarray, sort_by_index: bool) -> None:
    tokens, lengths = env.state_rows(
        texts.batch, taken, texts.form, chunk_tokens=10_000, sort_by_index=sort_by_index
    )
    width = texts.batch.question.shape[1], texts.batch.chunks.shape[2], taken.shape[1]
    assert tokens.shape[1] == env.state_width(1, *width)
    expected = texts.state_texts(taken, sort_by_index)
    for row, length, text in zip(np.asarray(tokens), np.asarray(lengths), expected, strict=True):
        assert row[:length].tolist() == texts.ids(text)
        assert (row[length:] == texts.form.pad_id).all()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Texts:
    return Texts(SAMPLES, tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory) -> Texts:
    records = read_records(real("hotpotqa/dev.jsonl.gz"))
    samples = [hotpotqa.parse(record) for _, (_, record) in zip(range(12), records)]
    return Texts(samples, tmp_path_factory.mktemp("hotpot"))


@pytest.mark.parametrize("sort_by_index", [False, True])
def test_state_rows_are_the_tokens_of_the_joined_text(made, sort_by_index) -> None:
    orders = [[0, 1, 2, 3], [4, 2, 0], [3], [1, 0], []]
    for order in orders:
        first = order + [env.NOT_TAKEN] * (4 - len(order))
        second = [i for i in order if i < 2]
        second += [env.NOT_TAKEN] * (4 - len(second))
        check_state_rows(made, np.array([first, second], np.int32), sort_by_index)


@pytest.mark.parametrize("sort_by_index", [False, True])
def test_state_rows_of_hotpotqa(hotpot, sort_by_index) -> None:
    rng = np.random.default_rng(0)
    for steps in (5, 0):
        check_state_rows(hotpot, random_taken(rng, hotpot.samples, steps), sort_by_index)


def check_chunk_rows(texts: Texts) -> None:
    tokens, lengths = env.chunk_rows(texts.batch, texts.form, row_tokens=10_000)
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    for b, sample in enumerate(texts.samples):
        for i, chunk in enumerate(sample.chunks):
            assert tokens[b, i, : lengths[b, i]].tolist() == texts.ids(chunk)
            assert (tokens[b, i, lengths[b, i] :] == texts.form.pad_id).all()
        assert (lengths[b, len(sample.chunks) :] == 0).all()


def test_chunk_rows_are_the_tokens_of_the_chunks(made) -> None:
    check_chunk_rows(made)


def test_chunk_rows_of_hotpotqa(hotpot) -> None:
    check_chunk_rows(hotpot)


@pytest.mark.parametrize("kept", [1, 3, 7])
@pytest.mark.parametrize("name", ["made", "hotpot"])
def test_truncation_cuts_each_part_on_its_own(name, kept, request) -> None:
    texts = request.getfixturevalue(name)
    taken = random_taken(np.random.default_rng(kept), texts.samples, 3)
    tokens, lengths = env.state_rows(
        texts.batch, taken, texts.form, chunk_tokens=kept, sort_by_index=False
    )
    (cls_id,), sep_id, _ = texts.form
    for b, sample in enumerate(texts.samples):
        expected = texts.ids(sample.question)
        for i in taken[b][taken[b] >= 0]:
            expected += [*texts.ids(sample.chunks[i])[1:-1][:kept], sep_id]
        assert np.asarray(tokens)[b, : lengths[b]].tolist() == expected
    rows, row_lengths = env.chunk_rows(texts.batch, texts.form, row_tokens=kept + 2)
    assert rows.shape[2] <= kept + 2
    for b, sample in enumerate(texts.samples):
        for i, chunk in enumerate(sample.chunks):
            expected = [cls_id, *texts.ids(chunk)[1:-1][:kept], sep_id]
            assert np.asarray(rows)[b, i, : row_lengths[b, i]].tolist() == expected


@pytest.mark.parametrize("opening", [(), (7,), (2, 7, 8)])
def test_rows_open_with_what_the_encoder_asks_for(made, opening) -> None:
    form = made.form._replace(opening=opening)
    taken = np.array([[2, 0], [1, env.NOT_TAKEN]], np.int32)[: len(made.samples)]
    tokens, lengths = env.state_rows(made.batch, taken, form, chunk_tokens=4, sort_by_index=False)
    kept = min(4, made.batch.chunks.shape[2])
    width = env.state_width(len(opening), made.batch.question.shape[1], kept, 2)
    assert tokens.shape[1] == width
    sep_id = form.sep_id
    for b, sample in enumerate(made.samples):
        expected = [*opening, *made.ids(sample.question)[1:]]
        for i in taken[b][taken[b] >= 0]:
            expected += [*made.ids(sample.chunks[i])[1:-1][:4], sep_id]
        assert np.asarray(tokens)[b, : lengths[b]].tolist() == expected
        assert (np.asarray(tokens)[b, lengths[b] :] == form.pad_id).all()
    rows, row_lengths = env.chunk_rows(made.batch, form, row_tokens=len(opening) + 4)
    assert rows.shape[2] <= len(opening) + 4
    for b, sample in enumerate(made.samples):
        for i, chunk in enumerate(sample.chunks):
            expected = [*opening, *made.ids(chunk)[1:-1][:3], sep_id]
            assert np.asarray(rows)[b, i, : row_lengths[b, i]].tolist() == expected


def test_rows_do_not_change_under_jit(made) -> None:
    taken = np.array([[2, 0], [1, env.NOT_TAKEN]], np.int32)
    settings = {"form": made.form, "chunk_tokens": 4, "sort_by_index": False}
    plain = env.state_rows(made.batch, taken, **settings)
    jitted = jax.jit(lambda batch, taken: env.state_rows(batch, taken, **settings))
    for one, other in zip(plain, jitted(made.batch, taken), strict=True):
        np.testing.assert_array_equal(one, other)


def document(chunk_counts: list[int], support: list[list[int]]) -> EpisodeBatch:
    """Episodes of which only the masks matter."""
    rows, chunks = len(chunk_counts), max(chunk_counts)
    mask = np.arange(chunks) < np.array(chunk_counts)[:, None]
    facts = np.zeros((rows, chunks), bool)
    for row, indices in zip(facts, support, strict=True):
        row[indices] = True
    return EpisodeBatch(
        question=np.zeros((rows, 1), np.int32),
        question_length=np.zeros(rows, np.int32),
        chunks=np.zeros((rows, chunks, 1), np.int32),
        chunk_lengths=np.zeros((rows, chunks), np.int32),
        chunk_mask=mask,
        rank=facts.astype(np.int32) - 1,
        sample=np.arange(rows, dtype=np.int32),
        epoch=np.zeros(rows, np.int32),
    )


def play(batch: EpisodeBatch, actions: list[list[int]], never_terminate: bool):
    """States after 0, 1, … steps; `actions[t]` holds one action an episode."""
    states = [env.reset(batch, len(actions))]
    for t, action in enumerate(actions):
        arguments = batch, jnp.array(action), jnp.int32(t)
        states.append(env.step(states[-1], *arguments, never_terminate=never_terminate))
    return states


def done(states) -> list[list[bool]]:
    return [np.asarray(state.done).tolist() for state in states]


def test_reset() -> None:
    batch = document([3, 0], [[1], []])
    state = env.reset(batch, 4)
    assert (np.asarray(state.taken) == env.NOT_TAKEN).all()
    assert state.taken.shape == (2, 4)
    np.testing.assert_array_equal(state.available, batch.chunk_mask)
    assert np.asarray(state.done).tolist() == [False, True]


def test_ends_after_max_steps() -> None:
    states = play(document([5], [[4]]), [[0], [3], [1]], never_terminate=True)
    assert done(states) == [[False], [False], [False], [True]]
    assert np.asarray(states[-1].taken).tolist() == [[0, 3, 1]]
    assert np.asarray(states[-1].available).tolist() == [[False, False, True, False, True]]


def test_ends_when_no_chunk_is_left_and_then_changes_no_more() -> None:
    states = play(document([2, 4], [[0], [0]]), [[1, 1], [0, 0], [0, 3], [1, 2]], True)
    assert [row[0] for row in done(states)] == [False, False, True, True, True]
    assert [row[1] for row in done(states)] == [False, False, False, False, True]
    assert np.asarray(states[-1].taken).tolist() == [[1, 0, -1, -1], [1, 0, 3, 2]]


@pytest.mark.parametrize("never_terminate", [False, True])
def test_ends_when_all_facts_are_found_unless_never_terminate(never_terminate) -> None:
    batch = document([4, 4], [[1, 3], [0, 2]])
    states = play(batch, [[1, 1], [3, 2], [0, 3]], never_terminate)
    if never_terminate:
        assert done(states) == [[False] * 2, [False] * 2, [False] * 2, [True] * 2]
    else:
        assert done(states) == [[False] * 2, [False] * 2, [True, False], [True] * 2]
        # What came after the end left no trace.
        assert np.asarray(states[-1].taken).tolist() == [[1, 3, -1], [1, 2, 3]]
        assert np.asarray(states[-1].available)[0].tolist() == [True, False, True, False]


@pytest.mark.parametrize("never_terminate", [False, True])
def test_without_known_facts_no_fact_ends_an_episode(never_terminate) -> None:
    states = play(document([3, 3], [[], [1]]), [[1, 1], [0, 0]], never_terminate)
    assert [row[0] for row in done(states)] == [False, False, True]
    assert [row[1] for row in done(states)] == [False, not never_terminate, True]
    assert np.asarray(states[-1].taken)[0].tolist() == [1, 0]


@pytest.mark.parametrize("never_terminate", [False, True])
def test_padding_episodes_have_ended_from_the_start(never_terminate) -> None:
    states = play(document([0, 3], [[], [2]]), [[0, 0], [1, 1]], never_terminate)
    assert [row[0] for row in done(states)] == [True, True, True]
    assert (np.asarray(states[-1].taken)[0] == env.NOT_TAKEN).all()
    assert not np.asarray(states[-1].available)[0].any()


@pytest.mark.parametrize("never_terminate", [False, True])
def test_random_episodes_against_sets(never_terminate) -> None:
    rng = np.random.default_rng(5)
    counts = [int(c) for c in rng.integers(1, 7, 20)]
    support = [sorted(rng.choice(c, min(2, c), replace=False).tolist()) for c in counts]
    batch, orders = document(counts, support), [rng.permutation(c) for c in counts]
    actions = [[int(order[t]) if t < len(order) else 0 for order in orders] for t in range(4)]
    states = play(batch, actions, never_terminate)
    for b, (count, facts, order) in enumerate(zip(counts, support, orders, strict=True)):
        taken: list[int] = []
        ended = False
        for t in range(4):
            if not ended:
                taken.append(int(order[t]))
                found = set(facts) <= set(taken)
                ended = t == 3 or len(taken) == count or (found and not never_terminate)
            state = states[t + 1]
            assert bool(state.done[b]) == ended
            assert np.asarray(state.taken[b]).tolist() == taken + [-1] * (4 - len(taken))
            left = set(range(count)) - set(taken)
            assert set(np.flatnonzero(state.available[b]).tolist()) == left
