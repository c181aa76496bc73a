"""Turns texts into token ids once and keeps them in memory-mapped files, keyed by content."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import tokenizers
from tokenizers import normalizers

from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError
from qrag_jax.runtime.pretrained_files import read_fast_tokenizer
from qrag_jax.runtime.whole_files import mapped_array, new_folder, reason, write_whole

if TYPE_CHECKING:
    from qrag_jax.data.long_docs import Layout, RedrawnSamples

# What training reads: tokens that stay, or that each epoch draws again.
Tokens: TypeAlias = "TokenStore | RedrawnStore"
FORMAT = 1  # increase it when the meaning of the files below changes
_SAMPLES_AT_ONCE = 512
_MEASURED = 200  # documents that are measured where each epoch draws others


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer with the special tokens that a retriever's rows need.

    Attributes:
        backend: encodes plain text; it treats special tokens written in a text as plain text.
    """

    backend: tokenizers.Tokenizer
    cls_id: int | None  # the first token of a row; None if rows begin directly with their text
    sep_id: int  # the token that separates (or ends) texts
    pad_id: int
    vocab_size: int  # ids run from 0 to vocab_size - 1, added tokens included

    @classmethod
    def load(cls, folder: Path, *, opens_rows: bool = True, lowers: bool = False) -> TextTokenizer:
        """Reads the tokenizer of a model folder.

        Args:
            opens_rows: whether rows of this model family begin with [CLS] (<s>). If not, they
                begin with their text, and `cls_id` is None even if the tokenizer has the token.
        """
        auto = read_fast_tokenizer(folder)
        backend = auto.backend_tokenizer
        special = {"cls_token": auto.cls_token_id} if opens_rows else {}
        special |= {"sep_token": auto.sep_token_id, "pad_token": auto.pad_token_id}
        if special["sep_token"] is None:
            eos = auto.eos_token_id
            special["sep_token"] = eos if opens_rows else _end_of_text(backend, eos)
        absent = [name for name, index in special.items() if index is None]
        if absent:
            raise InputError(
                f"{folder}: the tokenizer has no {' and no '.join(absent)}; a retriever's rows "
                "need them, so set them in tokenizer_config.json."
            )
        own = backend.normalizer
        if lowers and (own is None or own.normalize_str("A") != "a"):
            steps = [normalizers.Lowercase(), *([own] if own else [])]
            backend.normalizer = normalizers.Sequence(steps)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        return cls(
            backend, special.get("cls_token"), special["sep_token"], special["pad_token"], len(auto)
        )

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens and not truncated."""
        encoded = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [row.ids for row in encoded]

    def fingerprint(self) -> str:
        """A digest that changes whenever the tokenizer may encode some text differently."""
        special = f"{self.cls_id} {self.sep_id} {self.pad_id}"
        return hashlib.sha256((self.backend.to_str() + special).encode()).hexdigest()


def _end_of_text(backend: tokenizers.Tokenizer, eos_id: int | None) -> int | None:
    """The special token that the tokenizer puts at the end of a text, else its `eos_token`.

    The two differ in Qwen3-Embedding: `eos_token` ends a chat turn, but the model pools at the
    token that ends the text.
    """
    ended = backend.encode("a")
    if eos_id is not None and ended.ids and ended.special_tokens_mask[-1]:
        return ended.ids[-1]
    return eos_id


class DocumentTokens(NamedTuple):
    """One sample as token ids without special tokens."""

    question: np.ndarray  # `[length]`
    chunks: list[np.ndarray]  # `[length]` each, in document order
    support: np.ndarray  # `[facts]` chunk indices of the supporting facts


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """The tokens of many samples in flat arrays.

    Attributes:
        tokens: `[total]` int32, all texts one after the other: question, chunks, question, …
        sample_starts: `[samples + 1]` int64, the index of each sample's question among the texts.
        support: `[facts]` int32, chunk indices of the supporting facts, sample after sample.
        support_starts: `[samples + 1]` int64, where each sample's facts begin in `support`.
    """

    tokens: np.ndarray
    text_starts: np.ndarray  # `[texts + 1]` int64, where each text begins in `tokens`
    sample_starts: np.ndarray
    support: np.ndarray
    support_starts: np.ndarray
    truncated_questions: int  # number of questions that were cut to the length limit
    truncated_chunks: int  # number of chunks that were cut to the length limit
    folder: Path | None = None  # where the arrays are mapped from; None if they are only in memory

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the folder, so that workers map the same files instead of copying them."""
        if self.folder is not None:
            return open_store, (self.folder,)
        return TokenStore, tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(self.sample_starts) - 1

    @property
    def content_key(self) -> str:
        """A digest of texts, supporting facts, tokenizer and limits; "" if only in memory."""
        return self.folder.name if self.folder else ""

    def text(self, index: int) -> np.ndarray:
        """The ids of one text, `[length]`."""
        return self.tokens[self.text_starts[index] : self.text_starts[index + 1]]

    def support_of(self, sample: int) -> np.ndarray:
        """Chunk indices of the supporting facts of one sample."""
        return self.support[self.support_starts[sample] : self.support_starts[sample + 1]]

    def document(self, sample: int, epoch: int = 0) -> DocumentTokens:
        """One sample's tokens; they are the same in every epoch."""
        first, end = self.sample_starts[sample], self.sample_starts[sample + 1]
        chunks = [self.text(i) for i in range(first + 1, end)]
        return DocumentTokens(self.text(first), chunks, self.support_of(sample))

    @property
    def chunk_texts(self) -> int:
        """Number of chunks of all samples."""
        return int(self.chunk_counts.sum())

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest chunk."""
        return int(self.chunk_lengths.max(initial=0))

    @property
    def chunk_counts(self) -> np.ndarray:
        """Number of chunks of each sample, `[samples]`."""
        return np.diff(self.sample_starts) - 1

    @property
    def question_lengths(self) -> np.ndarray:
        """Tokens of each question, `[samples]`."""
        return np.diff(self.text_starts)[self.sample_starts[:-1]]

    @property
    def chunk_lengths(self) -> np.ndarray:
        """Tokens of every chunk of every sample, `[chunks]`."""
        return np.delete(np.diff(self.text_starts), self.sample_starts[:-1])


def tokenise(
    samples: Sequence[Sample],
    tokenizer: TextTokenizer,
    *,
    max_question_tokens: int,
    max_chunk_tokens: int,
    cache: Path,
) -> TokenStore:
    """Returns the tokens of the samples, from the cache if it has them already."""
    key = _content_key(samples, tokenizer, (max_question_tokens, max_chunk_tokens))
    folder = cache / "tokens" / key
    if not folder.exists():
        try:
            _write(folder, samples, tokenizer, max_question_tokens, max_chunk_tokens)
        except OSError as error:
            raise InputError(
                f"{cache} cannot be written ({reason(error)}); free space there, or give another "
                "folder as config.data.cache."
            ) from None
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    """Maps the files of a token store into memory."""
    names = ("tokens", "text_starts", "sample_starts", "support", "support_starts")
    arrays: dict[str, Any] = {name: mapped_array(folder / f"{name}.npy") for name in names}
    return TokenStore(**arrays | json.loads((folder / "meta.json").read_text()), folder=folder)


def _content_key(
    samples: Sequence[Sample], tokenizer: TextTokenizer, limits: tuple[int, int]
) -> str:
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.fingerprint()} {limits}".encode())
    for sample in samples:
        digest.update(json.dumps([sample.question, sample.chunks, sample.support]).encode())
    return digest.hexdigest()[:32]


def _write(
    folder: Path,
    samples: Sequence[Sample],
    tokenizer: TextTokenizer,
    max_question_tokens: int,
    max_chunk_tokens: int,
) -> None:
    arrays, meta = _encode(samples, tokenizer, max_question_tokens, max_chunk_tokens)
    # Built next to its final place, then renamed: a killed or concurrent run leaves no half store.
    building = new_folder(folder.parent, ".building-")
    try:
        for name, array in arrays.items():
            np.save(building / f"{name}.npy", array, allow_pickle=False)
        write_whole(building / "meta.json", json.dumps(meta))
        try:
            building.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _encode(
    samples: Sequence[Sample],
    tokenizer: TextTokenizer,
    max_question_tokens: int,
    max_chunk_tokens: int,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of a store by name, and the contents of `meta.json`."""
    # A text that several documents share (background text, for example) is encoded once.
    places: dict[tuple[str, int], int] = {}  # (text, limit) → index in `rows`
    rows: list[np.ndarray] = []
    too_long: list[bool] = []
    order: list[int] = []  # index in `rows` of each text of the samples
    counts: list[int] = []
    support: list[int] = []
    support_counts: list[int] = []
    for start in range(0, len(samples), _SAMPLES_AT_ONCE):
        texts: list[tuple[str, int]] = []
        for sample in samples[start : start + _SAMPLES_AT_ONCE]:
            texts.append((sample.question, max_question_tokens))
            texts.extend((chunk, max_chunk_tokens) for chunk in sample.chunks)
            counts.append(1 + len(sample.chunks))
            support.extend(sample.support)
            support_counts.append(len(sample.support))
        new = [text for text in dict.fromkeys(texts) if text not in places]
        for (text, limit), ids in zip(new, tokenizer.encode([t for t, _ in new]), strict=True):
            places[text, limit] = len(rows)
            rows.append(np.array(ids[:limit], np.int32))
            too_long.append(len(ids) > limit)
        order.extend(map(places.__getitem__, texts))
    truncated = np.array(too_long)[order]
    sample_starts = _starts(counts)
    arrays = {
        "tokens": np.concatenate([rows[place] for place in order]),
        "text_starts": _starts(np.array([len(row) for row in rows])[order]),
        "sample_starts": sample_starts,
        "support": np.array(support, np.int32),
        "support_starts": _starts(support_counts),
    }
    questions = int(truncated[sample_starts[:-1]].sum())
    meta = {"truncated_questions": questions, "truncated_chunks": int(truncated.sum()) - questions}
    return arrays, meta


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


# ---------------------------------------------------------------- redrawn documents


@dataclasses.dataclass(frozen=True)
class RedrawnStore:
    """As `TokenStore`, of redrawn samples: each fact and background text once."""

    parts: TokenStore
    background: TokenStore  # one sample, whose chunks are the background texts
    layout: Layout

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def content_key(self) -> str:
        """A digest of texts, supporting facts, tokenizer, limits and layout."""
        keys = f"{self.parts.content_key} {self.background.content_key} {self.layout.key}"
        return hashlib.sha256(keys.encode()).hexdigest()[:32]

    @property
    def truncated_questions(self) -> int:
        return self.parts.truncated_questions

    @property
    def truncated_chunks(self) -> int:
        return self.parts.truncated_chunks + self.background.truncated_chunks

    @property
    def chunk_texts(self) -> int:
        return self.parts.chunk_texts + self.background.chunk_texts

    @property
    def chunk_counts(self) -> np.ndarray:
        return np.full(len(self), self.layout.chunks)

    @property
    def question_lengths(self) -> np.ndarray:
        return self.parts.question_lengths

    @property
    def longest_chunk(self) -> int:
        return max(self.parts.longest_chunk, self.background.longest_chunk)

    @functools.cached_property
    def chunk_lengths(self) -> np.ndarray:
        """Tokens of the chunks of some documents of the first epoch, `[chunks]`."""
        shown = np.linspace(0, len(self) - 1, min(len(self), _MEASURED)).astype(int)
        found = [len(chunk) for i in shown for chunk in self.document(int(i)).chunks]
        return np.array(found)

    def document(self, sample: int, epoch: int = 0) -> DocumentTokens:
        question, facts, support = self.parts.document(sample)
        places, background = self.layout(sample, epoch)
        fact_at = dict(zip(places.tolist(), facts, strict=True))
        between = iter(background.tolist())
        chunks = [
            # Text 0 is the (empty) question of the store's one sample; the chunks begin at text 1.
            fact_at[i] if i in fact_at else self.background.text(1 + next(between))
            for i in range(self.layout.chunks)
        ]
        return DocumentTokens(question, chunks, places[support])


def tokenise_redrawn(
    samples: RedrawnSamples, tokenizer: TextTokenizer, **limits: Any
) -> RedrawnStore:
    """Returns the tokens of redrawn samples; for arguments and errors see `tokens.tokenise`."""
    texts = tuple(samples.background.tolist())
    background = Sample("background", "", texts, support=(), answers=(), source="")
    parts = tokenise(samples.parts, tokenizer, **limits)
    return RedrawnStore(parts, tokenise([background], tokenizer, **limits), samples.layout)
