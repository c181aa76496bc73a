"""Where each word stands in each passage: an inverted index with places, in NumPy arrays.

Words are BM25's, by their numbers in its vocabulary. The place of a word is how many words stand
before it in its passage, stop words counted, so that a stop word within a phrase leaves a gap. The
forms, which are the words as passages have them, are kept to find those that begin alike: a stemmed
word may be shorter than the beginning that is asked for.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qrag_jax.retrieval.bm25 import BM25Index, Words, texts_of
from qrag_jax.runtime import bounded_json, whole_files
from qrag_jax.runtime.whole_files import mapped_array

FORMS = "forms.json"
_ARRAYS = ("ends", "passages", "places", "words")


class Slot(NamedTuple):
    """A place of a phrase, and the numbers of the words of which one stands there."""

    place: int  # how many words the phrase's first one is before it
    words: np.ndarray  # int64 [n]


@dataclasses.dataclass(frozen=True)
class WordPlaces:
    """The occurrences of all words; those of word w lie from `ends[w]` to `ends[w + 1]`."""

    count: int
    ends: np.ndarray  # int64 `[words + 1]`; the first is 0
    passages: np.ndarray  # int32 `[occurrences]`: the passage of each, in order within a word
    places: np.ndarray  # int32 `[occurrences]`: its place there, in order within a passage
    forms: Sequence[str]  # in order, each once, without stop words
    words: np.ndarray  # int32 `[forms]`: the word that each counts as

    @classmethod
    def of(cls, index: BM25Index) -> WordPlaces:
        """Reads the corpus of an index once; at the end, memory holds 40 bytes for each occurrence.

        A KeyError is a word that the index lacks: another version of PyStemmer has built it.
        """
        words, numbers = Words(index.config), index.vocabulary
        known: dict[str, int] = {}  # form → number of its word; -1: a stop word
        ids, places, lengths = array.array("i"), array.array("i"), array.array("i")
        for text in texts_of(index.corpus):
            before = len(ids)
            for place, form in enumerate(words.forms(text)):
                number = known.get(form)
                if number is None:
                    word = words.word(form)
                    number = known[form] = -1 if word is None else numbers[word]
                if number >= 0:
                    ids.append(number)
                    places.append(place)
            lengths.append(len(ids) - before)
        flat = np.frombuffer(ids, np.int32) if ids else np.zeros(0, np.int32)
        order = np.argsort(flat, kind="stable")
        sizes = np.bincount(flat, minlength=len(numbers))
        passages = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        forms = sorted(form for form, number in known.items() if number >= 0)
        return cls(
            count=len(lengths),
            ends=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            passages=passages[order],
            places=np.array(places, np.int32)[order],
            forms=forms,
            words=np.array([known[form] for form in forms], np.int32),
        )

    def beginning(self, start: str) -> np.ndarray:
        """int64 `[n]`: the words, each once, that have a form with this beginning."""
        cut = len(start)
        low = bisect.bisect_left(self.forms, start, key=lambda form: form[:cut])
        high = bisect.bisect_right(self.forms, start, low, key=lambda form: form[:cut])
        return np.unique(self.words[low:high]).astype(np.int64)

    def having(self, words: np.ndarray) -> np.ndarray:
        """bool `[passages]`: those with one of these words."""
        mask = np.zeros(self.count, bool)
        for word in words:
            mask[self.passages[self.ends[word] : self.ends[word + 1]]] = True
        return mask

    def in_a_row(self, slots: Sequence[Slot]) -> np.ndarray:
        """bool `[passages]`: those with a phrase; its first slot has the place 0."""
        found: np.ndarray | None = None
        # The rarest first: each place only thins out what the ones before have left.
        for slot in sorted(slots, key=self._occurrences):
            starts = self._starts(slot)
            found = starts if found is None else found[_are_in(starts, found)]
        mask = np.zeros(self.count, bool)
        if found is not None:
            mask[found >> 32] = True
        return mask

    def save(self, folder: Path) -> None:
        """Writes the arrays as plain .npy files and the forms as JSON."""
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        text = json.dumps(list(self.forms), ensure_ascii=False)
        (folder / FORMS).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def open(cls, folder: Path, count: int) -> WordPlaces:
        """Maps what `save` wrote; the forms are read into memory."""
        arrays = {name: mapped_array(folder / f"{name}.npy") for name in _ARRAYS}
        forms = bounded_json.load(folder / FORMS, most=whole_files.MAX_WHOLE_BYTES)
        return cls(count=count, forms=forms, **arrays)

    def _occurrences(self, slot: Slot) -> int:
        return int(np.sum(self.ends[slot.words + 1] - self.ends[slot.words]))

    def _starts(self, slot: Slot) -> np.ndarray:
        """int64 `[n]`, in order: the starts of a phrase, passage above 32 bits, place below."""
        pieces = [np.zeros(0, np.int64)]
        for word in slot.words:
            span = slice(int(self.ends[word]), int(self.ends[word + 1]))
            # A start before its passage is no place of the phrase's first word, so it drops out.
            starts = self.places[span].astype(np.int64) - slot.place
            pieces.append((self.passages[span].astype(np.int64) << 32) + starts)
        return np.concatenate(pieces) if len(pieces) == 2 else np.sort(np.concatenate(pieces))


def _are_in(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """bool `[values]`: those that are in an array in order."""
    if not len(ordered):
        return np.zeros(len(values), bool)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[at] == values
