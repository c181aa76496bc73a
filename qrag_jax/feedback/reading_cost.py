"""What a search by words reads for a query: entries of its inverted index.

For each different word of the query the index has an entry of each passage with this word, and
reads them all (Zobel and Moffat, "Inverted Files for Text Search Engines", ACM Computing Surveys
38, 2006). The words of most passages make nearly all of these entries, and tell hardly any passages
apart.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from qrag_jax.data.generators.function_words import words_of


@dataclasses.dataclass(frozen=True)
class Entries:
    """The entries of a collection's words.

    Attributes:
        passages: how many passages have each word; words are in small letters.
    """

    passages: Mapping[str, int]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Entries:
        """Counts the words of the passages' texts."""
        counts = Counter[str]()
        for text in texts:
            counts.update(_words(text))
        return cls(counts)

    def read(self, query: str) -> int:
        """Entries that a search for the query reads; each word counts once."""
        return sum(self.passages.get(word, 0) for word in _words(query))

    def share(self, query: str, original: str) -> float:
        """Entries read for a query, in those that the original query reads.

        Without a word in it a query costs what the original does, so that nothing is won by writing
        nothing; so does any query where the original reads nothing.
        """
        all_read = self.read(original)
        return self.read(query) / all_read if all_read and _words(query) else 1.0


def _words(text: str) -> set[str]:
    return {word.lower() for word in words_of(text)}
