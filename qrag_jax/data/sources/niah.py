"""RULER's needle-in-a-haystack tasks (Hsieh et al., 2024): the record layout of the data files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qrag_jax.data.generators.books import sentences_of
from qrag_jax.data.sample import BadRecord, Sample
from qrag_jax.data.sources import fields
from qrag_jax.data.sources.fields import Mend, ignore

NAME = "niah"
# The last sentence of the instruction in RULER's prompt; the text begins after it.
_INSTRUCTION = "I will quiz you about"


def parse(record: dict[str, Any], mend: Mend = ignore) -> Sample:
    """Turns one record into a sample. Its chunks are sentences; its answers are all outputs.

    Two layouts are read:
    - RULER's own: `input` is the instruction, the text, the question and perhaps the beginning of
      an answer. It is split into sentences.
    - Already split: `sentences`, and the question in `input_suffix`.

    The supporting facts are the sentences whose indices are in `supporting`. Without this field,
    they are the sentences that contain one of the `outputs`.
    """
    outputs = fields.texts(fields.present(record, "outputs"), "outputs")
    if record.get("sentences") is not None:
        chunks = fields.texts(record["sentences"], "sentences")
        question = _question(fields.text(fields.present(record, "input_suffix"), "input_suffix"))
    else:
        chunks, question = _split(fields.text(fields.present(record, "input"), "input"))
    if not chunks:
        raise BadRecord("no chunks")
    if record.get("supporting") is not None:
        support = [
            fields.index(i, "supporting") for i in fields.items(record["supporting"], "supporting")
        ]
        if not all(0 <= place < len(chunks) for place in support):
            raise BadRecord("support index out of range")
    else:
        support = _holding(chunks, outputs)
    answers = tuple(dict.fromkeys(each.strip() for each in outputs if each.strip()))
    return fields.make_sample(
        NAME, _id(record), question, chunks, support=support, answer_texts=answers
    )


def _id(record: dict[str, Any]) -> str:
    if record.get("id") is not None:
        return fields.text(record["id"], "id")
    task = fields.text(record.get("task") or NAME, "task")
    return f"{task}-{fields.index(fields.present(record, 'index'), 'index')}"


def _question(suffix: str) -> str:
    """The question in the suffix after the text, without the beginning of an answer."""
    line = next((line for line in reversed(suffix.split("\n")) if line.strip()), "")
    head, mark, _ = line.rpartition("?")
    return (head + mark if mark else line).strip()


def _split(prompt: str) -> tuple[list[str], str]:
    """The sentences of the text in a prompt, and the question at its end."""
    # RULER separates sentences by line breaks, except those that it takes from essays.
    sentences = [text for line in prompt.split("\n") for text in sentences_of(line)]
    asked = [place for place, text in enumerate(sentences) if text.endswith("?")]
    if not asked:
        raise BadRecord("no question")
    said = [place for place, text in enumerate(sentences[:5]) if _INSTRUCTION in text]
    return sentences[said[-1] + 1 if said else 0 : asked[-1]], sentences[asked[-1]]


def _holding(chunks: Sequence[str], outputs: Sequence[str]) -> list[int]:
    """The indices of the chunks that contain an output as a separate word."""
    found = []
    for output in outputs:
        pattern = re.compile(rf"(?<![\w-]){re.escape(output)}(?![\w-])")
        holding = [place for place, chunk in enumerate(chunks) if pattern.search(chunk)]
        if not holding:
            raise BadRecord("an expected output is in no sentence")
        found += holding
    return found
