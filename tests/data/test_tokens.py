"""Token stores: what they hold, what makes another entry of the cache, what survives faults."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from qrag_jax.data.config import DataConfig
from qrag_jax.data.loading import tokenise_samples, truncation_report
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, TokenStore, tokenise
from qrag_jax.errors import InputError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", "cls", "sep", "mask", "unk"]
PIECES += ["a", "b", "c", "d", "e", "##a", "##b", "##c", "pad", "?", "."]
NAMES = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
SAMPLES = [
    Sample("1", "a b c?", ("a", "", "b b. c d e a b", "c"), (0, 2), ("x",), "made"),
    Sample("2", "d", ("e e e", "aab cab"), (1,), (), "made"),
    Sample("3", "a b c d e a", ("a.",), (0,), (), "made"),
]


def write_tokenizer(folder: Path, names: dict[str, str] = NAMES) -> Path:
    """A WordPiece tokenizer with BERT's post-processor."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {piece: index for index, piece in enumerate(PIECES)}
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


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts the tokenizer was given, call by call."""
    counts: list[int] = []
    encode = TextTokenizer.encode

    def counted(self: TextTokenizer, texts: list[str]) -> list[list[int]]:
        counts.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    return counts


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


def test_a_store_holds_every_text_and_the_cache_answers_later(tokenizer, encoded, tmp_path) -> None:
    # What a sample is called does not matter to its tokens.
    renamed = [dataclasses.replace(s, id=s.id + "x", answers=("y",)) for s in SAMPLES]
    stores = [read(samples, tokenizer, tmp_path) for samples in (SAMPLES, SAMPLES, renamed)]
    assert encoded == [10]
    for store in stores:
        assert store.chunk_counts.tolist() == [4, 2, 1]
        assert store.question_lengths.tolist() == [4, 1, 6]
        assert store.chunk_lengths.tolist() == [1, 0, 8, 1, 3, 6, 2]
        assert [store.support_of(i).tolist() for i in range(3)] == [[0, 2], [1], [0]]
        assert (store.truncated_questions, store.truncated_chunks) == (0, 0)
        for sample, first in zip(SAMPLES, store.sample_starts):
            for offset, text in enumerate((sample.question, *sample.chunks)):
                assert store.text(first + offset).tolist() == tokenizer.encode([text])[0]


def test_truncation_is_counted_and_named(tokenizer, tmp_path) -> None:
    store = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)
    assert store.question_lengths.tolist() == [4, 1, 4]
    assert store.chunk_lengths.tolist() == [1, 0, 3, 1, 3, 3, 2]
    assert spell(store.text(store.sample_starts[2])) == ["a", "b", "c", "d"]
    assert spell(store.text(store.sample_starts[0] + 3)) == ["b", "b", "."]
    again = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)  # from the cache
    for each in (store, again):
        assert (each.truncated_questions, each.truncated_chunks) == (1, 2)
    # A row has two special tokens; a state holds ten tokens of a chunk, which no chunk exceeds.
    for row, cut in ((12, 0), (5, 2)):
        config = DataConfig(max_chunk_tokens=row, max_chunk_tokens_in_state=10, cache=str(tmp_path))
        store = tokenise_samples(config, tokenizer, SAMPLES)
        report = truncation_report(store, config, tokenizer)
        assert (
            ("config.data.max_chunk_tokens" in report)
            == (f"{cut or 2} of 7 chunks" in report)
            == (cut > 0)
        )


def test_anything_that_matters_makes_another_entry(tokenizer, encoded, tmp_path) -> None:
    read(SAMPLES, tokenizer, tmp_path)
    changes = [
        {"question": "a b c"},
        {"chunks": ("a", "", "b b. c d e a b", "d")},
        {"chunks": ("a", "b b. c d e a b", "c"), "support": (0, 1)},
        {"support": (0, 3)},
    ]
    variants = [[dataclasses.replace(SAMPLES[0], **change), *SAMPLES[1:]] for change in changes]
    for samples in (*variants, SAMPLES[::-1], SAMPLES[:2]):
        read(samples, tokenizer, tmp_path)
    read(SAMPLES, tokenizer, tmp_path, question=99)
    read(SAMPLES, tokenizer, tmp_path, chunk=99)
    assert len(encoded) == len([*(tmp_path / "tokens").iterdir()]) == 9
    # A text that comes again is not encoded again.
    store = read(SAMPLES * 400, tokenizer, tmp_path)
    assert sum(encoded[9:]) == 10
    np.testing.assert_array_equal(
        store.tokens, np.tile(read(SAMPLES, tokenizer, tmp_path).tokens, 400)
    )


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


@pytest.mark.parametrize("absent", [["cls_token"], ["sep_token"], ["cls_token", "pad_token"]])
def test_tokenizers_that_are_refused(absent: list[str], tmp_path: Path) -> None:
    names = {name: token for name, token in NAMES.items() if name not in absent}
    folder = write_tokenizer(tmp_path / "model", names)
    with pytest.raises(InputError, match=rf"{absent[0]}.*tokenizer_config\.json"):
        TextTokenizer.load(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    (tmp_path / "none").mkdir()
    for other in (folder, tmp_path / "none"):
        with pytest.raises(InputError, match=re.escape(str(other))):
            TextTokenizer.load(other)


def test_a_full_disk_is_an_error_with_the_field(tokenizer, full_disk: Path) -> None:
    texts = tuple(f"a b c d {'e ' * 40}" for _ in range(20_000))
    samples = [Sample("1", "a", texts, (0,), (), "made")]
    with pytest.raises(InputError, match=r"config\.data\.cache"):
        read(samples, tokenizer, full_disk)
    assert not list((full_disk / "tokens").iterdir())
