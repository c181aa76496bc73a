"""Background text: sentences of books, or of a function, in runs from random places.

Training and dev documents share no background sentence, except with `dev="shared"`. They draw from
different books or parts, and sentences that are in both are left out of dev.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import sentencex

from qrag_jax.data.records import read_text, text_files
from qrag_jax.data.sample import Split
from qrag_jax.errors import Count, InputError, Natural
from qrag_jax.runtime import own_code
from qrag_jax.runtime.whole_files import write_whole

RUN = 100  # most consecutive sentences, as in BABILong (Kuratov et al., 2024)
RECORD = "books.json"  # in the run's folder: digests of the books that it was trained on
SHARED = "shared"  # instead of a folder for dev: both splits draw from all books
# Where no books are named; never a file of the working folder, which nobody named either.
WORLD = f"{own_code.own_folder(own_code.EXAMPLES)}/worlds/records.py:sentences"
# Dev's share of a folder's sentences. It is more than half: training documents have tens of
# sentences, but scored documents have tens of thousands of different ones.
DEV_SHARE = 0.6
# The splitter treats a quotation as one sentence, so quotation marks are removed, and single ones
# at the end of a sentence, which would begin the next one. It must see no other single marks: after
# an elision ("'gan", "'tis") it would search pages for the closing mark.
_QUOTATION_MARKS = re.compile(r"""["“”]|(?<=[.!?])['’](?=["“”\s]|$)""")
_HIDDEN = str.maketrans("'‘’", "ʼʻʽ")
_SHOWN = str.maketrans("ʼʻʽ", "'‘’")
CODE_BOOK = 1000  # sentences of a function that count as a book
CODE_STEP = 5000  # pool sizes of a function's sentences are multiples of this


# ---------------------------------------------------------------- books


@dataclasses.dataclass(frozen=True, eq=False)
class Book:
    name: str  # of its file
    sentences: list[str]


def sentences_of(text: str) -> list[str]:
    """The sentences with a letter of an English text, without double quotation marks."""
    parts = sentencex.segment("en", _QUOTATION_MARKS.sub("", text).translate(_HIDDEN))
    sentences = (" ".join(part.translate(_SHOWN).split()) for part in parts)
    return [sentence for sentence in sentences if any(map(str.isalpha, sentence))]


def read_books(folder: str, field: str) -> tuple[Book, ...]:
    """The books with a sentence, by name; the same object as long as no file changes."""
    stats = [(file.name, file.stat()) for file in text_files(Path(folder))]
    books = _read_books(folder, tuple((n, s.st_mtime_ns, s.st_size) for n, s in stats))
    if not books:
        raise InputError(
            f'{folder} has no book with a sentence; put .txt files there, or set {field}=""'
        )
    return books


@functools.lru_cache(maxsize=4)
def _read_books(folder: str, stamp: tuple[tuple[str, int, int], ...]) -> tuple[Book, ...]:
    books = [Book(name, sentences_of(read_text(Path(folder) / name))) for name, _, _ in stamp]
    return tuple(book for book in books if book.sentences)


def split_books(books: Sequence[Book], split: Split) -> list[Book]:
    """The books of one split, at least one of two; dev gets about `DEV_SHARE` of all sentences.

    From the longest book to the shortest, each goes to the split that is further below its share.
    """
    sizes, parts = Counter[str](), {"train": list[Book](), "dev": list[Book]()}
    for book in sorted(books, key=lambda book: (-len(book.sentences), book.name)):
        dev_lacks = sizes["dev"] * (1 - DEV_SHARE) <= sizes["train"] * DEV_SHARE
        part = "dev" if dev_lacks else "train"
        sizes[part] += len(book.sentences)
        parts[part].append(book)
    return sorted(parts[split], key=lambda book: book.name)


# ---------------------------------------------------------------- the noise of a split


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentsConfig:
    """Fields of the sections `data.sources.NAME` of sources that make their own documents."""

    source: ClassVar[str] = "babilong"
    noise: str = ""  # folder of books, or FILE.py:FUNCTION; "": of an invented world
    noise_dev: str = ""  # folder of books for dev; "": held-out books of noise; "shared": all
    noise_repeats: Natural = 1  # how often a document may use one sentence, 0: any number
    seed: Natural = 0  # seed of all random draws
    train: Count = 10_000  # documents made for training (of babilong: if it has no files)
    dev: Count = 1_000  # documents made for evaluation
    redraw: bool = True  # training: draw new noise and places in every epoch

    @property
    def section(self) -> str:
        return f"config.data.sources.{self.source}"

    @property
    def code(self) -> str:
        """The function that gives the sentences; "": books do."""
        spec = self.noise or WORLD
        return spec if own_code.is_own_code(spec) else ""


@dataclasses.dataclass(frozen=True, eq=False)
class Noise:
    """The sentences that documents of one split draw from."""

    name: str
    sentences: np.ndarray  # `[sentences]` array of str, book after book
    shelf: Shelf  # the places of the sentences in their books
    left_out: int = 0  # further sentences, which training has

    @functools.cached_property
    def content(self) -> str:
        digest = hashlib.sha256(self.shelf.starts.tobytes())
        for sentence in self.sentences:
            digest.update(sentence.encode() + b"\n")
        return digest.hexdigest()

    @property
    def summary(self) -> str:
        more = f" ({self.left_out:,} more left out, training has them)" if self.left_out else ""
        return f"{len(self.sentences):,} noise sentences of {self.name}{more}"


def noise(config: DocumentsConfig, split: Split, count: int, train_chunks: int = 100) -> Noise:
    """The noise for documents of one split; each document takes `count` sentences of it.

    Dev must not use sentences of training, whose documents have `train_chunks` chunks.
    """
    pool, repeats = _noise(config, split, count, train_chunks), config.noise_repeats
    if repeats and count > (most := len(pool.sentences) * repeats):
        raise InputError(
            f"the noise of {pool.name} gives {most} sentences ({len(pool.sentences)}, each "
            f"{repeats} times at most), but a document asks for {count}; add books, lower the "
            f"number of chunks, or raise {config.section}.noise_repeats (0: any number)."
        )
    return pool


def _noise(config: DocumentsConfig, split: Split, count: int, train_chunks: int) -> Noise:
    # A document needs so many different sentences; of a function a quarter more is taken, so that
    # documents differ.
    least = math.ceil(count / config.noise_repeats) if config.noise_repeats else 1
    size = math.ceil(max(least * 5 // 4, 1) / CODE_STEP) * CODE_STEP
    asked = (config.code, split, config.seed)
    if split == "train" or config.noise_dev == SHARED:
        return _of_code(*asked, size) if config.code else _pool(*books_of(config, "train"))
    train = _noise(config, "train", train_chunks, 0)
    if config.noise_dev or not config.code:
        return _without(_pool(*books_of(config, "dev")), train, config.section)
    while True:  # until the function has no more
        left = _without(_of_code(*asked, size), train, config.section)
        if len(left.sentences) >= least:
            return left
        size += CODE_STEP


def books_of(config: DocumentsConfig, split: Split) -> tuple[str, tuple[Book, ...]]:
    """The books that documents of a split draw from, and their name; no book of a function."""
    own = split == "dev" and config.noise_dev not in ("", SHARED)
    if config.code and not own:
        return "", ()
    folder = config.noise_dev if own else config.noise
    books = read_books(folder, f"{config.section}.{'noise_dev' if own else 'noise'}")
    if config.noise_dev:
        return folder, books
    if len(books) < 2:
        raise InputError(
            f"{folder} has one book, and evaluation needs another; give {config.section}.noise_dev."
        )
    part = tuple(split_books(books, split))
    return f"{folder} ({len(part)} of {len(books)} books, for {split})", part


@functools.lru_cache(maxsize=8)
def _without(pool: Noise, train: Noise, section: str) -> Noise:
    """The pool without the sentences that training has."""
    known = set(train.sentences)
    kept = np.array([text not in known for text in pool.sentences], bool)
    if not kept.any():
        raise InputError(
            f"training has all dev noise of {pool.name}; give {section}.noise_dev others."
        )
    starts = np.concatenate([[0], np.cumsum(kept)])[pool.shelf.starts]
    shelf = Shelf(np.unique(starts))  # without books that have no sentence left
    return Noise(pool.name, pool.sentences[kept], shelf, int(len(kept) - kept.sum()))


@functools.lru_cache(maxsize=8)
def _of_code(spec: str, split: Split, seed: int, count: int) -> Noise:
    known, more = _asked(spec, split, seed)
    known.extend(itertools.islice(more, max(count - len(known), 0)))
    if len(known) < count:
        raise InputError(
            f"the function of noise gives {len(known)} of {count} needed sentences; give more."
        )
    parts = [known[i : min(i + CODE_BOOK, count)] for i in range(0, count, CODE_BOOK)]
    name = Path(spec.rpartition(":")[0]).name
    return _pool(name, tuple(Book("", part) for part in parts))


@functools.cache
def _asked(spec: str, split: Split, seed: int) -> tuple[list[str], Iterator[str]]:
    """What a user's function has given so far, for all pools, and what gives more."""
    code = own_code.load(spec, "the noise", ("split", "seed"))
    return [], iter(code.function(split=split, seed=seed))


@functools.lru_cache(maxsize=8)
def _pool(name: str, books: tuple[Book, ...]) -> Noise:
    texts = np.array([text for book in books for text in book.sentences], object)
    sizes = [len(book.sentences) for book in books]
    return Noise(name, texts, Shelf(np.cumsum([0, *sizes], dtype=np.int64)))


# ---------------------------------------------------------------- what a run was trained on


# If a book is added to a folder, a training book may become a dev book. So a run keeps the digests
# of its training books, and scoring compares.
def write_books(workdir: Path, backgrounds: Sequence[DocumentsConfig]) -> None:
    found = {config.source: _digests(config, "train") for config in backgrounds}
    if any(found.values()):
        write_whole(workdir / RECORD, json.dumps(found, indent=1) + "\n")


def check_unseen(workdir: Path, backgrounds: Sequence[DocumentsConfig]) -> None:
    """Refuses dev books that the run in `workdir` was trained on, if its record says so."""
    path = workdir / RECORD
    if not path.exists():
        return
    trained = json.loads(path.read_text())
    for config in backgrounds:
        if config.noise_dev == SHARED:
            continue
        # Books that are still training books do no harm: `noise` takes their sentences out of dev.
        now = set(_digests(config, "train").values())
        known = set(trained.get(config.source, {}).values()) - now
        dev = _digests(config, "dev")
        if seen := [name for name, digest in dev.items() if digest in known]:
            raise InputError(
                f"{workdir} was trained among {len(seen)} of these books, such as {seen[0]} "
                f"({RECORD}): give {config.section}.noise as it was then, and others as "
                f"{config.section}.noise_dev."
            )


def _digests(config: DocumentsConfig, split: Split) -> dict[str, str]:
    return {
        book.name: hashlib.sha256("\n".join(book.sentences).encode()).hexdigest()[:32]
        for book in books_of(config, split)[1]
    }


# ---------------------------------------------------------------- places


@dataclasses.dataclass(frozen=True, eq=False)
class Shelf:
    """The places of the sentences of several books, without their texts."""

    starts: np.ndarray  # `[books + 1]` int64, where each book begins; last the number of places

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Shelf, (self.starts,)  # a worker computes the runs again

    def draw(self, rng: np.random.Generator, count: int, repeats: int = 1) -> np.ndarray:
        """Places of the background of one document, in the order drawn.

        Runs of at most `RUN` consecutive sentences begin at random places of random books.
        """
        places = self._anywhere(rng, count)
        if repeats:
            places = places[_earlier(places) < repeats]
        found = places[:count]
        while len(found) < count:
            used = np.bincount(found, minlength=len(self))
            free = used < repeats if repeats else used >= 0
            more = self._runs(free)(rng, count - len(found))
            if repeats:
                more = more[_earlier(more) + used[more] < repeats]
            found = np.concatenate([found, more[: count - len(found)]])
        return found

    @functools.cached_property
    def _anywhere(self) -> Callable[[np.random.Generator, int], np.ndarray]:
        return self._runs(np.ones(len(self), bool))

    def _runs(self, free: np.ndarray) -> Callable[[np.random.Generator, int], np.ndarray]:
        """Draws runs over the free places, bool `[sentences]`; some may be drawn twice."""
        # A run ends at the end of its book, or before the next place that is not free.
        ends = np.where(free, len(free), np.arange(len(free)))
        inner = self.starts[1:-1]
        ends[inner - 1] = np.minimum(ends[inner - 1], inner)
        ends = np.minimum.accumulate(ends[::-1])[::-1]
        places = np.flatnonzero(free)  # where a run may begin
        lengths = np.minimum(ends[places] - places, RUN)
        firsts = np.searchsorted(places, self.starts)  # where each book begins in `places`
        sizes, typical = np.diff(firsts), lengths.mean()
        books = np.flatnonzero(sizes)

        def draw(rng: np.random.Generator, count: int) -> np.ndarray:
            runs = int(count / typical * 1.1) + 2
            book = books[rng.integers(len(books), size=runs)]
            spot = firsts[book] + rng.integers(sizes[book])
            length = lengths[spot]
            within = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
            return np.repeat(places[spot], length) + within

        return draw


def _earlier(values: np.ndarray) -> np.ndarray:
    """How often each value has appeared earlier in the array, `[values]`."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.searchsorted(ordered, ordered)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values)) - first
    return ranks
