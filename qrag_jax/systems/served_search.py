"""What a server searches with: an index, and what makes vectors of questions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.compute.precision import AUTO
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.multi_step import MultiStepSearch
from qrag_jax.retrieval.opening import BM25, engines_of, open_index
from qrag_jax.serving.searcher import MultiStep, Searcher, SingleStep
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.retriever import LoadSettings, Retriever


@dataclasses.dataclass(frozen=True)
class ServedSearch:
    """Which search is served; at most one of `retriever` and `encoder` is given.

    Attributes:
        index: folder of the index.
        engine: what searches it; "": the only one that it has. For a retriever, one of
            `retriever.ENGINES`, which all search the vectors of the engine exact.
        retriever: folder of an export or of a run: steps as it was trained; "": one step.
        checkpoint: of a run: "best" or "last"; "": "best", if that is a trained one.
        encoder: folder of a plain encoder, a hub name, or "minilm": one step.
        config: how that encoder computes, with the prefixes of questions (`state_prefix`) and of
            passages; the latter as the index was built.
        max_tokens: longest row of that encoder, as the index was built; 0: as its folder says.
    """

    index: Path
    engine: str = ""
    retriever: str = ""
    checkpoint: str = ""
    encoder: str = ""
    config: EncoderConfig = dataclasses.field(default_factory=EncoderConfig)
    max_tokens: int = 0

    def open(self) -> Searcher:
        """Loads it.

        Raises:
            InputError: the index or the encoder cannot be used, or they do not belong together.
        """
        if self.retriever:
            return self._trained()
        if not self.encoder:
            index = open_index(self.index, self.engine)
            if self._engine != BM25:
                raise InputError(
                    f"the index {self.index} compares vectors; give what makes vectors of "
                    "questions: --retriever, --workdir or --encoder."
                )
            return SingleStep(index)
        if self._engine == BM25:
            raise InputError(f"the index {self.index} compares words; leave --encoder out.")
        encoder = PlainEncoder(
            PassageEncoder.of_folder(self.encoder, self.config, max_tokens=self.max_tokens)
        )
        return SingleStep(open_index(self.index, self.engine, encoder.digest), encoder)

    def _trained(self) -> Searcher:
        if self._engine == BM25:
            raise InputError(
                f"the index {self.index} compares words, and a trained retriever vectors; leave "
                "--retriever and --workdir out, or build an index with it."
            )
        settings = LoadSettings(
            checkpoint=self.checkpoint,
            dtype="" if self.config.dtype == AUTO else self.config.dtype,
        )
        retriever = Retriever.load(self.retriever, settings)
        retriever.open(self.index, self.engine)
        index, towers = retriever._index, retriever._backend.towers  # it has no names for them yet
        assert index is not None
        return MultiStep(MultiStepSearch(index, towers, retriever.rules))

    @property
    def _engine(self) -> str:
        return self.engine or next(iter(engines_of(self.index)), "")


class PlainEncoder:
    """An encoder of one kind of texts, as `serving.searcher.QuestionEncoder`.

    Attributes:
        digest: of what embeds passages, as an index's manifest has it.

    Args:
        encoder: as it embeds passages; questions have its prefix of states.
    """

    def __init__(self, encoder: PassageEncoder) -> None:
        self.digest = encoder.digest()
        self._tokenizer, self._form = encoder.tokenizer, encoder.encoder
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
        """float32 `[questions, width]`."""
        opening, end = self._form.state_opening, self._form.sep_id
        ids = self._tokenizer.encode(questions)
        return self._tower([[*opening, *own[: self._room], end] for own in ids])
