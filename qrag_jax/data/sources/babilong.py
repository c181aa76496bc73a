"""BABILong (Kuratov et al., 2024): bAbI stories scattered in background text of any length."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.data.files.babi import Story, read_stories, story_file
from qrag_jax.data.generators import babi_stories
from qrag_jax.data.generators.noise import NoiseConfig, Shelf, noise
from qrag_jax.data.lazy_samples import Documents, Fit, LazySamples
from qrag_jax.data.redrawn import RedrawnSamples, composed
from qrag_jax.data.sample import SPLITS, Sample, Split
from qrag_jax.errors import InputError, check_least
from qrag_jax.runtime.config_fields import internal

NAME = "babilong"


@dataclasses.dataclass(frozen=True)
class BabilongConfig:
    """Section `data.sources.babilong`: which documents to make.

    Attributes:
        stories: folder of bAbI files (data.path); "": stories are generated.
    """

    task: str = "qa1"  # qa1 to qa20; without story files qa1 to qa5
    chunks: int = 100  # C, sentences per document, facts included
    noise: str = ""  # folder of books, or FILE.py:FUNCTION; "": of an invented world
    noise_repeats: int = 1  # how often a document may use one sentence, 0: any number
    seed: int = 0  # seed of places, background and generated stories
    train: int = 10_000  # stories generated for training if there are no files
    dev: int = 1_000  # stories generated for evaluation if there are no files
    # Stories with more facts than this are left out; 0: those with more than C. To compare several
    # lengths on the same stories, set it to the smallest length.
    most_facts: int = 0
    stories: str = internal("")
    noise_dev: str = ""  # folder of books for dev; "": held-out books of noise; "shared": all
    redraw: bool = True  # training: draw new noise and places in every epoch

    def __post_init__(self) -> None:
        least = {"chunks": 1, "noise_repeats": 0, "seed": 0, "train": 1, "dev": 1, "most_facts": 0}
        check_least("data.sources.babilong", self, **least)

    @property
    def background(self) -> NoiseConfig:
        """The settings of the background text."""
        return NoiseConfig(
            self.noise, self.noise_dev, self.noise_repeats, self.seed, self.chunks, source=NAME
        )


@dataclasses.dataclass(frozen=True)
class Stories:
    """The stories of one split.

    Attributes:
        origin: the file that they were read from, or "the generator".
        part: name of the split in sample ids: train, valid, dev or test.
        items: the stories; the number in a sample id is the story's index here.
    """

    origin: str
    part: str
    items: Sequence[Story]


def stories(config: BabilongConfig, split: Split) -> Stories:
    """All stories of a split, however long."""
    if not config.stories:
        count = config.train if split == "train" else config.dev
        made = babi_stories.generate(config.task, split, count, config.seed)
        return Stories("the generator", split, made)
    path, part = story_file(Path(config.stories), config.task, split)
    stat = path.stat()
    return Stories(str(path), part, _read(path, stat.st_mtime_ns, stat.st_size))


def documents(config: BabilongConfig, split: Split, chunks: int = 0, count: int = 0) -> Documents:
    """Documents of exactly `chunks` chunks, one for each story that fits, in the stories' order.

    They depend only on the config, the split, the length and the story's number. With
    `config.redraw`, those of training also depend on the epoch: noise and places change, but the
    story and the order of its facts stay.

    Args:
        chunks: length of a document; 0: `config.chunks`.
        count: number of documents, those of the first stories that fit; 0: all.
    """
    chunks = chunks or config.chunks
    told = stories(config, split)
    most = min(chunks, config.most_facts or chunks)
    kept = [i for i, story in enumerate(told.items) if len(story.facts) <= most]
    fit = Fit(len(kept), len(told.items), most)
    if not kept:
        least = min(len(story.facts) for story in told.items)
        raise InputError(
            f"no {config.task} story of {told.origin} fits {most} chunks (the shortest has {least} "
            "facts); raise config.data.sources.babilong.chunks or most_facts."
        )
    line = f"{NAME}: {len(kept):,} of {len(told.items):,} {config.task} stories"
    line += f" of {Path(told.origin).name}, {chunks} chunks each"
    if len(kept) < len(told.items):
        line += f" (left out: {len(told.items) - len(kept):,} with more than {most} facts)"
    if 0 < count < len(kept):
        kept = kept[:count]
        line += f"; the first {count}"
    redraws = split == "train" and config.redraw
    line += "; drawn anew in every epoch" * redraws
    counts = tuple(len(told.items[i].facts) for i in kept)
    pool = noise(config.background, split, chunks - min(counts))
    line += f"; {pool.summary}"
    parts = LazySamples(len(kept), lambda index: _facts(config, told, kept[index]))
    layout = _Layout(config, split, chunks, tuple(kept), counts, shelf=pool.shelf)
    if redraws:
        return Documents(RedrawnSamples(parts, pool.sentences, layout), fit, line)

    def make(index: int) -> Sample:
        places, drawn = layout(index)
        return composed(parts[index], places, pool.sentences[drawn])

    told_digest = hashlib.sha256(repr(told.items).encode()).hexdigest()
    content = f"{told_digest} {pool.content}"
    return Documents(LazySamples(len(kept), make, content), fit, line)


def _facts(config: BabilongConfig, told: Stories, number: int) -> Sample:
    """A story without noise."""
    story = told.items[number]
    return Sample(
        id=f"{config.task}-{told.part}-{number}",
        question=story.question,
        chunks=tuple(story.facts),
        support=tuple(sorted(set(story.support))),
        answers=(story.answer,),
        source=NAME,
    )


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A `redrawn.Layout`: facts stay in order at random places, among noise in the order drawn.

    Attributes:
        config: the settings of the documents.
        split: "train" or "dev".
        chunks: C, the number of chunks of a document.
        numbers: the story's number, for each sample.
        facts: the number of facts of the story, for each sample.
        shelf: where the noise is drawn from.
    """

    config: BabilongConfig
    split: Split
    chunks: int
    numbers: tuple[int, ...]
    facts: tuple[int, ...]
    shelf: Shelf

    @property
    def key(self) -> str:
        fields = (*self._words, self.config.noise_repeats, self.numbers, self.shelf.starts.tolist())
        return hashlib.sha256(repr(fields).encode()).hexdigest()

    @property
    def _words(self) -> tuple[int, ...]:
        task = int(self.config.task.removeprefix("qa"))
        return self.config.seed, SPLITS.index(self.split), task, self.chunks

    def __call__(self, index: int, epoch: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The layout of a document; `epoch` None: a document that is drawn once for all epochs."""
        again = () if epoch is None else (1 + epoch,)
        rng = np.random.default_rng((*self._words, self.numbers[index], *again))
        places = np.sort(rng.choice(self.chunks, size=self.facts[index], replace=False))
        count = self.chunks - len(places)
        return places, self.shelf.draw(rng, count, self.config.noise_repeats)


@functools.lru_cache(maxsize=4)
def _read(path: Path, modified: int, size: int) -> list[Story]:
    return read_stories(path)
