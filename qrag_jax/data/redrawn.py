"""Documents drawn anew in every epoch: the same question and facts among other background.

A document is told by its parts (the question and the facts), by the background that all documents
share, and by a layout, which says where the facts stand and what is between them. So its texts and
its tokens are composed alike, whatever the epoch, and every text is tokenised and kept once.
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

SHOWN = 200  # documents whose chunks tell how long chunks are


class Layout(Protocol):
    """How the documents of a set are put together; small, since every worker has a copy."""

    @property
    def chunks(self) -> int:
        """C, chunks of a document."""

    @property
    def key(self) -> str:
        """Tells this layout from every other one."""

    def __call__(self, index: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The document of a sample in an epoch, which depends on nothing else.

        Returns:
            places `[F]`, the chunk that each fact is, and background `[C - F]`, which of the
            background texts the other chunks are, in document order.
        """


class RedrawnSamples(LazySamples):
    """Samples of a first epoch, and by `drawn` those of any.

    Args:
        parts: each sample with its facts alone as chunks, and its support among them.
        background: `[texts]` array of str.
    """

    def __init__(self, parts: Sequence[Sample], background: np.ndarray, layout: Layout) -> None:
        super().__init__(len(parts), lambda index: self.drawn(index, 0))
        self.parts, self.background, self.layout = parts, background, layout

    def drawn(self, index: int, epoch: int) -> Sample:
        """The sample as it is in an epoch."""
        index = range(len(self))[index]
        places, background = self.layout(index, epoch)
        return composed(self.parts[index], places, self.background[background])


def composed(facts: Sample, places: np.ndarray, background: np.ndarray) -> Sample:
    """The sample of a document.

    Only references: the texts are those given.

    Args:
        facts: with its facts alone as chunks.
        places: `[F]` where they stand; background: `[C - F]` texts of the other places, in order.
    """
    texts = np.empty(len(places) + len(background), object)
    is_background = np.ones(len(texts), bool)
    is_background[places] = False
    texts[is_background] = background
    texts[places] = facts.chunks
    support = tuple(sorted({int(places[i]) for i in facts.support}))
    return dataclasses.replace(facts, chunks=tuple(texts.tolist()), support=support)


@dataclasses.dataclass(frozen=True)
class RedrawnStore:
    """Tokens of redrawn samples, see `tokens.Tokens`: each fact and each background text once.

    Attributes:
        parts: sample i's question and facts; background: one sample, whose chunks it is.
    """

    parts: TokenStore
    background: TokenStore
    layout: Layout

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def content_key(self) -> str:
        """A digest of texts, supporting facts, tokenizer and of how documents are drawn."""
        keys = f"{self.parts.content_key} {self.background.content_key} {self.layout.key}"
        return hashlib.sha256(keys.encode()).hexdigest()[:32]

    @property
    def truncated_questions(self) -> int:
        """Questions that were cut."""
        return self.parts.truncated_questions

    @property
    def truncated_chunks(self) -> int:
        """Facts and background texts that were cut."""
        return self.parts.truncated_chunks + self.background.truncated_chunks

    @property
    def chunk_texts(self) -> int:
        """How many facts and background texts there are."""
        return self.parts.chunk_texts + self.background.chunk_texts

    @property
    def chunk_counts(self) -> np.ndarray:
        """Chunks of each sample, `[samples]`."""
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
        """One sample's tokens in an epoch."""
        question, facts, support = self.parts.document(sample)
        places, background = self.layout(sample, epoch)
        fact_at = dict(zip(places.tolist(), facts, strict=True))
        between = iter(background.tolist())
        chunks = [
            # The text before its first chunk is the question of that one sample.
            fact_at[i] if i in fact_at else self.background.text(1 + next(between))
            for i in range(self.layout.chunks)
        ]
        return DocumentTokens(question, chunks, np.sort(places[support]))


def tokenise_redrawn(
    samples: RedrawnSamples,
    tokenizer: TextTokenizer,
    *,
    max_question_tokens: int,
    max_chunk_tokens: int,
    cache: Path,
) -> RedrawnStore:
    """Tokens of the samples, as `tokens.tokenise` makes them."""
    texts = tuple(samples.background.tolist())
    background = Sample("background", "", texts, (), (), "")
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
