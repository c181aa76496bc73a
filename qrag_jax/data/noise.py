"""Background text: sentences of books, or of an invented world, in runs from random places."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencex

from qrag_jax.data.synthetic import Split, SyntheticConfig, passages_at
from qrag_jax.data.text_files import read_text, text_files
from qrag_jax.errors import InputError

RUN = 100  # consecutive sentences at most, as in BABILong (Kuratov et al., 2024)
INVENTED_BOOK = 1000  # sentences
INVENTED_STEP = 5000  # the invented world's pools are multiples of this
# The splitter takes what is between quotation marks for one sentence. It must not see single ones
# either: after an elision ("'gan", "'tis") it would look for the closing one for pages. Those that
# end a sentence are left out, since else they would begin the next one.
_QUOTATION_MARKS = re.compile(r"""["“”]|(?<=[.!?])['’](?=["“”\s]|$)""")
_HIDDEN = str.maketrans("'‘’", "ʼʻʽ")
_SHOWN = str.maketrans("ʼʻʽ", "'‘’")


@dataclasses.dataclass(frozen=True, eq=False)
class Noise:
    """The sentences of several books.

    Attributes:
        name: what they are called in messages; source: whose fields messages name.
        sentences: `[sentences]` array of str, book after book.
        starts: `[books + 1]` int64, where each book begins in `sentences`.
    """

    name: str
    sentences: np.ndarray
    starts: np.ndarray
    source: str = "babilong"

    def check(self, count: int, repeats: int) -> None:
        """Refuses documents that need more sentences than there are.

        Raises:
            InputError: fewer than `count` sentences can be had with `repeats` uses of each.
        """
        most = len(self.sentences) * repeats
        if repeats and count > most:
            raise InputError(
                f"the noise of {self.name} gives {most} sentences ({len(self.sentences)}, each "
                f"{repeats} times at most), but a document asks for {count}; add books, lower the "
                f"number of chunks, or raise config.data.{self.source}.noise_repeats (0: any "
                "number)."
            )

    def draw(self, rng: np.random.Generator, count: int, repeats: int = 1) -> np.ndarray:
        """Places in `sentences` of the noise of one document, in the order drawn.

        Runs of at most `RUN` consecutive sentences begin at random places of random books.

        Args:
            rng: source of the draws.
            count: sentences.
            repeats: times that one place may be used, 0 for any number.

        Returns:
            `[count]` int64.

        Raises:
            InputError: see `check`.
        """
        self.check(count, repeats)
        places = self._anywhere.draw(rng, count)
        if repeats:
            places = places[_earlier(places) < repeats]
        found = places[:count]
        while len(found) < count:
            used = np.bincount(found, minlength=len(self.sentences))
            free = used < repeats if repeats else used >= 0
            more = self._runs(free).draw(rng, count - len(found))
            if repeats:
                more = more[_earlier(more) + used[more] < repeats]
            found = np.concatenate([found, more[: count - len(found)]])
        return found

    @functools.cached_property
    def _anywhere(self) -> _Runs:
        return self._runs(np.ones(len(self.sentences), bool))

    def _runs(self, free: np.ndarray) -> _Runs:
        """The runs over the places that are free, `[sentences]` bool."""
        # A run ends with its book, and before the next place that is not free.
        ends = np.where(free, len(free), np.arange(len(free)))
        inner = self.starts[1:-1]
        ends[inner - 1] = np.minimum(ends[inner - 1], inner)
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        places = np.flatnonzero(free)
        lengths = np.minimum(ends[places] - places, RUN)
        return _Runs(places, lengths, np.searchsorted(places, self.starts))


class _Runs:
    """Runs of places to draw from.

    Args:
        places: `[free]` where a run may begin, ascending; lengths: `[free]` how long it is.
        firsts: `[books + 1]` where each book begins in `places`.
    """

    def __init__(self, places: np.ndarray, lengths: np.ndarray, firsts: np.ndarray) -> None:
        self._places, self._lengths, self._firsts = places, lengths, firsts
        self._sizes = np.diff(firsts)
        self._books = np.flatnonzero(self._sizes)
        self._typical = lengths.mean()

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """About `count` places or some more, at random and thus perhaps some of them twice."""
        runs = int(count / self._typical * 1.1) + 2
        book = self._books[rng.integers(len(self._books), size=runs)]
        spot = self._firsts[book] + rng.integers(self._sizes[book])
        length = self._lengths[spot]
        within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return np.repeat(self._places[spot], length) + within


def noise(
    path: str, split: Split, count: int, repeats: int, seed: int, source: str = "babilong"
) -> Noise:
    """The noise for documents of `count` sentences.

    Args:
        path: folder of books (`*.txt`, `*.txt.gz`), or "" for sentences of an invented world.
        split: the invented worlds of "train" and "dev" share no invented word; books are shared.
        repeats: times that a document may use one sentence; 0 for any number.
        seed: of the invented world.
        source: of the documents, for messages.

    Raises:
        InputError: the folder has no books or not a sentence, a book cannot be read, or there
            are too few sentences.
    """
    if path:
        pool = _books(path, _stamp(Path(path)))
    else:
        # A quarter more than is asked for, so that documents differ.
        need = -(-count // repeats) * 5 // 4 if repeats else 1
        pool = _invented(split, seed, -(-max(need, 1) // INVENTED_STEP) * INVENTED_STEP)
    pool = dataclasses.replace(pool, source=source)
    pool.check(count, repeats)
    return pool


def sentences_of(text: str) -> list[str]:
    """The sentences of an English text without quotation marks, white space collapsed.

    Single marks stay but at the end of a sentence. What has no letter is left out.
    """
    parts = sentencex.segment("en", _QUOTATION_MARKS.sub("", text).translate(_HIDDEN))
    sentences = (" ".join(part.translate(_SHOWN).split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalpha, sentence))]


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of the books: what the cache is good for."""
    files = text_files(folder)
    if not files:
        raise InputError(
            f"the noise folder {folder} has no books; put .txt or .txt.gz files there, or set "
            'config.data.babilong.noise="" for invented sentences.'
        )
    stats = [file.stat() for file in files]
    return tuple((f.name, s.st_mtime_ns, s.st_size) for f, s in zip(files, stats, strict=True))


@functools.lru_cache(maxsize=4)
def _books(path: str, stamp: tuple[tuple[str, int, int], ...]) -> Noise:
    folder = Path(path)
    books = [sentences_of(read_text(folder / name)) for name, _, _ in stamp]
    if not any(books):
        raise InputError(f"the books in the noise folder {folder} have no sentence; add others.")
    return _pool(str(folder), [book for book in books if book])


def _earlier(values: np.ndarray) -> np.ndarray:
    """How often each value appears before its place, `[values]`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - first
    return ranks


def _pool(name: str, books: Sequence[Sequence[str]]) -> Noise:
    texts = np.array([text for book in books for text in book], object)
    return Noise(name, texts, np.cumsum([0, *map(len, books)], dtype=np.int64))


@functools.lru_cache(maxsize=4)
def _invented(split: Split, seed: int, count: int) -> Noise:
    texts = _Invented.of(split, seed).first(count)
    books = [texts[i : i + INVENTED_BOOK] for i in range(0, count, INVENTED_BOOK)]
    return _pool("the invented world", books)


class _Invented:
    """The sentences of the passages of an invented world, as many as were ever asked for."""

    def __init__(self, split: Split, seed: int) -> None:
        self._made: list[str] = []
        self._more = self._passages(split, SyntheticConfig(seed=seed))

    @staticmethod
    @functools.cache
    def of(split: Split, seed: int) -> _Invented:
        """The one instance of a world, whose sentences all its pools share."""
        return _Invented(split, seed)

    def first(self, count: int) -> list[str]:
        while len(self._made) < count:
            self._made.extend(next(self._more))
        return self._made[:count]

    @staticmethod
    def _passages(split: Split, config: SyntheticConfig) -> Iterator[list[str]]:
        index = 0
        while True:
            for _, sentences in passages_at(config, split, index).paragraphs:
                yield sentences
            index += 1
