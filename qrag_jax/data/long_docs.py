"""Documents of any length: stories or needles among background text.

BABILong (Kuratov et al., 2024) scatters the facts of bAbI stories; the needles have the settings of
RULER (Hsieh et al., 2024).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from qrag_jax.data import babi
from qrag_jax.data.noise import Noise, NoiseConfig, noise
from qrag_jax.data.redrawn import FILLER, Documents, Fit, Layout, RedrawnSamples, composed
from qrag_jax.data.sample import SPLITS, LazySamples, Sample, Split
from qrag_jax.data.scripted import world
from qrag_jax.data.sources import BABILONG, NIAH
from qrag_jax.errors import Count, InputError, Natural, one_of
from qrag_jax.runtime.config_fields import internal

# ---------------------------------------------------------------- stories


@dataclasses.dataclass(frozen=True)
class BabilongConfig:
    """Section `data.sources.babilong`: which documents to make."""

    task: str = "qa1"  # qa1 to qa20; without story files qa1 to qa5
    chunks: Count = 100  # C, sentences per document, facts included
    noise: str = ""  # folder of books, or FILE.py:FUNCTION; "": of an invented world
    noise_repeats: Natural = 1  # how often a document may use one sentence, 0: any number
    seed: Natural = 0  # seed of places, background and generated stories
    train: Count = 10_000  # stories generated for training if there are no files
    dev: Count = 1_000  # stories generated for evaluation if there are no files
    # Stories with more facts than this are left out; 0: those with more than C. To compare several
    # lengths on the same stories, set it to the smallest length.
    most_facts: Natural = 0
    stories: str = internal("")  # folder of bAbI files (data.path); "": stories are generated
    noise_dev: str = ""  # folder of books for dev; "": held-out books of noise; "shared": all
    redraw: bool = True  # training: draw new noise and places in every epoch

    @property
    def background(self) -> NoiseConfig:
        """The settings of the background text."""
        return NoiseConfig(
            self.noise, self.noise_dev, self.noise_repeats, self.seed, self.chunks, source=BABILONG
        )


@dataclasses.dataclass(frozen=True)
class Stories:
    """The stories of one split."""

    origin: str  # the file that they were read from, or "the generator"
    part: str  # name of the split in sample ids: train, valid, dev or test
    items: Sequence[babi.Story]

    def sample(self, task: str, number: int) -> Sample:
        """A story without noise."""
        story = self.items[number]
        return Sample(
            id=f"{task}-{self.part}-{number}",
            question=story.question,
            chunks=tuple(story.facts),
            support=tuple(sorted(set(story.support))),
            answers=(story.answer,),
            source=BABILONG,
        )


def stories(config: BabilongConfig, split: Split) -> Stories:
    """All stories of a split, however long."""
    if not config.stories:
        count = config.train if split == "train" else config.dev
        items = world("stories.py").generate(config.task, split, count, config.seed)
        return Stories("the generator", split, items)
    path, part = babi.story_file(Path(config.stories), config.task, split)
    stat = path.stat()
    return Stories(str(path), part, _read_stories(path, stat.st_mtime_ns, stat.st_size))


@functools.lru_cache(maxsize=4)
def _read_stories(path: Path, modified: int, size: int) -> list[babi.Story]:
    return babi.read_stories(path)


def babilong_documents(
    config: BabilongConfig, split: Split, chunks: int = 0, count: int = 0
) -> Documents:
    """Documents of exactly `chunks` chunks, one for each story that fits, in the stories' order.

    They depend only on the config, the split, the length and the story's number. With
    `config.redraw`, those of training also depend on the epoch: noise and places change, but the
    story and the order of its facts stay.

    Args:
        count: number of documents, those of the first stories that fit; 0: all.
    """
    chunks = chunks or config.chunks
    every = stories(config, split)
    most = min(chunks, config.most_facts or chunks)
    kept = [i for i, story in enumerate(every.items) if len(story.facts) <= most]
    fit = Fit(len(kept), len(every.items), most)
    if not kept:
        least = min(len(story.facts) for story in every.items)
        raise InputError(
            f"no {config.task} story of {every.origin} fits {most} chunks (the shortest has "
            f"{least} facts); raise config.data.sources.babilong.chunks or most_facts."
        )
    line = f"{BABILONG}: {len(kept):,} of {len(every.items):,} {config.task} stories"
    line += f" of {Path(every.origin).name}, {chunks} chunks each"
    if len(kept) < len(every.items):
        line += f" (left out: {len(every.items) - len(kept):,} with more than {most} facts)"
    if 0 < count < len(kept):
        kept = kept[:count]
        line += f"; the first {count}"
    facts = tuple(len(every.items[i].facts) for i in kept)
    pool = noise(config.background, split, chunks - min(facts))
    task = int(config.task.removeprefix("qa"))
    seeds = (config.seed, SPLITS.index(split), task, chunks)
    layout = Layout(
        chunks, seeds, kept, facts, in_order=True, shelf=pool.shelf, repeats=config.noise_repeats
    )
    parts = LazySamples(len(kept), lambda index: every.sample(config.task, kept[index]))
    if split == "train" and config.redraw:
        line += f"; drawn anew in every epoch; {pool.summary}"
        return Documents(RedrawnSamples(parts, pool.sentences, layout), fit, line)
    digest = hashlib.sha256(repr(every.items).encode()).hexdigest()

    def make(index: int) -> Sample:
        places, background = layout(index)
        return composed(parts[index], places, pool.sentences[background])

    samples = LazySamples(len(kept), make, f"{digest} {pool.content}")
    return Documents(samples, fit, f"{line}; {pool.summary}")


# ---------------------------------------------------------------- needles


HAYSTACKS = ("noise", "essay", "needle")
TYPES = ("words", "numbers", "uuids")
SINGULAR = {"words": "word", "numbers": "number", "uuids": "uuid"}
CHARACTERS_PER_TOKEN = 4  # roughly, in English prose


class Preset(NamedTuple):
    """One of RULER's tasks.

    Attributes:
        haystack: the text between the needles: "noise" (the same sentences over and over), "essay"
            (book sentences) or "needle" (needles with other keys).
    """

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
class NiahConfig:
    """Section `data.sources.niah`: which documents to make if there are no files."""

    # multivalue, multiquery, single_1 to _3 or multikey_1 to _3
    preset: Annotated[str, one_of(PRESETS)] = "multivalue"
    keys: Natural = 0  # num_needle_k, raised to queries if lower; 0: the preset's
    values: Natural = 0  # num_needle_v, values of each key; 0: the preset's
    queries: Natural = 0  # num_needle_q, keys asked for; 0: the preset's
    # noise (a few sentences over and over), essay or needle; "": the preset's
    haystack: Annotated[str, one_of(("", *HAYSTACKS))] = ""
    key_type: Annotated[str, one_of(("", *TYPES))] = ""  # words, numbers or uuids; "": the preset's
    # words, numbers or uuids; "": the preset's
    value_type: Annotated[str, one_of(("", *TYPES))] = ""
    chunks: Natural = 0  # C, sentences per document; 0: as many as make up `tokens`
    tokens: Count = 4096  # approximate length of a document; used if chunks is 0
    noise: str = ""  # folder of books, or FILE.py:FUNCTION; "": of an invented world
    noise_repeats: Natural = 1  # how often a document may use one sentence, 0: any number
    seed: Natural = 0  # seed of all random draws
    train: Count = 10_000  # documents made for training
    dev: Count = 1_000  # documents made for evaluation
    noise_dev: str = ""  # folder of books for dev; "": held-out books of noise; "shared": all
    redraw: bool = True  # training: draw a new haystack and new places in every epoch

    @property
    def knobs(self) -> Preset:
        """The preset with the config's values in place of its own; `keys` is at least `queries`."""
        given = {name: getattr(self, name) for name in Preset._fields}
        knobs = PRESETS[self.preset]._replace(**{n: v for n, v in given.items() if v})
        return knobs._replace(keys=max(knobs.keys, knobs.queries))

    @property
    def background(self) -> NoiseConfig | None:
        """The source of the haystack; None if it has no text of books or of an invented world."""
        if self.knobs.haystack != "essay":
            return None
        return NoiseConfig(self.noise, self.noise_dev, self.noise_repeats, self.seed, source=NIAH)


def niah_documents(config: NiahConfig, split: Split, chunks: int = 0, count: int = 0) -> Documents:
    """Documents of one length with one question each.

    A document depends only on the config, the split, the length and its number. With
    `config.redraw`, training documents also depend on the epoch: haystack and places change, but
    the needles stay. The question of a dev document is the same at every length.
    """
    knobs = config.knobs
    chunks = chunks or config.chunks or _chunks_of_tokens(config, split)
    needles = knobs.keys * knobs.values
    if needles > chunks:
        raise InputError(
            f"{needles} needles (keys × values) do not fit {chunks} chunks; raise "
            "config.data.sources.niah.chunks or config.data.sources.niah.tokens."
        )
    every = config.train if split == "train" else config.dev
    number, fit = min(every, count) if count else every, Fit(every, every, chunks)
    redraws = split == "train" and config.redraw
    line = f"{NIAH}: made {number:,} {split} documents" + ", drawn anew in every epoch" * redraws
    background, shelf, content = np.array(FILLER, object), None, ""
    if knobs.haystack == "essay":
        pool = _books(config, split, chunks - needles)
        background, shelf = pool.sentences, pool.shelf
        line += f"; {pool.summary}"
        content = "" if redraws else pool.content
    hidden = chunks if knobs.haystack == "needle" else needles
    seeds = (config.seed, SPLITS.index(split), chunks)
    layout = Layout(
        chunks,
        seeds,
        range(number),
        [hidden] * number,
        in_order=False,
        shelf=shelf,
        repeats=config.noise_repeats,
    )
    if redraws:
        parts = LazySamples(number, lambda index: _facts(config, split, chunks, index)[0])
        return Documents(RedrawnSamples(parts, background, layout), fit, line)

    def make(index: int) -> Sample:
        facts, rng = _facts(config, split, chunks, index)
        places, hay = layout.drawn(rng, hidden)
        return composed(facts, places, background[hay])

    return Documents(LazySamples(number, make, content), fit, line)


def _books(config: NiahConfig, split: Split, count: int) -> Noise:
    settings = config.background
    assert settings is not None
    if split == "dev":
        chunks = config.chunks or _chunks_of_tokens(config, "train")
        settings = dataclasses.replace(settings, train_chunks=chunks)
    return noise(settings, split, count)


def _chunks_of_tokens(config: NiahConfig, split: Split) -> int:
    """How many sentences of the haystack make up `config.tokens`."""
    knobs = config.knobs
    if knobs.haystack == "essay":
        texts = _books(config, split, 1).sentences
    elif knobs.haystack == "noise":
        texts = np.array(FILLER, object)
    else:
        texts = np.array(_needles(knobs, *_hidden(knobs, np.random.default_rng(0), 100)), object)
    characters = sum(map(len, texts)) / len(texts) + 1  # 1 for a space
    return max(round(config.tokens * CHARACTERS_PER_TOKEN / characters), 1)


def _facts(
    config: NiahConfig, split: Split, chunks: int, index: int
) -> tuple[Sample, np.random.Generator]:
    """A document's needles and question, and the generator for its remaining draws."""
    knobs = config.knobs
    meant = knobs.keys * knobs.values
    others = chunks - meant if knobs.haystack == "needle" else 0
    rng = np.random.default_rng((config.seed, SPLITS.index(split), chunks, index))
    if split == "train":
        keys, values = _hidden(knobs, rng, others)
    else:
        # Their generator does not depend on the length, so every length has the same question.
        alone = np.random.default_rng((config.seed, SPLITS.index(split), 0, index))
        keys, values = _hidden(knobs, alone, 0)
        keys += _further(knobs.key_type, rng, others, keys)
        values += _further(knobs.value_type, rng, others, values)
    asked = keys[: knobs.queries]
    support = tuple(place for place in range(meant) if keys[place] in asked)
    facts = Sample(
        id=f"niah_{config.preset}-{split}-{index}",
        question=_question(knobs, asked),
        chunks=tuple(_needles(knobs, keys, values)),
        support=support,
        answers=tuple(values[i] for i in support),
        source=NIAH,
    )
    return facts, rng


def _further(kind: str, rng: np.random.Generator, count: int, known: list[str]) -> list[str]:
    """`count` more texts, different from each other and from `known`."""
    if not count:
        return []
    return [text for text in distinct(kind, rng, count + len(known)) if text not in known][:count]


def _hidden(knobs: Preset, rng: np.random.Generator, others: int) -> tuple[list[str], list[str]]:
    """Key and value of each needle: first those of `knobs`, then `others` with further keys."""
    keys = distinct(knobs.key_type, rng, knobs.keys + others)
    keys = keys[: knobs.keys] * knobs.values + keys[knobs.keys :]
    return keys, distinct(knobs.value_type, rng, len(keys))


def _needles(knobs: Preset, keys: list[str], values: list[str]) -> list[str]:
    kind = knobs.value_type
    return [
        f"One of the special magic {kind} for {key} is: {value}."
        for key, value in zip(keys, values, strict=True)
    ]


def _question(knobs: Preset, asked: list[str]) -> str:
    *first, last = asked
    query = f"{', '.join(first)}{',' * (len(first) > 1)} and {last}" if first else last
    if knobs.values * len(asked) == 1:
        kind = SINGULAR[knobs.value_type]
        return f"What is the special magic {kind} for {query} mentioned in the provided text?"
    kind = knobs.value_type
    return f"What are all the special magic {kind} for {query} mentioned in the provided text?"


# ---------------------------------------------------------------- keys and values


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST = _listed(
    "amber ancient bitter blunt bold brave brisk broken calm careful clever cold crimson crisp "
    "curious damp dark deep distant dusty eager early faint famous fancy fierce fluent fresh "
    "gentle giant glad golden grand grave happy heavy hidden hollow humble icy idle jolly keen "
    "kind late lazy little lively lone loud lucky mellow mild misty modest narrow nimble noble "
    "odd pale patient plain polite proud quick quiet rapid rare rough round rusty secret sharp "
    "silent simple slim smooth solid stern tidy"
)
SECOND = _listed(
    "anchor apple arrow badger barrel beacon bell bridge bucket button cabin candle canoe carpet "
    "castle cedar chimney clock cloud compass copper coral cradle curtain desert dragon drum "
    "eagle engine falcon feather ferry fiddle forest fountain garden glacier hammer harbor helmet "
    "island jacket kettle ladder lantern lemon letter magnet maple market meadow mirror mountain "
    "needle ocean orchard otter paddle parrot pebble pillow planet pocket pumpkin rabbit ribbon "
    "river saddle sailor shadow spoon stable statue tailor temple thimble tunnel turtle valley "
    "window"
)


def distinct(kind: str, rng: np.random.Generator, count: int) -> list[str]:
    """`count` different words ("quiet-falcon"), numbers of seven digits, or UUIDs."""
    if kind == "uuids":
        digits = rng.bytes(16 * count).hex()
        return [str(uuid.UUID(digits[i : i + 32], version=4)) for i in range(0, 32 * count, 32)]
    if kind == "numbers":
        return [str(10**6 + n) for n in _numbers(kind, rng, 9 * 10**6, count)]
    pairs = len(FIRST) * len(SECOND)
    if count <= pairs:
        numbers, word = _numbers(kind, rng, pairs, count), _pair
    else:
        numbers, word = _numbers(kind, rng, pairs * len(FIRST), count), _triple
    return [word(number) for number in numbers]


def _pair(number: int) -> str:
    first, second = divmod(number, len(SECOND))
    return f"{FIRST[first]}-{SECOND[second]}"


def _triple(number: int) -> str:
    first, rest = divmod(number, len(FIRST) * len(SECOND))
    return f"{FIRST[first]}-{_pair(rest)}"


def _numbers(kind: str, rng: np.random.Generator, space: int, count: int) -> list[int]:
    if count > space:
        raise InputError(
            f"a document asks for {count} different {kind}, but there are {space}; set "
            "config.data.sources.niah.key_type or value_type to uuids."
        )
    return rng.choice(space, size=count, replace=False).tolist()
