"""Documents of any length: stories or needles among background text.

BABILong (Kuratov et al., 2024) scatters the facts of bAbI stories; the needles have the settings of
RULER (Hsieh et al., 2024). Background are sentences of books, or of a function, in runs from random
places. Training and dev documents share no background sentence, except with `dev="shared"`. They
draw from different books or parts, and sentences that are in both are left out of dev.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from qrag_jax.data.records import read_lines, read_text, text_files
from qrag_jax.data.sample import SPLITS, LazySamples, Sample, Split, placed, world
from qrag_jax.data.sources import BABILONG, NIAH, sentences_of
from qrag_jax.errors import Count, InputError, Natural, one_of
from qrag_jax.runtime import own_code
from qrag_jax.runtime.config_fields import internal
from qrag_jax.runtime.whole_files import write_whole

RUN = 100  # most consecutive sentences, as in BABILong (Kuratov et al., 2024)
RECORD = "books.json"  # in the run's folder: digests of the books that it was trained on
SHARED = "shared"  # instead of a folder for dev: both splits draw from all books
# Where no books are named; never a file of the working folder, which nobody named either.
WORLD = f"{own_code.own_folder(own_code.EXAMPLES)}/worlds/records.py:sentences"
# Dev's share of a folder's sentences. It is more than half: training documents have tens of
# sentences, but scored documents have tens of thousands of different ones.
DEV_SHARE = 0.6
CODE_BOOK = 1000  # sentences of a function that count as a book
CODE_STEP = 5000  # pool sizes of a function's sentences are multiples of this


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
        runs = places[:count]
        while len(runs) < count:
            used = np.bincount(runs, minlength=len(self))
            free = used < repeats if repeats else used >= 0
            more = self._runs(free)(rng, count - len(runs))
            if repeats:
                more = more[_earlier(more) + used[more] < repeats]
            runs = np.concatenate([runs, more[: count - len(runs)]])
        return runs

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


# ---------------------------------------------------------------- facts among background
# Three things define a document: its parts (the question and the facts), the background texts that
# all documents share, and a layout, which says where the facts stand and which background texts are
# between them. A document that each epoch draws again keeps its parts. Texts and tokens
# (`tokens.TokenStore`) are composed in the same way.

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
    """How the documents of a set are put together. It is small: every worker has a copy."""

    chunks: int
    seeds: tuple[int, ...]  # what all draws begin from: a seed, the split, the length and the like
    numbers: Sequence[int]  # of each document, the last word of its seed
    facts: Sequence[int]
    in_order: bool
    shelf: Shelf | None  # where background is drawn from; None: it is `FILLER`
    repeats: int  # how often a document may use one background text; 0 for any number

    @property
    def key(self) -> str:
        starts = None if self.shelf is None else self.shelf.starts.tolist()
        of = (self.chunks, self.seeds, tuple(self.numbers), tuple(self.facts), self.in_order)
        return hashlib.sha256(repr((*of, starts, self.repeats)).encode()).hexdigest()

    def __call__(
        self, index: int, epoch: int | None = None, rng: np.random.Generator | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The layout of one document in one epoch; None: it is drawn once for all epochs.

        It is the chunk index of each fact, `[F]`, and the indices of the background texts that are
        the other chunks, `[C - F]`, in document order.
        """
        again, facts = () if epoch is None else (1 + epoch,), self.facts[index]
        rng = rng or np.random.default_rng((*self.seeds, self.numbers[index], *again))
        places = rng.choice(self.chunks, size=facts, replace=False)
        places, count = np.sort(places) if self.in_order else places, self.chunks - facts
        if self.shelf is None:
            return places, np.arange(count) % len(FILLER)
        return places, self.shelf.draw(rng, count, self.repeats)


class Documents(NamedTuple):
    samples: Sequence[Sample]
    fits: int  # questions of the split with no more facts than these documents can have
    stories: int  # all questions of the split
    line: str  # on the documents, for the screen


class RedrawnSamples(LazySamples):
    """Samples that differ between epochs; the chunks of `parts` are the facts alone."""

    def __init__(self, parts: Sequence[Sample], background: np.ndarray, layout: Layout) -> None:
        super().__init__(len(parts), lambda index: self.drawn(index, 0))
        self.parts, self.background, self.layout = parts, background, layout

    def drawn(self, index: int, epoch: int) -> Sample:
        index = range(len(self))[index]
        return composed(self.parts[index], *self.layout(index, epoch), self.background)


def composed(
    facts: Sample, places: np.ndarray, between: np.ndarray, background: np.ndarray
) -> Sample:
    """The sample of a document with its facts at `places`, and some of the background between."""
    chunks = placed(facts.chunks, places.tolist(), background[between].tolist())
    support = tuple(int(places[i]) for i in facts.support)
    return dataclasses.replace(facts, chunks=tuple(chunks), support=support)


# ---------------------------------------------------------------- books


@dataclasses.dataclass(frozen=True, eq=False)
class Book:
    name: str  # of its file
    sentences: list[str]


def _book(path: Path) -> Book:
    return Book(path.name, sentences_of(read_text(path)))


def read_once(read: Callable[[Path], Any], path: Path) -> Any:
    """What is in a file, which is read again only if it has changed."""
    stat = path.stat()
    return _read_once(read, path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _read_once(read: Callable[[Path], Any], path: Path, modified: int, size: int) -> Any:
    return read(path)


def split_books(books: Sequence[Book], split: Split) -> list[Book]:
    """The books of one split, at least one of two; dev gets about `DEV_SHARE` of all sentences.

    From the longest book to the shortest, each goes to the split that is further below its share.
    """
    sizes, parts = {"train": 0, "dev": 0}, {"train": list[Book](), "dev": list[Book]()}
    for book in sorted(books, key=lambda book: (-len(book.sentences), book.name)):
        dev_lacks = sizes["dev"] * (1 - DEV_SHARE) <= sizes["train"] * DEV_SHARE
        part = "dev" if dev_lacks else "train"
        sizes[part] += len(book.sentences)
        parts[part].append(book)
    return sorted(parts[split], key=lambda book: book.name)


# ---------------------------------------------------------------- the noise of a split


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
            f"the noise of {pool.name} gives {most} sentences, but a document asks for {count}; "
            f"add books, lower chunks, or raise {config.section}.noise_repeats (0: any number)."
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
    apart = split == "dev" and config.noise_dev not in ("", SHARED)
    if config.code and not apart:
        return "", ()
    folder = config.noise_dev if apart else config.noise
    every = (read_once(_book, file) for file in text_files(Path(folder)))
    if not (books := tuple(book for book in every if book.sentences)):
        field = f"{config.section}.{'noise_dev' if apart else 'noise'}"
        raise InputError(f'{folder} has no sentence; put .txt files there, or set {field}=""')
    if config.noise_dev:
        return folder, books
    if len(books) < 2:
        raise InputError(f"{folder} has one book; give {config.section}.noise_dev others.")
    part = tuple(split_books(books, split))
    return f"{folder} ({len(part)} of {len(books)} books, for {split})", part


@functools.lru_cache(maxsize=8)
def _without(pool: Noise, train: Noise, section: str) -> Noise:
    """The pool without the sentences that training has."""
    known = set(train.sentences)
    kept = np.array([text not in known for text in pool.sentences], bool)
    if not kept.any():
        raise InputError(f"training has all dev noise of {pool.name}; change {section}.noise_dev.")
    starts = np.concatenate([[0], np.cumsum(kept)])[pool.shelf.starts]
    shelf = Shelf(np.unique(starts))  # without books that have no sentence left
    return Noise(pool.name, pool.sentences[kept], shelf, int(len(kept) - kept.sum()))


@functools.lru_cache(maxsize=8)
def _of_code(spec: str, split: Split, seed: int, count: int) -> Noise:
    known, more = _asked(spec, split, seed)
    known.extend(itertools.islice(more, max(count - len(known), 0)))
    if len(known) < count:
        raise InputError(f"the noise's function gives {len(known)} of {count} sentences; give all")
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
    books = {config.source: _digests(config, "train") for config in backgrounds}
    if any(books.values()):
        write_whole(workdir / RECORD, json.dumps(books, indent=1) + "\n")


def check_unseen(workdir: Path, backgrounds: Sequence[DocumentsConfig]) -> None:
    """Refuses dev books that the run in `workdir` was trained on, if its record says so."""
    path = workdir / RECORD
    trained = json.loads(path.read_text()) if path.exists() else {}
    for config in backgrounds:
        if config.source not in trained or config.noise_dev == SHARED:
            continue
        # Books that are still training books do no harm: `noise` takes their sentences out of dev.
        now = _digests(config, "train").values()
        known = {*trained[config.source].values()}.difference(now)
        dev = _digests(config, "dev").items()
        if seen := [name for name, digest in dev if digest in known]:
            raise InputError(
                f"{workdir} was trained among {len(seen)} of these books, such as {seen[0]}: give "
                f"{config.section}.noise as it was then, or others as {config.section}.noise_dev."
            )


def _digests(config: DocumentsConfig, split: Split) -> dict[str, str]:
    texts = {book.name: "\n".join(book.sentences) for book in books_of(config, split)[1]}
    return {n: hashlib.sha256(text.encode()).hexdigest()[:32] for n, text in texts.items()}


# ---------------------------------------------------------------- stories

# A line of a story file of the bAbI tasks (Weston et al., 2015) is `ID sentence` or
# `ID question<TAB>answer<TAB>supporting ids`. Ids start again at 1 with each story. A story has
# several questions.

TASKS = tuple(f"qa{number}" for number in range(1, 21))
FOLDER = "babi"  # name of the stories' folder in a parent folder that sources share
# The names of the parts that may serve as a split; the first one there is read. Of the official 1k
# and 10k sets only the `en-valid` forms have a validation part.
PARTS: dict[str, tuple[str, ...]] = {"train": ("train",), "dev": ("valid", "dev", "test")}
_LINE = re.compile(r"([0-9]{1,9}) +(\S.*)", re.DOTALL)


def find_story_file(folder: Path, task: str, split: Split) -> tuple[Path, str] | None:
    """The file of a task's split, and the name of the part: train, valid, dev or test.

    It is `qa1_train.txt` or the official `qa1_single-supporting-fact_train.txt`, gzip'd or not.
    """
    for place in (folder, folder / FOLDER):
        files = text_files(place) if place == folder or place.is_dir() else []
        for part, file in itertools.product(PARTS[split], files):
            if re.fullmatch(rf"{task}(_.*)?_{part}\.txt(\.gz)?", file.name):
                return file, part
    return None


def read_stories(path: Path) -> list[Sample]:
    """A sample for each question of a file, in its order; chunks are the statements before it."""
    stories: list[Sample] = []
    facts: list[str] = []
    places: dict[str, int] = {}  # id of a statement → its index in `facts`
    last = 0
    for number, line in read_lines(path):
        parsed = _LINE.fullmatch(line)
        this, text = (int(parsed[1]), parsed[2]) if parsed else (0, "")
        in_order = this == 1 or 0 < last < this
        if this == 1:
            facts, places = [], {}
        question, *rest = (part.strip() for part in text.split("\t"))
        is_fact = not rest and not question.endswith("?")
        answer, named = (*rest, "", "")[:2]
        ids = named.split()
        sound = is_fact or (question and answer and ids and places.keys() >= {*ids})
        if not in_order or not sound:
            raise InputError(
                f"{path}, line {number}, is not an id, from 1 upwards in each story, and a "
                "statement, or question, tab, answer, tab, ids of statements before; mend it."
            )
        last = this
        if is_fact:
            places[str(this)] = len(facts)
            facts.append(question)
            continue
        support, chunks = tuple(sorted({places[name] for name in ids})), tuple(facts)
        stories.append(Sample("", question, chunks, support, (answer,), BABILONG))
    if not stories:
        raise InputError(f"{path} has no question; give a bAbI file.")
    return stories


@dataclasses.dataclass(frozen=True)
class BabilongConfig(DocumentsConfig):
    """Section `data.sources.babilong`: which documents to make."""

    task: Annotated[str, one_of(TASKS)] = "qa1"  # without story files qa1 to qa5
    chunks: Count = 100  # C, sentences per document, facts included
    # Stories with more facts than this are left out; 0: those with more than C. To compare several
    # lengths on the same stories, set it to the smallest length.
    most_facts: Natural = 0
    stories: str = internal("")  # folder of bAbI files (data.path); "": stories are generated


def stories(config: BabilongConfig, split: Split) -> tuple[str, str, Sequence[Sample]]:
    """Where they are from, the split's name in sample ids, and all stories, however long."""
    if not config.stories:
        count = config.train if split == "train" else config.dev
        parts = world("stories.py").generate(config.task, split, count, config.seed)
        return "the generator", split, parts
    pair = find_story_file(Path(config.stories), config.task, split)
    if pair is None:
        wanted = " or ".join(f"{config.task}_{part}.txt" for part in PARTS[split])
        raise InputError(f"{config.stories} has no {wanted} (or .txt.gz); put the file there.")
    path, part = pair
    return str(path), part, read_once(read_stories, path)


def babilong_documents(
    config: BabilongConfig, split: Split, chunks: int = 0, count: int = 0
) -> Documents:
    """Documents of exactly `chunks` chunks, of the first `count` stories that fit; 0: of all.

    They depend on the config, the split, the length and the story's number alone. With
    `config.redraw`, noise and places of those of training change with the epoch.
    """
    chunks = chunks or config.chunks
    origin, part, items = stories(config, split)
    most = min(chunks, config.most_facts or chunks)
    kept = [i for i, story in enumerate(items) if len(story.chunks) <= most]
    fits = len(kept)
    if not kept:
        raise InputError(
            f"no {config.task} story of {origin} fits {most} chunks; raise {config.section}.chunks "
            f"or most_facts to {min(len(story.chunks) for story in items)} at least."
        )
    line = f"{BABILONG}: {len(kept):,} of {len(items):,} {config.task} stories"
    line += f" of {Path(origin).name}, {chunks} chunks each"
    if len(kept) < len(items):
        line += f" (left out: {len(items) - len(kept):,} with more than {most} facts)"
    if 0 < count < len(kept):
        kept = kept[:count]
        line += f"; the first {count}"
    parts = [dataclasses.replace(items[i], id=f"{config.task}-{part}-{i}") for i in kept]
    facts = [len(story.chunks) for story in parts]
    pool = noise(config, split, chunks - min(facts), config.chunks)
    seeds = (config.seed, SPLITS.index(split), int(config.task.removeprefix("qa")), chunks)
    layout = Layout(chunks, seeds, kept, facts, True, pool.shelf, config.noise_repeats)
    if split == "train" and config.redraw:
        line += f"; drawn again in every epoch; {pool.summary}"
        return Documents(RedrawnSamples(parts, pool.sentences, layout), fits, len(items), line)
    content = f"{hashlib.sha256(repr(parts).encode()).hexdigest()} {pool.content}"
    texts = pool.sentences
    samples = LazySamples(len(parts), lambda i: composed(parts[i], *layout(i), texts), content)
    return Documents(samples, fits, len(items), f"{line}; {pool.summary}")


# ---------------------------------------------------------------- needles

CHARACTERS_PER_TOKEN = 4  # roughly, in English prose


class Preset(NamedTuple):
    """One of RULER's tasks."""

    # Between the needles: "noise" (the same sentences over and over), "essay" (book sentences) or
    # "needle" (needles with other keys)
    haystack: str = "essay"
    keys: int = 1  # number of hidden keys, RULER's num_needle_k
    values: int = 1  # number of values of each key, RULER's num_needle_v
    queries: int = 1  # number of keys that are asked for, RULER's num_needle_q
    key_type: str = "words"
    value_type: str = "numbers"


PRESETS = {
    "single_1": Preset("noise"),
    "single_2": Preset(),
    "single_3": Preset(value_type="uuids"),
    "multikey_1": Preset(keys=4),
    "multikey_2": Preset("needle"),
    "multikey_3": Preset("needle", key_type="uuids", value_type="uuids"),
    "multivalue": Preset(values=4),
    "multiquery": Preset(keys=4, queries=4),
}


@dataclasses.dataclass(frozen=True)
class NiahConfig(DocumentsConfig):
    """Section `data.sources.niah`: which documents to make if there are no files."""

    # multivalue, multiquery, single_1 to _3 or multikey_1 to _3
    preset: Annotated[str, one_of(PRESETS)] = "multivalue"
    chunks: Natural = 0  # C, sentences per document; 0: as many as make up `tokens`
    tokens: Count = 4096  # approximate length of a document; used if chunks is 0
    source: ClassVar[str] = NIAH

    @property
    def knobs(self) -> Preset:
        return PRESETS[self.preset]


def niah_documents(config: NiahConfig, split: Split, chunks: int = 0, count: int = 0) -> Documents:
    """Documents of one length with one question each, as `babilong_documents`.

    The needles stay from epoch to epoch. The question of a dev document is the same at every
    length.
    """
    knobs = config.knobs
    chunks = chunks or config.chunks or _chunks_of_tokens(config, split)
    needles = knobs.keys * knobs.values
    if needles > chunks:
        raise InputError(f"{needles} needles, {chunks} chunks: raise {config.section}.chunks.")
    every = config.train if split == "train" else config.dev
    size = min(every, count or every)
    redraws = split == "train" and config.redraw
    line = f"{NIAH}: made {size:,} {split} documents" + ", drawn again in every epoch" * redraws
    texts, shelf, content = np.array(FILLER, object), None, ""
    if knobs.haystack == "essay":
        pool = _books(config, split, chunks - needles)
        texts, shelf, content = pool.sentences, pool.shelf, pool.content
        line += f"; {pool.summary}"
    hidden = chunks if knobs.haystack == "needle" else needles
    seeds = (config.seed, SPLITS.index(split), chunks)
    layout = Layout(chunks, seeds, range(size), [hidden] * size, False, shelf, config.noise_repeats)
    hide = world("needles.py").hide
    if redraws:
        parts = LazySamples(size, lambda index: hide(config, split, chunks, index)[0])
        return Documents(RedrawnSamples(parts, texts, layout), every, every, line)

    def make(index: int) -> Sample:
        facts, rng = hide(config, split, chunks, index)
        return composed(facts, *layout(index, rng=rng), texts)

    return Documents(LazySamples(size, make, content), every, every, line)


def _books(config: NiahConfig, split: Split, count: int) -> Noise:
    of_train = split == "dev" and (config.chunks or _chunks_of_tokens(config, "train"))
    return noise(config, split, count, of_train)


def _chunks_of_tokens(config: NiahConfig, split: Split) -> int:
    """How many sentences of the haystack make up `config.tokens`."""
    knobs = config.knobs
    texts: Sequence[str] = FILLER
    if knobs.haystack == "essay":
        texts = _books(config, split, 1).sentences.tolist()
    elif knobs.haystack == "needle":
        texts = world("needles.py").needles(knobs, np.random.default_rng(0), 100)
    characters = sum(map(len, texts)) / len(texts) + 1  # 1 for a space
    return max(round(config.tokens * CHARACTERS_PER_TOKEN / characters), 1)
