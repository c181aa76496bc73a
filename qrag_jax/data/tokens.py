"""Turns texts into token ids once and keeps them in memory-mapped files, keyed by content."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import normalizers

from qrag_jax.data.sample import Sample, placed
from qrag_jax.errors import InputError
from qrag_jax.runtime.pretrained_files import read_fast_tokenizer
from qrag_jax.runtime.whole_files import whole_folder, writing

if TYPE_CHECKING:
    from qrag_jax.data.long_docs import Layout

FORMAT = 1  # increase it when the meaning of the files below changes
_SAMPLES_AT_ONCE = 512
_MEASURED = 200  # documents that are measured where each epoch draws others


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer with the special tokens of a retriever's rows."""

    backend: tokenizers.Tokenizer  # special tokens that are written in a text are plain text
    cls_id: int | None  # the first token of a row; None if rows begin directly with their text
    sep_id: int  # the token that separates (or ends) texts
    pad_id: int
    vocab_size: int  # ids run from 0 to vocab_size - 1, added tokens included

    @classmethod
    def load(cls, folder: Path, *, opens_rows: bool = True, lowers: bool = False) -> TextTokenizer:
        """Reads the tokenizer of a model folder.

        `opens_rows`: whether the model family opens rows with [CLS] (<s>).
        """
        auto = read_fast_tokenizer(folder)
        backend = auto.backend_tokenizer
        special = {"cls_token": auto.cls_token_id} if opens_rows else {}
        special |= {"sep_token": auto.sep_token_id, "pad_token": auto.pad_token_id}
        if special["sep_token"] is None:
            eos = auto.eos_token_id
            special["sep_token"] = eos if opens_rows else _end_of_text(backend, eos)
        if absent := [name for name, index in special.items() if index is None]:
            raise InputError(f"{folder}: set {' and '.join(absent)} in tokenizer_config.json.")
        lower = backend.normalizer
        if lowers and (lower is None or lower.normalize_str("A") != "a"):
            steps = [normalizers.Lowercase(), *([lower] if lower else [])]
            backend.normalizer = normalizers.Sequence(steps)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        ends = special["sep_token"], special["pad_token"]
        return cls(backend, special.get("cls_token"), *ends, len(auto))

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

    In Qwen3-Embedding, `eos_token` ends a chat turn, but the model pools at the other.
    """
    ended = backend.encode("a")
    if eos_id is not None and ended.ids and ended.special_tokens_mask[-1]:
        return ended.ids[-1]
    return eos_id


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """The tokens of many samples in flat arrays."""

    tokens: np.ndarray  # `[total]` int32, all texts one after the other: question, chunks, …
    text_starts: np.ndarray  # `[texts + 1]` int64, where each text begins in `tokens`
    sample_starts: np.ndarray  # `[samples + 1]` int64, places of the questions among the texts
    support: np.ndarray  # `[facts]` int32, chunk indices of the supporting facts
    support_starts: np.ndarray  # `[samples + 1]` int64, where each sample's facts begin in it
    truncated_questions: int  # cut to the length limit
    truncated_chunks: int
    folder: Path | None = None  # where the arrays are mapped from; None if they are only in memory
    # Of documents that each epoch draws again, the background texts, which are the chunks of one
    # sample, and the layout; the samples' chunks are then the facts alone
    redrawn: tuple[TokenStore, Layout] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles only the folder, so that workers map the same files instead of copying them."""
        if self.folder is not None:
            return open_store, (self.folder, self.redrawn)
        return TokenStore, tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(self.sample_starts) - 1

    @property
    def content_key(self) -> str:
        """A digest of texts, facts, tokenizer, limits and layout; "" if only in memory."""
        key = self.folder.name if self.folder else ""
        if self.redrawn is None:
            return key
        background, layout = self.redrawn
        keys = f"{key} {background.content_key} {layout.key}"
        return hashlib.sha256(keys.encode()).hexdigest()[:32]

    def text(self, index: int) -> np.ndarray:
        return self.tokens[self.text_starts[index] : self.text_starts[index + 1]]

    def support_of(self, sample: int) -> np.ndarray:
        return self.support[self.support_starts[sample] : self.support_starts[sample + 1]]

    def document(
        self, sample: int, epoch: int = 0
    ) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """A question and its chunks in order, `[length]` each; the facts' places, `[facts]`."""
        first, end = self.sample_starts[sample], self.sample_starts[sample + 1]
        question, *chunks = map(self.text, range(first, end))
        if self.redrawn is None:
            return question, chunks, self.support_of(sample)
        background, layout = self.redrawn
        places, between = layout(sample, epoch)
        # Text 0 is the (empty) question of the store's one sample; the chunks begin at text 1.
        texts = (background.text(1 + index) for index in between.tolist())
        chunks = placed(chunks, places.tolist(), texts)
        return question, chunks, places[self.support_of(sample)]

    @property
    def cut_chunks(self) -> tuple[int, int]:
        """Number of chunks that were cut to the length limit, and of all stored chunks."""
        stores = [self] if self.redrawn is None else [self, self.redrawn[0]]
        return sum(s.truncated_chunks for s in stores), sum(len(s._own_lengths) for s in stores)

    @property
    def longest_chunk(self) -> int:
        behind = 0 if self.redrawn is None else self.redrawn[0].longest_chunk
        return max(int(self._own_lengths.max(initial=0)), behind)

    @property
    def chunk_counts(self) -> np.ndarray:
        """Number of chunks of each sample, `[samples]`."""
        if self.redrawn is not None:
            return np.full(len(self), self.redrawn[1].chunks)
        return np.diff(self.sample_starts) - 1

    @property
    def question_lengths(self) -> np.ndarray:
        """Tokens of each question, `[samples]`."""
        return np.diff(self.text_starts)[self.sample_starts[:-1]]

    @functools.cached_property
    def chunk_lengths(self) -> np.ndarray:
        """Tokens of every chunk, `[chunks]`; of redrawn documents, of some of the first epoch."""
        if self.redrawn is None:
            return self._own_lengths
        shown = np.linspace(0, len(self) - 1, min(len(self), _MEASURED)).astype(int)
        return np.array([len(chunk) for i in shown for chunk in self.document(int(i))[1]])

    @property
    def _own_lengths(self) -> np.ndarray:
        return np.delete(np.diff(self.text_starts), self.sample_starts[:-1])


def tokenise(
    samples: Sequence[Sample],
    tokenizer: TextTokenizer,
    *,
    max_question_tokens: int,
    max_chunk_tokens: int,
    cache: Path,
) -> TokenStore:
    """The tokens of the samples, from the cache if it has them.

    Redrawn samples get a store that covers every epoch: each fact and background text once.
    """
    from qrag_jax.data.long_docs import RedrawnSamples  # servers load the tokenizer alone

    limits = (max_question_tokens, max_chunk_tokens)
    if isinstance(samples, RedrawnSamples):
        texts = tuple(samples.background.tolist())
        background = Sample("background", "", texts, support=(), answers=(), source="")
        parts = samples.parts, [background]
        facts, between = (_stored(part, tokenizer, limits, cache) for part in parts)
        return dataclasses.replace(facts, redrawn=(between, samples.layout))
    return _stored(samples, tokenizer, limits, cache)


def _stored(
    samples: Sequence[Sample], tokenizer: TextTokenizer, limits: tuple[int, int], cache: Path
) -> TokenStore:
    digest = hashlib.sha256(f"{FORMAT} {tokenizer.fingerprint()} {limits}".encode())
    samples = [*samples]  # lazy ones are made once; their texts are shared
    for sample in samples:
        digest.update(json.dumps([sample.question, sample.chunks, sample.support]).encode())
    folder = cache / "tokens" / digest.hexdigest()[:32]
    if not folder.exists():
        with writing(cache, "config.data.cache"):
            _write(folder, *_encode(samples, tokenizer, *limits))
    return open_store(folder)


def open_store(folder: Path, redrawn: tuple[TokenStore, Layout] | None = None) -> TokenStore:
    names = ("tokens", "text_starts", "sample_starts", "support", "support_starts")
    arrays: dict[str, Any] = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in names}
    counts = json.loads((folder / "meta.json").read_text())
    return TokenStore(**arrays, **counts, folder=folder, redrawn=redrawn)


def _write(folder: Path, arrays: dict[str, np.ndarray], counts: dict[str, int]) -> None:
    try:
        with whole_folder(folder) as building:  # a killed or concurrent run leaves no half store
            for name, array in arrays.items():
                np.save(building / f"{name}.npy", array, allow_pickle=False)
            (building / "meta.json").write_text(json.dumps(counts))
    except OSError:
        if not folder.exists():  # else another process was faster
            raise


def _encode(
    samples: Sequence[Sample],
    tokenizer: TextTokenizer,
    max_question_tokens: int,
    max_chunk_tokens: int,
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The arrays of a store by name, and the contents of `meta.json`."""
    # A text that several documents share (background text, for example) is encoded once.
    places: dict[tuple[str, int], int] = {}  # (text, limit) → index in `rows`
    rows, too_long = list[np.ndarray](), list[bool]()
    order: list[int] = []  # index in `rows` of each text of the samples
    counts, support = list[int](), list[tuple[int, ...]]()
    for start in range(0, len(samples), _SAMPLES_AT_ONCE):
        texts: list[tuple[str, int]] = []
        for sample in samples[start : start + _SAMPLES_AT_ONCE]:
            texts.append((sample.question, max_question_tokens))
            texts.extend((chunk, max_chunk_tokens) for chunk in sample.chunks)
            counts.append(1 + len(sample.chunks))
            support.append(sample.support)
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
        "support": np.array([fact for facts in support for fact in facts], np.int32),
        "support_starts": _starts([*map(len, support)]),
    }
    questions = int(truncated[sample_starts[:-1]].sum())
    meta = {"truncated_questions": questions, "truncated_chunks": int(truncated.sum()) - questions}
    return arrays, meta


def _starts(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
