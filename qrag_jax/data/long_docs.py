"""Documents of any length: stories or needles among background text.

BABILong (Kuratov et al., 2024) scatters the facts of bAbI stories; the needles have the settings of
RULER (Hsieh et al., 2024).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from qrag_jax.data.noise import DocumentsConfig, Noise, Shelf, noise
from qrag_jax.data.records import read_lines, text_files
from qrag_jax.data.sample import SPLITS, LazySamples, Sample, Split, placed, world
from qrag_jax.data.sources import BABILONG, NIAH
from qrag_jax.errors import Count, InputError, Natural, one_of
from qrag_jax.runtime.config_fields import internal

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

    def __call__(self, index: int, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The layout of one document in one epoch; None: it is drawn once for all epochs.

        It is the chunk index of each fact, `[F]`, and the indices of the background texts that are
        the other chunks, `[C - F]`, in document order.
        """
        again = () if epoch is None else (1 + epoch,)
        rng = np.random.default_rng((*self.seeds, self.numbers[index], *again))
        return self.drawn(rng, self.facts[index])

    def drawn(self, rng: np.random.Generator, facts: int) -> tuple[np.ndarray, np.ndarray]:
        """A layout that this generator draws, of so many facts."""
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


@dataclasses.dataclass(frozen=True, slots=True)
class Story:
    """One question with the statements before it."""

    facts: tuple[str, ...]  # in order, without the questions in between
    question: str
    answer: str
    support: tuple[int, ...]  # indices into `facts`, in the order of the supporting ids in the file


def find_story_file(folder: Path, task: str, split: Split) -> tuple[Path, str] | None:
    """The file of a task's split, and the name of the part: train, valid, dev or test.

    It is `qa1_train.txt` or the official `qa1_single-supporting-fact_train.txt`, gzip'd or not.
    """
    for place in (folder, folder / FOLDER):
        files = text_files(place) if place == folder or place.is_dir() else []
        for part in PARTS[split]:
            pattern = re.compile(rf"{task}(_.*)?_{part}\.txt(\.gz)?")
            for file in files:
                if pattern.fullmatch(file.name):
                    return file, part
    return None


def read_stories(path: Path) -> list[Story]:
    """Returns one story for each question of a file, in its order."""
    stories: list[Story] = []
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
        support = tuple(places[name] for name in ids)
        stories.append(Story(tuple(facts), question, answer, support))
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


def stories(config: BabilongConfig, split: Split) -> tuple[str, str, Sequence[Story]]:
    """Where they are from, the split's name in sample ids, and all stories, however long."""
    if not config.stories:
        count = config.train if split == "train" else config.dev
        made = world("stories.py").generate(config.task, split, count, config.seed)
        return "the generator", split, made
    found = find_story_file(Path(config.stories), config.task, split)
    if found is None:
        wanted = " or ".join(f"{config.task}_{part}.txt" for part in PARTS[split])
        raise InputError(
            f"the folder {config.stories} has no {wanted} (or .txt.gz); put the file there."
        )
    path, part = found
    stat = path.stat()
    return str(path), part, _read_once(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _read_once(path: Path, modified: int, size: int) -> list[Story]:
    return read_stories(path)


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
    kept = [i for i, story in enumerate(items) if len(story.facts) <= most]
    fits = len(kept)
    if not kept:
        raise InputError(
            f"no {config.task} story of {origin} fits {most} chunks; raise "
            "config.data.sources.babilong.chunks or most_facts to at least "
            f"{min(len(story.facts) for story in items)}."
        )
    line = f"{BABILONG}: {len(kept):,} of {len(items):,} {config.task} stories"
    line += f" of {Path(origin).name}, {chunks} chunks each"
    if len(kept) < len(items):
        line += f" (left out: {len(items) - len(kept):,} with more than {most} facts)"
    if 0 < count < len(kept):
        kept = kept[:count]
        line += f"; the first {count}"
    facts = tuple(len(items[i].facts) for i in kept)
    pool = noise(config, split, chunks - min(facts), config.chunks)
    seeds = (config.seed, SPLITS.index(split), int(config.task.removeprefix("qa")), chunks)
    layout = Layout(chunks, seeds, kept, facts, True, pool.shelf, config.noise_repeats)

    def alone(index: int) -> Sample:
        story = items[kept[index]]
        name, support = f"{config.task}-{part}-{kept[index]}", tuple(sorted(set(story.support)))
        facts = tuple(story.facts)
        return Sample(name, story.question, facts, support, (story.answer,), BABILONG)

    if split == "train" and config.redraw:
        line += f"; drawn again in every epoch; {pool.summary}"
        parts = LazySamples(len(kept), alone)
        redrawn = RedrawnSamples(parts, pool.sentences, layout)
        return Documents(redrawn, fits, len(items), line)
    content = f"{hashlib.sha256(repr(items).encode()).hexdigest()} {pool.content}"
    samples = LazySamples(
        len(kept), lambda index: composed(alone(index), *layout(index), pool.sentences), content
    )
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
        raise InputError(
            f"{needles} needles do not fit {chunks} chunks; raise config.data.sources.niah.chunks."
        )
    every = config.train if split == "train" else config.dev
    number = min(every, count) if count else every
    redraws = split == "train" and config.redraw
    line = f"{NIAH}: made {number:,} {split} documents" + ", drawn again in every epoch" * redraws
    background, shelf, content = np.array(FILLER, object), None, ""
    if knobs.haystack == "essay":
        pool = _books(config, split, chunks - needles)
        background, shelf, content = pool.sentences, pool.shelf, "" if redraws else pool.content
        line += f"; {pool.summary}"
    hidden = chunks if knobs.haystack == "needle" else needles
    seeds = (config.seed, SPLITS.index(split), chunks)
    facts = [hidden] * number
    layout = Layout(chunks, seeds, range(number), facts, False, shelf, config.noise_repeats)
    hide = world("needles.py").hide
    if redraws:
        parts = LazySamples(number, lambda index: hide(config, split, chunks, index)[0])
        return Documents(RedrawnSamples(parts, background, layout), every, every, line)

    def make(index: int) -> Sample:
        facts, rng = hide(config, split, chunks, index)
        return composed(facts, *layout.drawn(rng, hidden), background)

    return Documents(LazySamples(number, make, content), every, every, line)


def _books(config: NiahConfig, split: Split, count: int) -> Noise:
    own = split == "dev"
    return noise(
        config, split, count, own and (config.chunks or _chunks_of_tokens(config, "train"))
    )


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
