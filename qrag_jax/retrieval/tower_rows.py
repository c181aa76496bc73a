"""The rows of token ids that a retriever's two towers read, composed as in training.

A state is `opening question [SEP] chunk [SEP] chunk [SEP] …`, a chunk is `opening chunk [SEP]`.
Every part is tokenised and cut by itself, so no text is joined and tokenised again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from qrag_jax.errors import InputError

Rows = Sequence[Sequence[int]]


class State(NamedTuple):
    """What a state says."""

    question: str
    chunks: tuple[str, ...] = ()


class Encode(Protocol):
    """A tokenizer, such as `data.tokens.TextTokenizer`."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens and not cut."""


# One tower: rows of token ids, special tokens included → float32 `[rows, width]`.
RowEncoder = Callable[[Rows], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowForm:
    """How rows are composed."""

    state_opening: tuple[int, ...]  # ids that every state begins with, such as [CLS] and a prefix
    chunk_opening: tuple[int, ...]  # those of every chunk
    sep_id: int
    max_question_tokens: int
    max_chunk_tokens_in_state: int  # longer chunks are cut inside a state
    state_tokens: int  # length of the longest state, special tokens counted
    chunk_tokens: int  # of the longest chunk row; longer chunks are cut
    max_chunks: int  # most chunks of a state

    @property
    def question_tokens(self) -> int:
        """The tokens that are kept of a question, so that every state fits the tower."""
        others = self.max_chunks * (self.max_chunk_tokens_in_state + 1)
        room = self.state_tokens - len(self.state_opening) - 1 - others
        if room < 1:
            raise InputError(
                f"states of {self.max_chunks} chunks of {self.max_chunk_tokens_in_state} tokens "
                f"leave no room for a question in the {self.state_tokens} tokens of the state "
                "tower; lower max_chunk_tokens_in_state or max_steps."
            )
        return min(self.max_question_tokens, room)

    def state(self, question: Sequence[int], chunks: Rows) -> list[int]:
        """The row of a state."""
        row = [*self.state_opening, *question[: self.question_tokens], self.sep_id]
        for ids in chunks:
            row += [*ids[: self.max_chunk_tokens_in_state], self.sep_id]
        return row

    def chunk(self, ids: Sequence[int]) -> list[int]:
        """The row of a chunk."""
        kept = self.chunk_tokens - len(self.chunk_opening) - 1
        return [*self.chunk_opening, *ids[:kept], self.sep_id]


@dataclasses.dataclass(frozen=True)
class Towers:
    """A trained retriever's two encoders."""

    tokenizer: Encode
    form: RowForm
    state: RowEncoder
    chunk: RowEncoder

    def states(self, states: Sequence[State]) -> np.ndarray:
        """float32 `[states, width]`."""
        texts = {text: 0 for state in states for text in (state.question, *state.chunks)}
        ids = dict(zip(texts, self.tokenizer.encode(list(texts)), strict=True))
        rows = [self.form.state(ids[s.question], [ids[text] for text in s.chunks]) for s in states]
        return self.state(rows)

    def chunks(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[texts, width]`, before any rotation."""
        return self.chunk([self.form.chunk(ids) for ids in self.tokenizer.encode(texts)])

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that are longer than what is kept of them."""
        most = self.form.question_tokens
        return [i for i, ids in enumerate(self.tokenizer.encode(questions)) if len(ids) > most]
