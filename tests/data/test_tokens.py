"""Tokenisation: what is encoded, what is cut, and when the cache answers."""

from __future__ import annotations

import dataclasses
import json
import os
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


def write_tokenizer(
    folder: Path, names: dict[str, str] = NAMES, pieces: list[str] = PIECES
) -> Path:
    """A WordPiece tokenizer with BERT's post-processor, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


ARRAYS = [f for f in dataclasses.fields(TokenStore) if f.type == "np.ndarray"]


class CountingTokenizer(TextTokenizer):
    """The real tokenizer, which also remembers how many texts it was given."""

    encoded: list[int]

    def encode(self, texts):
        self.encoded.append(len(texts))
        return super().encode(texts)


@pytest.fixture
def tokenizer(tmp_path) -> CountingTokenizer:
    loaded = TextTokenizer.load(write_tokenizer(tmp_path / "model"))
    fields = {f.name: getattr(loaded, f.name) for f in dataclasses.fields(loaded)}
    counting = CountingTokenizer(**fields)
    object.__setattr__(counting, "encoded", [])
    return counting


def read(samples, tokenizer, cache: Path, question: int = 100, chunk: int = 100) -> TokenStore:
    limits = {"max_question_tokens": question, "max_chunk_tokens": chunk}
    return tokenise(samples, tokenizer, **limits, cache=cache)


def spell(tokens) -> list[str]:
    return [PIECES[token] for token in tokens]


def test_special_ids_and_vocabulary(tokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id) == (0, 2, 3)
    assert tokenizer.vocab_size == len(PIECES)


def test_encodes_without_special_tokens(tokenizer) -> None:
    assert list(map(spell, tokenizer.encode(["a bb?", "", "zebra"]))) == [
        ["a", "b", "##b", "?"],
        [],
        ["[UNK]"],
    ]


def test_special_tokens_in_a_text_are_text(tokenizer) -> None:
    (row,) = tokenizer.encode(["a [SEP] b [CLS] [MASK] [PAD]"])
    assert not {0, 2, 3, 4} & set(row)
    assert " ".join(spell(row)) == "a [ sep ] b [ cls ] [ mask ] [ pad ]"


def test_a_saved_truncation_or_padding_is_not_applied(tmp_path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    rows = TextTokenizer.load(folder).encode(["a b c d e a b", "a"])
    assert [len(row) for row in rows] == [7, 1]


def test_store_holds_every_text(tokenizer, tmp_path) -> None:
    store = read(SAMPLES, tokenizer, tmp_path)
    assert len(store) == 3
    assert store.chunk_counts.tolist() == [4, 2, 1]
    assert store.question_lengths.tolist() == [4, 1, 6]
    assert store.chunk_lengths.tolist() == [1, 0, 8, 1, 3, 6, 2]
    assert [store.support_of(i).tolist() for i in range(3)] == [[0, 2], [1], [0]]
    assert (store.truncated_questions, store.truncated_chunks) == (0, 0)
    for sample, first in zip(SAMPLES, store.sample_starts):
        for offset, text in enumerate((sample.question, *sample.chunks)):
            assert store.text(first + offset).tolist() == tokenizer.encode([text])[0]


def test_truncation_is_counted(tokenizer, tmp_path) -> None:
    store = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)
    assert (store.truncated_questions, store.truncated_chunks) == (1, 2)
    assert store.question_lengths.tolist() == [4, 1, 4]
    assert store.chunk_lengths.tolist() == [1, 0, 3, 1, 3, 3, 2]
    assert spell(store.text(store.sample_starts[2])) == ["a", "b", "c", "d"]
    assert spell(store.text(store.sample_starts[0] + 3)) == ["b", "b", "."]
    again = read(SAMPLES, tokenizer, tmp_path, question=4, chunk=3)  # from the cache
    assert (again.truncated_questions, again.truncated_chunks) == (1, 2)


@pytest.mark.parametrize(("row", "cut", "warns"), [(12, 0, False), (5, 2, True), (9, 1, True)])
def test_what_is_truncated_names_its_field_and_warns(tokenizer, tmp_path, row, cut, warns) -> None:
    # A row has two special tokens; a state holds ten tokens of a chunk, which no chunk exceeds.
    config = DataConfig(max_chunk_tokens=row, max_chunk_tokens_in_state=10, cache=str(tmp_path))
    report = truncation_report(tokenise_samples(config, tokenizer, SAMPLES), config, tokenizer)
    assert ("warning" in report, f"{cut} of 7 chunks" in report) == (warns, cut > 0)
    assert ("config.data.max_chunk_tokens" in report) == (cut > 0)


def arrays(store: TokenStore) -> dict[str, np.ndarray]:
    fields = {f.name: getattr(store, f.name) for f in dataclasses.fields(store)}
    return {name: np.asarray(value) for name, value in fields.items()}


def test_the_cache_answers_the_second_time(tokenizer, tmp_path) -> None:
    first = read(SAMPLES, tokenizer, tmp_path)
    assert tokenizer.encoded == [10]
    second = read(SAMPLES, tokenizer, tmp_path)
    assert tokenizer.encoded == [10]
    for (name, one), two in zip(arrays(first).items(), arrays(second).values(), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=name)
        assert one.dtype == two.dtype
    # What a sample is called does not matter to its tokens.
    renamed = [dataclasses.replace(s, id=s.id + "x", answers=("y",)) for s in SAMPLES]
    read(renamed, tokenizer, tmp_path)
    assert tokenizer.encoded == [10]


def test_anything_that_matters_makes_another_entry(tokenizer, tmp_path) -> None:
    read(SAMPLES, tokenizer, tmp_path)
    changes = [
        {"question": "a b c"},
        {"chunks": ("a", "", "b b. c d e a b", "d")},
        {"chunks": ("a", "b b. c d e a b", "c"), "support": (0, 1)},
        {"support": (0, 3)},
    ]
    variants = [[dataclasses.replace(SAMPLES[0], **change), *SAMPLES[1:]] for change in changes]
    variants += [SAMPLES[::-1], SAMPLES[:2]]
    for number, samples in enumerate(variants, start=2):
        read(samples, tokenizer, tmp_path)
        assert len(tokenizer.encoded) == number
    read(SAMPLES, tokenizer, tmp_path, question=99)
    read(SAMPLES, tokenizer, tmp_path, chunk=99)
    assert len(tokenizer.encoded) == len(variants) + 3
    assert len(list((tmp_path / "tokens").iterdir())) == len(variants) + 3


def test_another_tokenizer_makes_another_entry(tokenizer, tmp_path) -> None:
    pieces = [*PIECES[:11], "b", "a", *PIECES[13:]]  # two ids exchanged
    other = TextTokenizer.load(write_tokenizer(tmp_path / "other", pieces=pieces))
    swapped = {"cls_token": "[SEP]", "sep_token": "[CLS]", "pad_token": "[PAD]"}
    special = TextTokenizer.load(write_tokenizer(tmp_path / "special", names=swapped))
    marks = {t.fingerprint() for t in (tokenizer, other, special)}
    assert len(marks) == 3
    again = TextTokenizer.load(write_tokenizer(tmp_path / "again"))
    assert again.fingerprint() == tokenizer.fingerprint()
    first, second = read(SAMPLES, tokenizer, tmp_path), read(SAMPLES, other, tmp_path)
    assert not np.array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(read(SAMPLES, tokenizer, tmp_path).tokens, first.tokens)


def test_what_a_killed_run_left_does_not_matter(tokenizer, tmp_path) -> None:
    expected = read(SAMPLES, tokenizer, tmp_path / "whole")
    (entry,) = (tmp_path / "whole" / "tokens").iterdir()
    unfinished = tmp_path / "cache" / "tokens" / "tmp1234"  # killed before the rename
    unfinished.mkdir(parents=True)
    (unfinished / "tokens.npy").write_bytes(b"half")
    store = read(SAMPLES, tokenizer, tmp_path / "cache")
    np.testing.assert_array_equal(store.tokens, expected.tokens)
    assert (tmp_path / "cache" / "tokens" / entry.name / "meta.json").exists()


def test_an_entry_that_lost_files_is_built_again(tokenizer, tmp_path) -> None:
    expected = np.array(read(SAMPLES, tokenizer, tmp_path).tokens)
    (entry,) = (tmp_path / "tokens").iterdir()
    (entry / "meta.json").unlink()
    (entry / "tokens.npy").unlink()
    store = read(SAMPLES, tokenizer, tmp_path)
    np.testing.assert_array_equal(store.tokens, expected)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry.name]


def empty(entry: Path) -> None:
    (entry / "tokens.npy").write_bytes(b"")


def cut(entry: Path) -> None:
    (entry / "tokens.npy").write_bytes((entry / "tokens.npy").read_bytes()[:-4])


def cut_header(entry: Path) -> None:
    (entry / "support.npy").write_bytes((entry / "support.npy").read_bytes()[:20])


def shorten(entry: Path) -> None:
    np.save(entry / "text_starts.npy", np.load(entry / "text_starts.npy")[:-1])


def empty_meta(entry: Path) -> None:
    (entry / "meta.json").write_bytes(b"")


def cut_meta(entry: Path) -> None:
    (entry / "meta.json").write_text('{"truncated_questions": 0}')


def lose(entry: Path) -> None:
    (entry / "sample_starts.npy").unlink()


def empty_folder(entry: Path) -> None:
    for path in entry.iterdir():
        path.unlink()


HARMS = [empty, cut, cut_header, shorten, empty_meta, cut_meta, lose, empty_folder]


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_entry_is_built_again(harm, tokenizer, tmp_path, capsys) -> None:
    expected = read(SAMPLES, tokenizer, tmp_path)
    (entry,) = (tmp_path / "tokens").iterdir()
    arrays = {f.name: np.array(getattr(expected, f.name)) for f in ARRAYS}
    harm(entry)
    store = read(SAMPLES, tokenizer, tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(store, name), array)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [entry.name]
    told = capsys.readouterr().out
    assert told.count("\n") == (0 if harm is empty_folder else 1)
    if told:
        assert told.startswith(f"{entry} is broken (")


def test_a_full_disk_is_told_with_the_field(tokenizer, full_disk: Path) -> None:
    texts = tuple(f"a b c d {'e ' * 40}" for _ in range(20_000))
    samples = [Sample("1", "a", texts, (0,), (), "made")]
    with pytest.raises(InputError, match=r"written \(No space") as error:
        read(samples, tokenizer, full_disk)
    assert "give another folder as config.data.cache." in str(error.value)
    assert not list((full_disk / "tokens").iterdir())


def test_others_may_read_the_cache_as_the_umask_says(tokenizer, tmp_path) -> None:
    before = os.umask(0o027)
    try:
        read(SAMPLES, tokenizer, tmp_path)
    finally:
        os.umask(before)
    (entry,) = (tmp_path / "tokens").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in entry.iterdir()} == {0o640}


def test_no_scraps_are_left(tokenizer, tmp_path) -> None:
    read(SAMPLES, tokenizer, tmp_path)
    assert len(list((tmp_path / "tokens").iterdir())) == 1

    class Stop(Exception):
        pass

    class Failing(TextTokenizer):
        def encode(self, texts):
            raise Stop

    fields = {f.name: getattr(tokenizer, f.name) for f in dataclasses.fields(TextTokenizer)}
    with pytest.raises(Stop):
        read(SAMPLES[:1], Failing(**fields), tmp_path)
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_more_samples_than_are_encoded_at_once(tokenizer, tmp_path) -> None:
    store = read(SAMPLES * 400, tokenizer, tmp_path)
    assert sum(tokenizer.encoded) == 10  # a text that comes again is not encoded again
    assert len(tokenizer.encoded) > 1
    few = read(SAMPLES, tokenizer, tmp_path)
    np.testing.assert_array_equal(store.tokens, np.tile(few.tokens, 400))
    assert [store.support_of(i).tolist() for i in (1197, 1198, 1199)] == [[0, 2], [1], [0]]


def test_a_text_may_be_question_and_chunk(tokenizer, tmp_path) -> None:
    samples = [
        Sample("1", "a b c", ("a b c", "d"), (0,), (), "made"),
        Sample("2", "d", ("d", "a b c"), (1,), (), "made"),
    ]
    store = read(samples, tokenizer, tmp_path, question=1, chunk=2)
    texts = [spell(store.text(i)) for i in range(6)]
    assert texts == [["a"], ["a", "b"], ["d"], ["d"], ["d"], ["a", "b"]]
    assert (store.truncated_questions, store.truncated_chunks) == (1, 2)


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        (["cls_token"], "no cls_token;"),
        (["sep_token"], "no sep_token;"),
        (["cls_token", "pad_token"], "cls_token"),
    ],
)
def test_missing_special_tokens_are_named(absent, named, tmp_path) -> None:
    names = {name: token for name, token in NAMES.items() if name not in absent}
    folder = write_tokenizer(tmp_path / "model", names)
    with pytest.raises(InputError, match=named) as error:
        TextTokenizer.load(folder)
    assert str(folder) in str(error.value)
    assert "tokenizer_config.json" in str(error.value)


def test_rows_without_an_opening_token(tmp_path: Path) -> None:
    """Of a family like Qwen3: the text's own end, which need not be the tokenizer's eos_token."""
    special = {"pad_token": "[PAD]", "eos_token": "[MASK]", "cls_token": "[CLS]"}
    folder = write_tokenizer(tmp_path / "model", special)
    tokenizer = TextTokenizer.load(folder, opens_rows=False)
    assert (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id) == (None, 3, 0)
    data = json.loads((folder / "tokenizer.json").read_text()) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert spell([TextTokenizer.load(folder, opens_rows=False).sep_id]) == ["[MASK]"]
    folder = write_tokenizer(tmp_path / "other", {"pad_token": "[PAD]"})
    with pytest.raises(InputError, match="sep_token"):
        TextTokenizer.load(folder, opens_rows=False)


def test_eos_separates_where_there_is_no_sep(tmp_path) -> None:
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "eos_token": "[MASK]"}
    assert TextTokenizer.load(write_tokenizer(tmp_path / "model", names)).sep_id == 4


def test_a_tokenizer_without_a_fast_version_is_refused(tmp_path) -> None:
    # CANINE's tokenizer works on characters in Python and needs no file.
    config = json.dumps({"tokenizer_class": "CanineTokenizer"})
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="tokenizer cannot be read") as error:
        TextTokenizer.load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_broken_tokenizer_file_is_refused(tmp_path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(InputError, match="tokenizer cannot be read"):
        TextTokenizer.load(folder)
