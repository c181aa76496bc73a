"""Documents drawn anew in every epoch: the same question and facts among other background.

Three things define a document: its parts (the question and the facts), the background texts that
all documents share, and a layout, which says where the facts stand and which background texts are
between them. Texts and tokens of every epoch are composed from these in the same way, and every
text is tokenised and kept only once.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import DocumentTokens, TextTokenizer, TokenStore, tokenise

SHOWN = 200  # documents that `chunk_lengths` measures


class Layout(Protocol):
    """How the documents of a set are put together. It is small: every worker has a copy."""

    @property
    def chunks(self) -> int:
        """C, the number of chunks of a document."""

    @property
    def key(self) -> str:
        """A text that distinguishes this layout from all others."""

    def __call__(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The layout of one sample's document in one epoch, the same at every call.

        Returns:
            places `[F]`: the chunk index of each fact. background `[C - F]`: the indices of the
            background texts that are the other chunks, in document order.
        """


class RedrawnSamples(LazySamples):
    """Samples that differ between epochs: indexing gives the first epoch, `drawn` any epoch.

    Args:
        parts: the samples with only their facts as chunks; `support` refers to these chunks.
        background: `[texts]` array of str.
        layout: where facts and background texts stand in each document.
    """

    def __init__(self, parts: Sequence[Sample], background: np.ndarray, layout: Layout) -> None:
        super().__init__(len(parts), lambda index: self.drawn(index, 0))
        self.parts, self.background, self.layout = parts, background, layout

    def drawn(self, index: int, epoch: int) -> Sample:
        """The sample as it is in this epoch."""
        index = range(len(self))[index]
        places, background = self.layout(index, epoch)
        return composed(self.parts[index], places, self.background[background])


def composed(facts: Sample, places: np.ndarray, background: np.ndarray) -> Sample:
    """The sample of a document that is put together from facts and background.

    The sample refers to the given texts and does not copy them.

    Args:
        facts: a sample with only its facts as chunks.
        places: `[F]`, the chunk index of each fact.
        background: `[C - F]`, the texts of the other chunks, in document order.
    """
    texts = np.empty(len(places) + len(background), object)
    is_background = np.ones(len(texts), bool)
    is_background[places] = False
    texts[is_background] = background
    texts[places] = facts.chunks
    support = tuple(int(places[i]) for i in facts.support)
    return dataclasses.replace(facts, chunks=tuple(texts.tolist()), support=support)


@dataclasses.dataclass(frozen=True)
class RedrawnStore:
    """Tokens of redrawn samples (see `tokens.Tokens`): each fact and background text once.

    Attributes:
        parts: the question and the facts of each sample.
        background: one sample, whose chunks are the background texts.
        layout: where facts and background texts stand in each document.
    """

    parts: TokenStore
    background: TokenStore
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
        """Number of questions that were cut."""
        return self.parts.truncated_questions

    @property
    def truncated_chunks(self) -> int:
        """Number of facts and background texts that were cut."""
        return self.parts.truncated_chunks + self.background.truncated_chunks

    @property
    def chunk_texts(self) -> int:
        """Number of facts and background texts."""
        return self.parts.chunk_texts + self.background.chunk_texts

    @property
    def chunk_counts(self) -> np.ndarray:
        """Number of chunks of each sample, `[samples]`."""
        return np.full(len(self), self.layout.chunks)

    @property
    def question_lengths(self) -> np.ndarray:
        """Tokens of each question, `[samples]`."""
        return self.parts.question_lengths

    @property
    def longest_chunk(self) -> int:
        """Tokens of the longest chunk that a document can have."""
        return max(self.parts.longest_chunk, self.background.longest_chunk)

    @functools.cached_property
    def chunk_lengths(self) -> np.ndarray:
        """Tokens of the chunks of some documents of the first epoch, `[chunks]`."""
        shown = np.linspace(0, len(self) - 1, min(len(self), SHOWN)).astype(int)
        found = [len(chunk) for i in shown for chunk in self.document(int(i)).chunks]
        return np.array(found)

    def document(self, sample: int, epoch: int = 0) -> DocumentTokens:
        """One sample's tokens in this epoch."""
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
    samples: RedrawnSamples,
    tokenizer: TextTokenizer,
    *,
    max_question_tokens: int,
    max_chunk_tokens: int,
    cache: Path,
) -> RedrawnStore:
    """Returns the tokens of redrawn samples; for arguments and errors see `tokens.tokenise`."""
    texts = tuple(samples.background.tolist())
    background = Sample("background", "", texts, support=(), answers=(), source="")
    parts, shared = (
        tokenise(
            each,
            tokenizer,
            max_question_tokens=max_question_tokens,
            max_chunk_tokens=max_chunk_tokens,
            cache=cache,
        )
        for each in (samples.parts, [background])
    )
    return RedrawnStore(parts, shared, samples.layout)
