"""Multi-hop questions over an invented world: unlimited, seeded, without downloads.

A bridge question names one entity and a chain of relations ("In which city is the company based
that employs Velmora Tashkin?"). Each supporting passage except the last names the entity of the
next passage; the last one has the answer. A comparison question asks which of two entities is
earlier, longer, deeper and so on. It names both entities (2 hops), or it reaches each of them
through a bridge (4 hops). The train and dev splits share no invented word.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qrag_jax.data.generators.invented_names import Draw
from qrag_jax.data.generators.invented_puzzle import RIVALS, Puzzle, bridge, comparison
from qrag_jax.data.sample import Sample
from qrag_jax.errors import InputError, check_least

Split = Literal["train", "dev"]
SPLITS: tuple[Split, ...] = ("train", "dev")


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """Section `data.synthetic`: which questions to make."""

    hops: tuple[int, ...] = (2, 3, 4)  # supporting passages, 2 to 4; each number is equally likely
    comparison: float = 0.2  # share of comparisons among questions of 2 and 4 hops
    chunks: int = 10  # C, passages per question, at least max(hops) + 2
    seed: int = 0  # another seed gives another world
    train: int = 20_000  # questions made for training
    dev: int = 500  # questions made for evaluation

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "hops", tuple(self.hops))
        except TypeError:
            raise InputError(
                f"synthetic data: hops is {self.hops!r}, give a sequence such as (2, 3)."
            ) from None
        for field in ("chunks", "seed", "train", "dev"):
            if not _is_int(getattr(self, field)):
                raise InputError(
                    f"synthetic data: {field} is {getattr(self, field)!r}, give an integer."
                )
        if not self.hops or not all(_is_int(h) and 2 <= h <= 4 for h in self.hops):
            raise InputError(
                f"synthetic data: hops is {self.hops!r}, give one or more integers from 2 to 4."
            )
        if isinstance(self.comparison, bool) or not (
            isinstance(self.comparison, (int, float)) and 0 <= self.comparison <= 1
        ):
            raise InputError(
                f"synthetic data: comparison is {self.comparison!r}, give a share from 0 to 1."
            )
        least = max(self.hops) + RIVALS
        if self.chunks < least:
            raise InputError(
                f"synthetic data: chunks is {self.chunks}, give at least {least} "
                f"for questions of {max(self.hops)} hops."
            )
        check_least("data.synthetic", self, train=0, dev=0)
        if not 0 <= self.seed < 1 << 63:
            raise InputError(
                f"synthetic data: seed is {self.seed}, give an integer from 0 to 2^63 - 1."
            )


class Question(NamedTuple):
    """A question before it takes the shape of a `Sample` or of an official record.

    Attributes:
        paragraphs: (title, sentences) in document order; titles are distinct.
        support: indices into `paragraphs` of the supporting facts, sorted.
    """

    id: str
    question: str
    answer: str
    paragraphs: list[tuple[str, list[str]]]
    support: list[int]


def puzzle_at(config: SyntheticConfig, split: Split, index: int) -> Puzzle:
    """The `index`-th question of a split with all that is known of it: chain, relations, facts.

    It depends only on the config, the split and the index. It is the same in every process and with
    every release of Python and numpy.
    """
    if split not in SPLITS:
        raise InputError(f"synthetic data: split is {split!r}, give 'train' or 'dev'.")
    if not 0 <= index < 1 << 63:
        raise InputError(f"synthetic data: index is {index}, give an integer from 0 to 2^63 - 1.")
    stream = SPLITS.index(split)
    draw = Draw(config.seed, stream, index)
    hops = draw.choice(config.hops)
    make = comparison if hops != 3 and draw.chance(config.comparison) else bridge
    return make(draw, stream, hops, config.chunks)


def passages_at(config: SyntheticConfig, split: Split, index: int) -> Question:
    """The `index`-th question of a split with its passages as titles and sentences."""
    puzzle = puzzle_at(config, split, index)
    return Question(
        f"synthetic-{split}-{config.seed}-{index}",
        puzzle.question,
        puzzle.answer,
        [(p.entity.title, list(p.sentences)) for p in puzzle.passages],
        sorted(puzzle.chain),
    )


def sample_at(config: SyntheticConfig, split: Split, index: int) -> Sample:
    """The `index`-th question of a split as a `Sample` of `config.chunks` chunks."""
    q = passages_at(config, split, index)
    return Sample(
        id=q.id,
        question=q.question,
        chunks=tuple(title + " " + " ".join(sentences) for title, sentences in q.paragraphs),
        support=tuple(q.support),
        answers=(q.answer,),
        source="synthetic",
    )


def generate(config: SyntheticConfig, split: Split, count: int) -> list[Sample]:
    """The first `count` questions of a split."""
    return [sample_at(config, split, i) for i in range(_counted(count, "count"))]


def write_corpus(folder: Path, source: Any, config: SyntheticConfig, train: int, dev: int) -> None:
    """Writes `train.jsonl` and `dev.jsonl` in the official format of another source.

    Args:
        folder: created if absent; existing files with these names are replaced.
        source: a source's module, with
            `to_record(id, question, answer, paragraphs, support) -> dict`.
        config: which questions to make.
        train: number of questions in `train.jsonl`.
        dev: number of questions in `dev.jsonl`.
    """
    if not callable(getattr(source, "to_record", None)):
        name = getattr(source, "__name__", repr(source))
        raise InputError(f"{folder}: source {name} has no to_record, give a module that has one.")
    counts: dict[Split, int] = {"train": _counted(train, "train"), "dev": _counted(dev, "dev")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in counts.items():
            with (folder / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
                for index in range(count):
                    record = source.to_record(*passages_at(config, split, index))
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InputError(
            f"{folder}: folder cannot be written to ({error.strerror}), name another one."
        ) from error


def _counted(count: int, field: str) -> int:
    if not _is_int(count) or count < 0:
        raise InputError(f"synthetic data: {field} is {count!r}, give an integer from 0 up.")
    return count


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
