"""2WikiMultiHopQA (Ho et al., COLING 2020): its files and its record layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import titled_context

NAME = "two_wiki"
FOLDERS: tuple[str, ...] = ("two_wiki", "2wikimultihopqa")
OFFICIAL: dict[str, tuple[str, ...]] = {"train": ("train.json",), "dev": ("dev.json",)}
# The authors' copy needs a loading script, which `datasets` no longer runs. This copy has the same
# splits in HotpotQA's hub layout.
HUB: tuple[str, str | None, dict[str, str]] = (
    "framolfese/2WikiMultihopQA",
    None,
    {"train": "train", "dev": "validation"},
)


def parse(record: dict[str, Any]) -> Sample:
    """Turns one official or hub record into a sample.

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

    `type` is always "compositional". The fields about Wikidata are empty; this code does not read
    them.
    """
    record = titled_context.to_record(id, question, answer, paragraphs, support)
    return record | {
        "type": "compositional",
        "entity_ids": "",
        "evidences": [],
        "evidences_id": [],
        "answer_id": None,
    }
