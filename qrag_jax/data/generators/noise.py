"""Background text: sentences of books, or of an invented world, in runs from random places.

Training and dev documents share no background sentence, except with `dev="shared"`. They draw from
different books or worlds, and sentences that are in both are left out of dev.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from qrag_jax.data.generators.books import Book, read_books, split_books
from qrag_jax.data.generators.shelf import Shelf
from qrag_jax.data.generators.synthetic import Split, SyntheticConfig, passages_at
from qrag_jax.errors import InputError

SHARED = "shared"  # instead of a folder for dev: both splits draw from all books
INVENTED_BOOK = 1000  # sentences
INVENTED_STEP = 5000  # pool sizes of the invented world are multiples of this


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
    """Where background text comes from.

    Attributes:
        train: folder of books, or "" for sentences of an invented world.
        dev: folder of books for dev documents. "": the books of `train` are split (see
            `split_books`), or each split has its own invented world. "shared": no book is held
            out, as in runs made before this field existed.
        repeats: how often a document may use one sentence; 0 for any number.
        seed: seed of the invented worlds.
        train_chunks: length of a training document. It determines how many sentences of the
            invented world are training sentences, which dev must not use.
        source: source of the documents, for messages.
    """

    train: str = ""
    dev: str = ""
    repeats: int = 1
    seed: int = 0
    train_chunks: int = 100
    source: str = "babilong"

    @property
    def section(self) -> str:
        """The config section of these fields."""
        return f"config.data.sources.{self.source}"

    @property
    def is_shared(self) -> bool:
        """Whether both splits draw from all books."""
        return self.dev == SHARED


@dataclasses.dataclass(frozen=True, eq=False)
class Noise:
    """The sentences that documents of one split draw from.

    Attributes:
        name: name of the sentences in messages.
        sentences: `[sentences]` array of str, book after book.
        starts: `[books + 1]` int64, where each book begins in `sentences`.
        source: the source whose config fields messages name.
        left_out: number of further sentences of the books, left out because training has them.
    """

    name: str
    sentences: np.ndarray
    starts: np.ndarray
    source: str = "babilong"
    left_out: int = 0

    @functools.cached_property
    def shelf(self) -> Shelf:
        """The places of the sentences in their books."""
        return Shelf(self.starts)

    @functools.cached_property
    def content(self) -> str:
        """A digest of the sentences and of the books' limits."""
        digest = hashlib.sha256(self.starts.tobytes())
        for sentence in self.sentences:
            digest.update(sentence.encode() + b"\n")
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        """One line for the screen: how many sentences there are, and how many were left out."""
        line = f"{len(self.sentences):,} noise sentences of {self.name}"
        if self.left_out:
            line += f" ({self.left_out:,} more left out, training has them)"
        return line

    def check(self, count: int, repeats: int) -> None:
        """Refuses documents that need more sentences than there are."""
        most = len(self.sentences) * repeats
        if repeats and count > most:
            raise InputError(
                f"the noise of {self.name} gives {most} sentences ({len(self.sentences)}, each "
                f"{repeats} times at most), but a document asks for {count}; add books, lower the "
                f"number of chunks, or raise config.data.sources.{self.source}.noise_repeats (0: "
                "any number)."
            )

    def draw(self, rng: np.random.Generator, count: int, repeats: int = 1) -> np.ndarray:
        """Indices in `sentences` of the noise of one document; see `Shelf.draw`."""
        self.check(count, repeats)
        return self.shelf.draw(rng, count, repeats)


def noise(config: NoiseConfig, split: Split, count: int) -> Noise:
    """The noise for documents of one split; each document takes `count` sentences of it."""
    pool = _train(config, count) if split == "train" else _dev(config, count)
    pool.check(count, config.repeats)
    return pool


def books_of(config: NoiseConfig, split: Split) -> tuple[Book, ...]:
    """The books that documents of a split draw from; none if the noise is invented."""
    own = split == "dev" and config.dev not in ("", SHARED)
    return _books(config, split)[1] if own or config.train else ()


def _train(config: NoiseConfig, count: int) -> Noise:
    if not config.train:
        return _invented("train", config.seed, _made(_least(config, count)), config.source)
    return _of_books(*_books(config, "train"), config.source)


def _dev(config: NoiseConfig, count: int) -> Noise:
    least = _least(config, count)
    if config.dev == SHARED:
        if config.train:
            return _train(config, count)
        return _invented("dev", config.seed, _made(least), config.source)
    train = _train(config, config.train_chunks)
    if config.dev or config.train:
        return _without(_of_books(*_books(config, "dev"), config.source), train)
    for made in itertools.count(_made(least), INVENTED_STEP):
        left = _without(_invented("dev", config.seed, made, config.source), train)
        if len(left.sentences) >= least:
            return left
    raise AssertionError("an invented world has no end")


def _least(config: NoiseConfig, count: int) -> int:
    """How many sentences a pool must have."""
    return -(-count // config.repeats) if config.repeats else 1


def _made(least: int) -> int:
    """How many sentences to invent: a quarter more than needed, so that documents differ."""
    return -(-max(least * 5 // 4, 1) // INVENTED_STEP) * INVENTED_STEP


def _books(config: NoiseConfig, split: Split) -> tuple[str, tuple[Book, ...]]:
    """The name of a split's books for messages, and the books."""
    own = split == "dev" and config.dev not in ("", SHARED)
    folder = config.dev if own else config.train
    books = read_books(folder, f"{config.section}.{'noise_dev' if own else 'noise'}")
    if config.dev:
        return folder, books
    if len(books) < 2:
        raise InputError(
            f"the noise folder {folder} has one book, and training and evaluation need different "
            f"ones; add books, or set {config.section}.noise_dev to a folder of others."
        )
    part = tuple(split_books(books, split))
    return f"{folder} ({len(part)} of {len(books)} books, for {split})", part


@functools.lru_cache(maxsize=8)
def _without(pool: Noise, train: Noise) -> Noise:
    """The pool without the sentences that training has."""
    known = set(train.sentences)
    kept = np.array([text not in known for text in pool.sentences], bool)
    if not kept.any():
        raise InputError(
            f"training has every sentence of the dev noise {pool.name}; give "
            f"config.data.sources.{train.source}.noise_dev other books than noise."
        )
    starts = np.concatenate([[0], np.cumsum(kept)])[pool.starts]
    starts = np.unique(starts)  # drops books without a sentence left
    left_out = int(len(kept) - kept.sum())
    return dataclasses.replace(
        pool, sentences=pool.sentences[kept], starts=starts, left_out=left_out
    )


@functools.lru_cache(maxsize=8)
def _of_books(name: str, books: tuple[Book, ...], source: str) -> Noise:
    return _pool(name, [book.sentences for book in books], source)


@functools.lru_cache(maxsize=8)
def _invented(split: Split, seed: int, count: int, source: str) -> Noise:
    texts = _Invented.of(split, seed).first(count)
    books = [texts[i : i + INVENTED_BOOK] for i in range(0, count, INVENTED_BOOK)]
    return _pool("the invented world", books, source)


def _pool(name: str, books: Sequence[Sequence[str]], source: str) -> Noise:
    texts = np.array([text for book in books for text in book], object)
    return Noise(name, texts, np.cumsum([0, *map(len, books)], dtype=np.int64), source)


class _Invented:
    """The sentences of the passages of an invented world, made on demand and kept."""

    def __init__(self, split: Split, seed: int) -> None:
        self._made: list[str] = []
        self._more = self._passages(split, SyntheticConfig(seed=seed))

    @staticmethod
    @functools.cache
    def of(split: Split, seed: int) -> _Invented:
        """The only instance of a world; all pools of this world share its sentences."""
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
