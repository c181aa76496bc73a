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
from typing import Any, NamedTuple

import numpy as np

from qrag_jax.data.noise import Shelf
from qrag_jax.data.sample import LazySamples, Sample
from qrag_jax.data.tokens import DocumentTokens, TextTokenizer, TokenStore, tokenise

SHOWN = 200  # documents that `chunk_lengths` measures


# Background without a shelf: these sentences, repeated in this order.
FILLER = (
    "The kettle is on the stove.",
    "Rain falls on the roof.",
    "The road leads up the hill.",
    "Nothing happens for a while.",
    "Then all of it begins once more.",
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the documents of a set are put together. It is small: every worker has a copy.

    Attributes:
        seeds: what all documents' draws begin from: a seed, the split, the length and the like.
    """

    chunks: int
    seeds: tuple[int, ...]
    numbers: Sequence[int]  # of each document, the last word of its seed
    facts: Sequence[int]
    in_order: bool
    shelf: Shelf | None  # where background is drawn from; None: it is `FILLER`
    repeats: int  # how often a document may use one background text; 0 for any number

    @property
    def key(self) -> str:
        """A text that distinguishes this layout from all others."""
        starts = None if self.shelf is None else self.shelf.starts.tolist()
        fields = (self.chunks, self.seeds, *map(tuple, (self.numbers, self.facts)), self.in_order)
        return hashlib.sha256(repr((*fields, starts, self.repeats)).encode()).hexdigest()

    def __call__(self, index: int, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The layout of one document in one epoch, the same at every call.

        Args:
            epoch: None: the document is drawn once for all epochs.

        Returns:
            places `[F]`: the chunk index of each fact. background `[C - F]`: the indices of the
            background texts that are the other chunks, in document order.
        """
        again = () if epoch is None else (1 + epoch,)
        rng = np.random.default_rng((*self.seeds, self.numbers[index], *again))
        return self.drawn(rng, self.facts[index])

    def drawn(self, rng: np.random.Generator, facts: int) -> tuple[np.ndarray, np.ndarray]:
        """A layout that this generator draws, of so many facts."""
        places = rng.choice(self.chunks, size=facts, replace=False)
        places = np.sort(places) if self.in_order else places
        count = self.chunks - facts
        if self.shelf is None:
            return places, np.arange(count) % len(FILLER)
        return places, self.shelf.draw(rng, count, self.repeats)


class Fit(NamedTuple):
    """How many questions of a split fit documents of a length.

    Attributes:
        most: the limit. If several lengths are scored, it is the smallest length for all of them.
    """

    fits: int  # number of questions with at most `most` facts
    stories: int
    most: int

    def __str__(self) -> str:
        return f"fits {self.fits:,} of {self.stories:,}"


class Documents(NamedTuple):
    """Documents of one length, how many questions fit it, and a line on them for the screen."""

    samples: Sequence[Sample]
    fit: Fit
    line: str


class RedrawnSamples(LazySamples):
    """Samples that differ between epochs: indexing gives the first epoch, `drawn` any epoch.

    Args:
        parts: the samples with only their facts as chunks; `support` refers to these chunks.
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
    """The sample of a document that is put together from facts and background."""
    texts = np.empty(len(places) + len(background), object)
    is_background = np.ones(len(texts), bool)
    is_background[places] = False
    texts[is_background] = background
    texts[places] = facts.chunks
    support = tuple(int(places[i]) for i in facts.support)
    return dataclasses.replace(facts, chunks=tuple(texts.tolist()), support=support)


@dataclasses.dataclass(frozen=True)
class RedrawnStore:
    """Tokens of redrawn samples (see `tokens.Tokens`): each fact and background text once."""

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
    samples: RedrawnSamples, tokenizer: TextTokenizer, **limits: Any
) -> RedrawnStore:
    """Returns the tokens of redrawn samples; for arguments and errors see `tokens.tokenise`."""
    texts = tuple(samples.background.tolist())
    background = Sample("background", "", texts, support=(), answers=(), source="")
    parts = tokenise(samples.parts, tokenizer, **limits)
    return RedrawnStore(parts, tokenise([background], tokenizer, **limits), samples.layout)
