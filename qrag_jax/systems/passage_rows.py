"""Reads passages of a stored corpus as rows of tokens, in pieces, ahead of the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.data.worker_process import read_ahead
from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.runtime.retriever_config import TITLE_SEPARATOR, passage_text

PIECE = 1024  # passages tokenised at a time


class Rows(NamedTuple):
    """Rows of tokens.

    tokens: int32 `[total]`, all rows one after the other, special tokens included.
    lengths: int32 `[rows]`.
    cut: number of passages that were longer than a row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    cut: int

    def each(self) -> list[np.ndarray]:
        """The rows, int32 `[length]` each."""
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


@dataclasses.dataclass(frozen=True)
class PassageRows:
    """Makes the rows of passages; the same in every thread and process.

    Attributes:
        folder: of the stored corpus; worker processes open it for themselves.
        opening: ids that every row begins with.
        row_tokens: length of the longest row, special tokens counted.
        title_separator: between title and text.
    """

    folder: Path
    tokenizer: TextTokenizer
    opening: tuple[int, ...]
    row_tokens: int
    title_separator: str = TITLE_SEPARATOR

    def of(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """The rows of the passages with these numbers."""
        passages = self._corpus.passages(numbers)
        texts = (passage_text(each.title, each.text, self.title_separator) for each in passages)
        encoded = self.tokenizer.encode([well_formed(text) for text in texts])
        kept = self.row_tokens - len(self.opening) - 1
        end = [self.tokenizer.sep_id]
        tokens: list[int] = []
        for ids in encoded:
            tokens += [*self.opening, *ids[:kept], *end]
        lengths = [len(self.opening) + min(len(ids), kept) + 1 for ids in encoded]
        cut = sum(len(ids) > kept for ids in encoded)
        return Rows(np.array(tokens, np.int32), np.array(lengths, np.int32), cut)

    def ahead(self, groups: Sequence[range], workers: int) -> Iterator[Rows]:
        """The rows of each group of passages in order, a few thousand of them made ahead.

        Args:
            groups: the numbers of the passages of each group; a group may be empty.
            workers: processes that tokenise; 0: threads do.
        """
        pieces = [
            group[start : start + PIECE]
            for group in groups
            for start in range(0, len(group), PIECE)
        ]
        made = iter(read_ahead(grain.MapDataset.source(pieces).map(self.of), workers))
        for group in groups:
            parts = [next(made) for _ in range(0, len(group), PIECE)]
            yield Rows(
                np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
                np.concatenate([np.zeros(0, np.int32), *(part.lengths for part in parts)]),
                sum(part.cut for part in parts),
            )

    @functools.cached_property
    def _corpus(self) -> StoredCorpus:
        return StoredCorpus(self.folder)

    def __getstate__(self) -> dict[str, object]:
        """Workers get everything but the open corpus."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
