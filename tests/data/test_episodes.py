"""From texts to batches: tokens and their cache, episodes, workers, documents drawn each epoch.

Orders, resuming and parts of hosts: tests/conformance/test_sources.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from absl import flags
from tokenizers import models, normalizers, pre_tokenizers, processors

from qrag_jax.data import episodes
from qrag_jax.data.loading import DataConfig, truncation_report
from qrag_jax.data.long_docs import BabilongConfig, NiahConfig, babilong_documents, niah_documents
from qrag_jax.data.sample import LazySamples, Sample, drawn
from qrag_jax.data.tokens import TextTokenizer, TokenStore, tokenise
from qrag_jax.errors import InputError
from tests.entry_points import wait_until
from tests.episodes_maker import random_store
from tests.llm.stand_in import running

# ---------------------------------------------------------------- tokens

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", "cls", "sep", "mask", "unk"]
PIECES += ["a", "b", "c", "d", "e", "##a", "##b", "##c", "pad", "?", "."]
NAMES = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
SAMPLES = [
    Sample("1", "a b c?", ("a", "", "b b. c d e a b", "c"), (0, 2), ("x",), "made"),
    Sample("2", "d", ("e e e", "aab cab"), (1,), (), "made"),
    Sample("3", "a b c d e a", ("a.",), (0,), (), "made"),
]


def write_tokenizer(folder: Path, names: dict[str, str] = NAMES, words: Iterable[str] = ()) -> Path:
    """A WordPiece tokenizer with BERT's post-processor, which knows further words, too."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*PIECES, *words]))}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(PIECES[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.load(write_tokenizer(tmp_path / "model"))


def read(samples, tokenizer, cache: Path, question: int = 100, chunk: int = 100) -> TokenStore:
    limits = {"max_question_tokens": question, "max_chunk_tokens": chunk}
    return tokenise(samples, tokenizer, **limits, cache=cache)


def spell(tokens) -> list[str]:
    return [PIECES[token] for token in tokens]


def test_texts_are_encoded_without_special_tokens_truncation_or_padding(tmp_path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    loaded = TextTokenizer.load(folder)
    assert (loaded.pad_id, loaded.cls_id, loaded.sep_id) == (0, 2, 3)
    row, *short = loaded.encode(["a [SEP] b [CLS] [MASK] [PAD]", "a bb?", "", "zebra"])
    assert not {0, 2, 3, 4} & set(row)
    assert " ".join(spell(row)) == "a [ sep ] b [ cls ] [ mask ] [ pad ]"
    assert [*map(spell, short)] == [["a", "b", "##b", "?"], [], ["[UNK]"]]


def test_truncation_is_counted_and_named(tokenizer, tmp_path) -> None:
    store = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)
    assert store.question_lengths.tolist() == [4, 1, 4]
    assert store.chunk_lengths.tolist() == [1, 0, 3, 1, 3, 3, 2]
    assert spell(store.text(store.sample_starts[0] + 3)) == ["b", "b", "."]
    again = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)  # from the cache
    for each in (store, again):
        assert (each.truncated_questions, each.truncated_chunks) == (1, 2)
    # A row has two special tokens; a state holds ten tokens of a chunk, which no chunk exceeds.
    for row, cut in ((12, 0), (5, 2)):
        config = DataConfig(max_chunk_tokens=row, max_chunk_tokens_in_state=10, cache=str(tmp_path))
        store = config.tokenised(SAMPLES, tokenizer)
        report = truncation_report(store, config, tokenizer)
        assert ("config.data.max_chunk_tokens" in report) == (cut > 0)


def test_anything_that_matters_makes_another_entry(tokenizer, tmp_path) -> None:
    # What a sample is called does not matter to its tokens.
    renamed = [dataclasses.replace(s, id=s.id + "x", answers=("y",)) for s in SAMPLES]
    stores = [read(samples, tokenizer, tmp_path) for samples in (SAMPLES, SAMPLES, renamed)]
    assert len({store.folder for store in stores}) == 1
    assert stores[2].chunk_lengths.tolist() == [1, 0, 8, 1, 3, 6, 2]
    changes = [
        {"question": "a b c"},
        {"chunks": ("a", "b b. c d e a b", "c"), "support": (0, 1)},
        {"support": (0, 3)},
    ]
    for change in changes:
        read([dataclasses.replace(SAMPLES[0], **change), *SAMPLES[1:]], tokenizer, tmp_path)
    read(SAMPLES[::-1], tokenizer, tmp_path)
    read(SAMPLES, tokenizer, tmp_path, question=99)
    read(SAMPLES, tokenizer, tmp_path, chunk=99)
    assert len([*(tmp_path / "tokens").iterdir()]) == 7


def test_rows_without_an_opening_token(tmp_path: Path) -> None:
    """Of a family like Qwen3: the text's own end, which need not be the tokenizer's eos_token."""
    special = {"pad_token": "[PAD]", "eos_token": "[MASK]", "cls_token": "[CLS]"}
    folder = write_tokenizer(tmp_path / "model", special)
    tokenizer = TextTokenizer.load(folder, opens_rows=False)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (None, 3, 0)
    assert TextTokenizer.load(folder).sep_id == 4  # eos separates where there is no sep
    data = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert spell([TextTokenizer.load(folder, opens_rows=False).sep_id]) == ["[MASK]"]


def test_tokenizers_that_are_refused(tmp_path: Path) -> None:
    names = {name: token for name, token in NAMES.items() if name != "sep_token"}
    folder = write_tokenizer(tmp_path / "model", names)
    with pytest.raises(InputError, match=r"sep_token.*tokenizer_config\.json"):
        TextTokenizer.load(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(InputError, match=re.escape(str(folder))):
        TextTokenizer.load(folder)


def test_a_full_disk_is_an_error_with_the_field(tokenizer, full_disk: Path) -> None:
    texts = tuple(f"a b c d {'e ' * 40}" for _ in range(20_000))
    samples = [Sample("1", "a", texts, (0,), (), "made")]
    with pytest.raises(InputError, match=r"config\.data\.cache"):
        read(samples, tokenizer, full_disk)
    assert not list((full_disk / "tokens").iterdir())


# ---------------------------------------------------------------- episodes

STORE, OTHER = random_store(0, 24, 1000), random_store(1, 10, 5000)
SHAPE = episodes.EpisodeShape.holding([STORE, OTHER])


@pytest.fixture(autouse=True)
def _flags() -> None:
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags; under app.run they are parsed


def test_episodes_are_the_samples_padded() -> None:
    (batch,) = episodes.evaluation_batches(STORE, SHAPE, 25, range(24))
    for field, empty in zip(batch, episodes.empty_episode(SHAPE), strict=True):
        np.testing.assert_array_equal(field[24], empty)  # which fills up the batch
    most = max(int(store.chunk_counts.max()) for store in (STORE, OTHER))
    assert SHAPE.chunks == most  # no more than needed
    assert batch.chunks.shape == (25, SHAPE.chunks, SHAPE.chunk_tokens)
    for index in range(24):
        episode = episodes.EpisodeBatch(*(field[index] for field in batch))
        first, end = STORE.sample_starts[index], STORE.sample_starts[index + 1]
        rows = [(episode.question, episode.question_length)]
        rows += [*zip(episode.chunks, episode.chunk_lengths, strict=True)]
        for place, (row, length) in enumerate(rows):
            text = STORE.text(first + place) if first + place < end else np.zeros(0)
            assert int(length) == len(text)
            np.testing.assert_array_equal(row, np.pad(text, (0, len(row) - len(text))))
        assert np.flatnonzero(episode.chunk_mask).tolist() == [*range(end - first - 1)]
        assert np.flatnonzero(episode.support).tolist() == STORE.support_of(index).tolist()
        assert int(episode.sample) == index
    # The order of facts is kept where it is known.
    facts = STORE.support_of(2).tolist()
    ordered = episodes.episode(STORE, SHAPE, 2, ordered=True).rank
    assert [int(ordered[place]) for place in facts] == [0, 1]
    assert [int(batch.rank[2, place]) for place in facts] == [0, 0]
    with pytest.raises(InputError, match=r"config\.env\.max_steps"):
        episodes.check_steps(most + 1, {"one": STORE, "other": OTHER})


# ---------------------------------------------------------------- worker processes

WITH_WORKERS = """
import multiprocessing, sys
from absl import flags
from qrag_jax.data.episodes import EpisodeShape, training_batches
from tests.episodes_maker import random_store

if __name__ == "__main__":
    flags.FLAGS(sys.argv[:1])
    store = random_store(0, 24)
    shape = EpisodeShape.holding([store])
    how = {"batch_size": 4, "seed": 0, "workers": 2}
    batches = training_batches({"one": store}, {"one": 1.0}, shape, **how)
    while True:
        next(batches)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        sys.stdin.readline()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux shows which signals are ignored")
def test_workers_live_exactly_as_long_as_their_trainer(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITH_WORKERS)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command, pipe = [sys.executable, tmp_path / "program.py"], subprocess.PIPE
    trainer = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)
    assert trainer.stdin is not None
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    # The first batch may be there before the second worker has begun.
    wait_until(lambda: all(map(ignores_sigterm, workers)))
    # What a scheduler or a closing terminal sends to all of a run is for the trainer alone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for pid in workers:
            os.kill(pid, number)
    for _ in range(6):  # more than what is built ahead
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert [int(pid) for pid in trainer.stdout.readline().split()] == workers
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(map(running, workers)))


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in status if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


# ---------------------------------------------------------------- documents

STORIES = BabilongConfig("qa2", chunks=32, train=10)  # so that all of them fit
NEEDLES = NiahConfig("multivalue", chunks=24, train=6)


def samples(config: BabilongConfig | NiahConfig) -> Any:
    if isinstance(config, BabilongConfig):
        return babilong_documents(config, "train").samples
    return niah_documents(config, "train").samples


@pytest.fixture(scope="module")
def of_words(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A tokenizer of the documents' words."""
    texts = [text.lower() for sample in samples(STORIES) for text in sample.chunks]
    words = sorted({word for text in texts for word in re.findall(r"\w+", text)})
    return TextTokenizer.load(write_tokenizer(tmp_path_factory.mktemp("model"), words=words))


def tokens(config: BabilongConfig | NiahConfig, tokenizer: TextTokenizer, most: int = 9) -> Any:
    most_tokens = {"max_question_tokens": 12, "max_chunk_tokens": most}
    cache = Path(os.environ["QRAG_CACHE"])
    return tokenise(samples(config), tokenizer, **most_tokens, cache=cache)


@pytest.fixture(scope="module")
def stores(of_words: TextTokenizer) -> dict[str, TokenStore]:
    return {"babilong": tokens(STORIES, of_words), "niah": tokens(NEEDLES, of_words, 40)}


def test_tokens_are_those_of_the_texts(stores, of_words) -> None:
    for config, store, most in ((STORIES, stores["babilong"], 9), (NEEDLES, stores["niah"], 40)):
        for index in range(len(store)):
            for epoch in (0, 7):
                sample = drawn(samples(config), index, epoch)
                question, chunks, support = store.document(index, epoch)
                assert question.tolist() == of_words.encode([sample.question])[0][:12]
                texts = [ids[:most] for ids in of_words.encode(sample.chunks)]
                assert [chunk.tolist() for chunk in chunks] == texts
                assert tuple(support.tolist()) == sample.support


def test_what_is_kept_does_not_grow_with_documents(of_words, stores) -> None:
    store = stores["babilong"]
    longer = tokens(dataclasses.replace(STORIES, chunks=400), of_words)
    # A worker gets the places where files are mapped from, and how to draw; no texts, no tokens.
    assert len(pickle.dumps(store)) < 10_000
    # The key says how documents are drawn.
    assert tokens(STORIES, of_words).content_key == store.content_key
    keys = {store.content_key, stores["niah"].content_key, longer.content_key}
    for change in ({"seed": 1}, {"noise_repeats": 0}):
        keys.add(tokens(dataclasses.replace(STORIES, **change), of_words).content_key)
    assert len(keys) == 5


def test_a_lazy_document_is_made_once(of_words: TextTokenizer, tmp_path: Path) -> None:
    made: list[int] = []

    def make(index: int) -> Sample:
        made.append(index)
        return Sample(f"{index}", "Where is Nora?", ("Nora took the basket.",), (0,), (), "")

    limits = {"max_question_tokens": 12, "max_chunk_tokens": 9}
    tokenise(LazySamples(600, make), of_words, **limits, cache=tmp_path)
    assert made == [*range(600)]


def test_workers_draw_the_same_documents_over_the_border_of_an_epoch(stores) -> None:
    """Threads or processes, resumed or not."""
    weights = {"babilong": 0.75, "niah": 0.25}
    shape = episodes.EpisodeShape.holding([*stores.values()])

    def batches(**how: Any) -> Any:
        return episodes.training_batches(stores, weights, shape, batch_size=4, seed=3, **how)

    plain, iterator, resumed = batches(), batches(workers=2), batches(workers=2)
    every = [next(plain) for _ in range(8)]
    assert {int(epoch) for batch in every for epoch in batch.epoch} >= {0, 1, 2}
    later = next(batches(skipped=6))
    np.testing.assert_array_equal(later.sample[:2], every[1].sample[2:])
    np.testing.assert_array_equal(later.sample[2:], every[2].sample[:2])
    first = next(iterator)
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    for batch, other in zip(every, [first, *(next(resumed) for _ in range(7))]):
        for field, value in zip(batch, other, strict=True):
            np.testing.assert_array_equal(field, value)
