"""HotpotQA, distractor setting (Yang et al., EMNLP 2018): its files and its record layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import titled_context

NAME = "hotpotqa"
FOLDERS: tuple[str, ...] = ("hotpotqa",)
OFFICIAL: dict[str, tuple[str, ...]] = {
    "train": ("hotpot_train_v1.1.json",),
    "dev": ("hotpot_dev_distractor_v1.json",),
}
HUB: tuple[str, str | None, dict[str, str]] = (
    "hotpotqa/hotpot_qa",
    "distractor",
    {"train": "train", "dev": "validation"},
)


def parse(record: dict[str, Any]) -> Sample:
    """Turns one official (or hub, or titles-only) record into a sample.

    Raises:
        BadRecord: see `titled_context.parse`.
    """
    return titled_context.parse(record, NAME)


def mended(record: dict[str, Any]) -> str:
    """A harmless fault of a record that `parse` accepts; see `titled_context.mended`."""
    return titled_context.mended(record)


def to_record(
    id: str,
    question: str,
    answer: str,
    paragraphs: Sequence[tuple[str, Sequence[str]]],
    support: Sequence[int],
) -> dict[str, Any]:
    """Makes an official record, the inverse of `parse`; see `titled_context.to_record`.

    As in the official files, every sentence except the first of a paragraph begins with a space.
    The labels `type` and `level` are always "bridge" and "hard"; this code does not read them.
    """
    spaced = [
        (title, [" " * (place > 0) + sentence for place, sentence in enumerate(sentences)])
        for title, sentences in paragraphs
    ]
    record = titled_context.to_record(id, question, answer, spaced, support)
    return record | {"type": "bridge", "level": "hard"}
