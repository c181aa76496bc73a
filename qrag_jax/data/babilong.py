"""BABILong (Kuratov et al., 2024): bAbI stories scattered over background text, at any length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.data import babi_stories
from qrag_jax.data.babi import Split, Story, read_stories, story_file
from qrag_jax.data.lazy_samples import LazySamples
from qrag_jax.data.noise import Noise, noise
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError

NAME = "babilong"
SPLITS: tuple[Split, ...] = ("train", "dev")


@dataclasses.dataclass(frozen=True)
class BabilongConfig:
    """What documents to make.

    Attributes:
        task: qa1 to qa20; without files qa1 to qa5.
        chunks: C, sentences of a document, facts included.
        noise: folder of books; "" for sentences of an invented world.
        noise_repeats: times that one document may use one background sentence, 0: any number.
        seed: of the places, the background and the generated stories.
        train, dev: generated stories; of files all stories are taken.
        most_facts: stories with more facts are left out, 0: those that exceed `chunks`. With the
            smallest of several lengths here all of them have the same stories.
        stories: folder of bAbI files; "" for generated stories.

    Raises:
        InputError: a field is outside its range.
    """

    task: str = "qa1"
    chunks: int = 100
    noise: str = ""
    noise_repeats: int = 1
    seed: int = 0
    train: int = 10_000
    dev: int = 1_000
    most_facts: int = 0
    stories: str = ""

    def __post_init__(self) -> None:
        least = {"chunks": 1, "noise_repeats": 0, "seed": 0, "train": 1, "dev": 1, "most_facts": 0}
        for field, low in least.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InputError(
                    f"config.data.babilong.{field} is {value!r}; give an integer from {low} up."
                )


@dataclasses.dataclass(frozen=True)
class Stories:
    """The stories of one split.

    Attributes:
        origin: file they were read from, or "the generator".
        part: what ids say of the split: train, valid, dev or test.
        items: the stories; the number in an id is a story's place here.
    """

    origin: str
    part: str
    items: Sequence[Story]


def stories(config: BabilongConfig, split: Split) -> Stories:
    """All stories of a split, however long.

    Raises:
        InputError: the files cannot be used (see `babi`), or the task cannot be generated.
    """
    if not config.stories:
        count = config.train if split == "train" else config.dev
        made = babi_stories.generate(config.task, split, count, config.seed)
        return Stories("the generator", split, made)
    path, part = story_file(Path(config.stories), config.task, split)
    stat = path.stat()
    return Stories(str(path), part, _read(path, stat.st_mtime_ns, stat.st_size))


def documents(config: BabilongConfig, split: Split, chunks: int = 0, count: int = 0) -> LazySamples:
    """Documents of exactly `chunks` chunks, one for each story that fits, in the stories' order.

    A document depends on the config, the split, the length and its story's number alone.

    Args:
        chunks: length of a document, 0 for `config.chunks`.
        count: the first so many that fit, 0 for all.

    Raises:
        InputError: see `stories` and `noise`; or no story fits.
    """
    return read_documents(config, split, chunks, count)[0]


def read_documents(
    config: BabilongConfig, split: Split, chunks: int = 0, count: int = 0
) -> tuple[LazySamples, str]:
    """As `documents`, with one line on what was read and left out."""
    chunks = chunks or config.chunks
    told = stories(config, split)
    most = min(chunks, config.most_facts or chunks)
    kept = [i for i, story in enumerate(told.items) if len(story.facts) <= most]
    if not kept:
        least = min(len(story.facts) for story in told.items)
        raise InputError(
            f"no {config.task} story of {told.origin} fits {most} chunks (the shortest has {least} "
            "facts); raise config.data.babilong.chunks or config.data.babilong.most_facts."
        )
    line = f"{NAME}: {len(kept)} of {len(told.items)} {config.task} stories"
    line += f" of {Path(told.origin).name}, {chunks} chunks each"
    if len(kept) < len(told.items):
        line += f" (left out: {len(told.items) - len(kept)} with more than {most} facts)"
    if 0 < count < len(kept):
        kept = kept[:count]
        line += f"; the first {count}"
    background = chunks - min(len(told.items[i].facts) for i in kept)
    pool = noise(config.noise, split, background, config.noise_repeats, config.seed)

    def make(index: int) -> Sample:
        return _document(config, split, told, pool, chunks, kept[index])

    return LazySamples(len(kept), make), line


def _document(
    config: BabilongConfig, split: Split, told: Stories, pool: Noise, chunks: int, number: int
) -> Sample:
    """The document of one story: its facts in order at random places among the noise."""
    story = told.items[number]
    key = (config.seed, SPLITS.index(split), int(config.task.removeprefix("qa")), chunks, number)
    rng = np.random.default_rng(key)
    places = np.sort(rng.choice(chunks, size=len(story.facts), replace=False))
    drawn = pool.draw(rng, chunks - len(places), config.noise_repeats)
    # Only references: the texts are those of the pool and of the story.
    texts = np.empty(chunks, object)
    is_noise = np.ones(chunks, bool)
    is_noise[places] = False
    texts[is_noise] = pool.sentences[drawn]
    texts[places] = story.facts
    return Sample(
        id=f"{config.task}-{told.part}-{number}",
        question=story.question,
        chunks=tuple(texts.tolist()),
        support=tuple(sorted({int(places[i]) for i in story.support})),
        answers=(story.answer,),
        source=NAME,
    )


@functools.lru_cache(maxsize=4)
def _read(path: Path, modified: int, size: int) -> list[Story]:
    return read_stories(path)
