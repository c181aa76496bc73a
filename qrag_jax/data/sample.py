"""What a training or evaluation question is, before it becomes tokens."""

from __future__ import annotations

import dataclasses
import re

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One multi-hop question with the chunks it may be answered from.

    Attributes:
        id: unique within its source; written to retrieval logs.
        question: the question's text.
        chunks: the candidate passages in document order.
        support: indices into `chunks` of the supporting facts, sorted, distinct, never empty.
        answers: the answer followed by its aliases; may be empty.
        source: name of the source the sample came from, e.g. "hotpotqa".
    """

    id: str
    question: str
    chunks: tuple[str, ...]
    support: tuple[int, ...]
    answers: tuple[str, ...]
    source: str


def without_surrogates(sample: Sample) -> Sample:
    """The sample with U+FFFD for halves of surrogate pairs; the same object if it has none.

    JSON can hold them ("\\ud800", for one of a text that was cut between them), but they are no
    characters: no tokenizer, file or terminal takes them.
    """
    texts = (sample.id, sample.question, *sample.chunks, *sample.answers)
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        question, *chunks = (_mended(text) for text in (sample.question, *sample.chunks))
        return dataclasses.replace(
            sample,
            id=_mended(sample.id),
            question=question,
            chunks=tuple(chunks),
            answers=tuple(map(_mended, sample.answers)),
        )
    return sample


def _mended(text: str) -> str:
    return _SURROGATES.sub("\ufffd", text)


class BadRecord(ValueError):
    """A record that cannot become a `Sample`; the message is a short reason, used as a key."""
