"""What every engine of search offers, and what goes in and out.

Inside, a passage is its number: its place in the corpus, from 0. Outside, it is its name, the id
that the corpus's own file gives it. Engines rank by score, and passages of equal scores by number.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import passage_text

NONE = -1  # in the place of a passage's number: the corpus, or the filter, had no more passages

# Field of the passages' metadata → the value, or the values of which one will do.
Where = Mapping[str, Any]


class Passage(NamedTuple):
    """One passage of a corpus."""

    name: str  # the id in the corpus's file
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = {}  # further fields, as JSON has them

    @property
    def whole(self) -> str:
        """Title and text, as words are searched; see `passage_text`."""
        return passage_text(self.title, self.text)


class Corpus(Protocol):
    """Passages by number."""

    digest: str  # of all names, titles, texts and metadata, in order

    def __len__(self) -> int:
        """The number of passages."""

    def passages(self, numbers: Sequence[int] | np.ndarray) -> list[Passage]:
        """The passages with these numbers."""

    def matching(self, where: Where) -> np.ndarray:
        """bool `[passages]`: those whose metadata agree with every field of `where`."""


@dataclasses.dataclass(frozen=True)
class Queries:
    """A batch of queries; an engine reads what it searches by.

    Attributes:
        texts: for engines that compare words.
        vectors: float32 `[queries, width]`, for those that compare vectors; None: there are none.
    """

    texts: Sequence[str]
    vectors: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.texts)


class Hits(NamedTuple):
    """The best passages of each query, best first.

    Where a query has fewer than k passages, the rest is `NONE` with the score -inf.
    """

    numbers: np.ndarray  # int64 [queries, k]
    scores: np.ndarray  # float32 [queries, k]


class Index(Protocol):
    """An engine with a corpus in it."""

    corpus: Corpus

    def search(self, queries: Queries, k: int, where: Where | None = None) -> Hits:
        """The k passages with the highest scores, of those whose metadata agree with `where`."""


class VectorIndex(Index, Protocol):
    """An engine that compares vectors, and gives them back."""

    def vectors(self, numbers: Sequence[int] | np.ndarray) -> np.ndarray:
        """float32 `[len(numbers), width]`: the passages' vectors."""


def engine_library(module: str, package: str, extra: str) -> Any:
    """A module.

    Args:
        package: that it is installed with, as in `pip install package`.
        extra: ours that asks for this package; also the engine's name.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"files and indexes of {extra} need the package {package}: run pip install "
            f"'qrag_jax[{extra}]', or use the engine exact."
        ) from None
