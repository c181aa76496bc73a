"""Search in one step: by an encoder that was not trained to search in several, or by words."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.retrieval.multi_step import SingleStepSearch
from qrag_jax.retrieval.opening import (
    EXACT,
    FAISS,
    HYBRID,
    OF_WORDS,
    QDRANT,
    SCAN,
    IndexAt,
)
from qrag_jax.serving.searcher import MultiStep, Searcher, SingleStep
from qrag_jax.systems.retriever import LoadSettings, Retriever

if TYPE_CHECKING:  # not at run time: what serves words or an export needs no jax
    from qrag_jax.models.encoder_config import EncoderConfig
    from qrag_jax.systems.passage_encoder import PassageEncoder

BY_VECTORS = (EXACT, QDRANT, FAISS, SCAN, HYBRID)
BY_WORDS = OF_WORDS


@dataclasses.dataclass(frozen=True)
class PlainEncoder:
    """An encoder of one kind of texts.

    Attributes:
        path: a folder, a hub name, or "minilm".
        config: how it computes, with the prefixes of questions (`state_prefix`) and of passages;
            the latter as the index was built; None: as its folder says.
        max_tokens: longest row, as the index was built; 0: as its folder says.
    """

    path: str
    config: EncoderConfig | None = None
    max_tokens: int = 0


class QuestionTower:
    """What makes vectors of questions; see `retrieval.multi_step.QuestionEncoder`."""

    def __init__(self, encoder: PassageEncoder) -> None:
        self._tokenizer, self._form = encoder.tokenizer, encoder.encoder
        self.title_separator = encoder.title_separator
        self._room = encoder.row_tokens - len(self._form.state_opening) - 1
        if self._room < 1:
            raise InputError(
                f"the prefix of questions leaves them no room in rows of {encoder.row_tokens} "
                "tokens; give a shorter --question_prefix."
            )
        self._tower = encoder.tower()

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that have more tokens than a row."""
        ids = self._tokenizer.encode(questions)
        return [place for place, own in enumerate(ids) if len(own) > self._room]

    def __call__(self, questions: Sequence[str]) -> np.ndarray:
        """float32 `[questions, width]`; questions that are too long are cut."""
        opening, end = self._form.state_opening, self._form.sep_id
        ids = self._tokenizer.encode(questions)
        return self._tower([[*opening, *own[: self._room], end] for own in ids])


def open_plain(index: IndexAt, encoder: PlainEncoder | None = None) -> SingleStepSearch:
    """Opens an index with the encoder that embedded it."""
    if encoder is None:
        otherwise = (
            "give what makes vectors of questions: --workdir=RUN, --retriever=EXPORT or "
            "--encoder=FOLDER"
        )
        return SingleStepSearch(index.settled(BY_WORDS, otherwise).open())
    index = index.settled(BY_VECTORS, "leave --encoder out, or index the corpus with the encoder")
    from qrag_jax.models.encoder_config import EncoderConfig
    from qrag_jax.systems.passage_encoder import PassageEncoder

    computes = encoder.config or EncoderConfig()
    own = PassageEncoder.of_folder(encoder.path, computes, max_tokens=encoder.max_tokens)
    if index.encoder != (digest := own.digest()):
        raise InputError(
            f"{index.folder} was embedded by another encoder, or with another dtype, pooling, "
            "prefix or length, than those given; give the ones that it was built with."
        )
    return SingleStepSearch(index.open(digest), QuestionTower(own))


@dataclasses.dataclass(frozen=True)
class ServedSearch:
    """Which search is served; with neither a retriever nor an encoder it compares words.

    Attributes:
        retriever: folder of an export or of a run, which searches in steps as it was trained.
        encoder: a plain encoder, which searches in one step.
    """

    index: IndexAt
    retriever: str = ""
    settings: LoadSettings = dataclasses.field(default_factory=LoadSettings)
    encoder: PlainEncoder | None = None

    def open(self) -> Searcher:
        """Loads it."""
        if not self.retriever:
            return SingleStep(open_plain(self.index, self.encoder))
        retriever = Retriever.load(self.retriever, self.settings)
        retriever.open_at(self.index)
        return MultiStep(retriever.multi_step)
