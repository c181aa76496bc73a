"""A retriever's two towers: the rows of token ids that they read, and how exported ones compute.

A state is `opening question [SEP] chunk [SEP] chunk [SEP] …`, a chunk is `opening chunk [SEP]`.
Every part is tokenised and cut by itself, so no text is joined and tokenised again. Exported towers
are computed by torch, or by a server.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qrag_jax.errors import InputError, library
from qrag_jax.runtime.retriever_config import EXPORT, RetrieverConfig

if TYPE_CHECKING:
    from qrag_jax.data.tokens import TextTokenizer
    from qrag_jax.llm.config import ClientConfig

_TOKENS_AT_ONCE = 16_384  # padding counted
_ROWS = 32  # of one request
_NEAR = 1e-2  # how far the length of a vector may be from that of normalised ones
TOWER_END = "-"  # ends the digest of the tower in that of an index's vectors
Rows = Sequence[Sequence[int]]


# One tower: rows of token ids, special tokens included → float32 `[rows, width]`.
RowEncoder = Callable[[Rows], np.ndarray]


@dataclasses.dataclass(frozen=True)
class RowForm:
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
                f"states of {self.max_chunks} chunks leave no room for a question in "
                f"{self.state_tokens} tokens; lower max_chunk_tokens_in_state or max_steps."
            )
        return min(self.max_question_tokens, room)

    def state(self, question: Sequence[int], chunks: Rows) -> list[int]:
        row = [*self.state_opening, *question[: self.question_tokens], self.sep_id]
        for ids in chunks:
            row += [*ids[: self.max_chunk_tokens_in_state], self.sep_id]
        return row

    def chunk(self, ids: Sequence[int]) -> list[int]:
        kept = self.chunk_tokens - len(self.chunk_opening) - 1
        return [*self.chunk_opening, *ids[:kept], self.sep_id]


@dataclasses.dataclass(frozen=True)
class Towers:
    """A trained retriever's two encoders."""

    tokenizer: TextTokenizer
    form: RowForm
    state: RowEncoder
    chunk: RowEncoder

    def states(self, states: Sequence[tuple[str, Sequence[str]]]) -> np.ndarray:
        """float32 `[states, width]`, of questions and the chunks of each."""
        texts = list({text: 0 for question, chunks in states for text in (question, *chunks)})
        ids = dict(zip(texts, self.tokenizer.encode(texts), strict=True))
        rows = [
            self.form.state(ids[question], [ids[c] for c in chunks]) for question, chunks in states
        ]
        return self.state(rows)

    def chunks(self, texts: Sequence[str]) -> np.ndarray:
        """float32 `[texts, width]`, before any rotation."""
        return self.chunk([self.form.chunk(ids) for ids in self.tokenizer.encode(texts)])

    def cut(self, questions: Sequence[str]) -> list[int]:
        """The indices of the questions that are longer than what is kept of them."""
        most = self.form.question_tokens
        return [i for i, ids in enumerate(self.tokenizer.encode(questions)) if len(ids) > most]


# ---------------------------------------------------------------------- exported folders


def read_rows(folder: Path, config: RetrieverConfig) -> tuple[TextTokenizer, RowForm]:
    """The tokenizer of an exported folder, and how rows are composed."""
    from qrag_jax.data.tokens import TextTokenizer  # searches of words need none

    tokenizers, openings = [], []
    for tower in (config.state, config.chunk):
        tokenizer = TextTokenizer.load(folder / tower.folder, opens_rows=False)
        # What it puts before a text is the opening token and the prefix.
        ids = tokenizer.backend.encode("", add_special_tokens=True).ids
        if ids[-1:] != [config.separator_id]:
            raise InputError(f"{tower.folder}/tokenizer.json: rows lack separator_id; {EXPORT}.")
        tokenizers.append(tokenizer)
        openings.append(tuple(ids[:-1]))
    return tokenizers[0], RowForm(
        state_opening=openings[0],
        chunk_opening=openings[1],
        sep_id=config.separator_id,
        max_question_tokens=config.max_question_tokens,
        max_chunk_tokens_in_state=config.max_chunk_tokens_in_state,
        state_tokens=config.state.max_tokens,
        chunk_tokens=config.chunk.max_tokens,
        max_chunks=config.search.max_steps - 1,
    )


def tower_digest(tensors: Mapping[str, Any], **about: Any) -> str:
    """The digest of a tower of chunks, in a run and in its export.

    Args:
        tensors: name → array, as the files of an export have them.
        about: how rows are composed and vectors pooled, as JSON.
    """
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name], np.float32)
        digest.update(f"{name} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:32]


# ---------------------------------------------------------------------- what computes them


class TorchTower:
    """One tower, as `RowEncoder`; the device "" is the one that sentence-transformers chooses."""

    def __init__(self, folder: Path, pad_id: int, device: str = "") -> None:
        sentence_transformers = library("sentence_transformers", "torch")
        try:
            self._model = sentence_transformers.SentenceTransformer(
                str(folder),
                device=device or None,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},
            ).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = str(error).strip().split("\n")[0]
            raise InputError(
                f"{folder}: sentence-transformers cannot read it ({reason}); export the run again."
            ) from None
        self._pad_id = pad_id

    def __call__(self, rows: Rows) -> np.ndarray:
        """Rows of like lengths are computed together."""
        import torch

        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        width, device = self._model.get_embedding_dimension() or 0, self._model.device
        vectors = np.empty((len(rows), width), np.float32)
        while order:
            most = max(_TOKENS_AT_ONCE // len(rows[order[-1]]), 1)
            chosen, order = order[-most:], order[:-most]
            ids = [torch.tensor(rows[i], dtype=torch.long, device=device) for i in chosen]
            pad = torch.nn.utils.rnn.pad_sequence
            padded = {
                "input_ids": pad(ids, batch_first=True, padding_value=self._pad_id),
                "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
            }
            with torch.inference_mode():
                output = self._model(padded)["sentence_embedding"]
            vectors[chosen] = output.float().cpu().numpy()
        return vectors


class EndpointTower:
    """One tower, as `RowEncoder`; it sends rows of ids, composed as in training.

    `scale` is the factor on normalised vectors that the exported folder has in a module of its own,
    which some servers skip; 1: the weights hold it. Where a server skips it, it is multiplied here.
    """

    def __init__(self, config: ClientConfig, width: int, scale: float = 1.0) -> None:
        from qrag_jax.llm.client import Client  # searches by other towers need no client

        self._client, self._width, self._scale = Client(config), width, scale

    def __call__(self, rows: Rows) -> np.ndarray:
        from qrag_jax.llm.outcomes import EmbeddingRequest, Failure

        requests = [
            EmbeddingRequest(tuple(tuple(map(int, row)) for row in rows[i : i + _ROWS]))
            for i in range(0, len(rows), _ROWS)
        ]
        where = f"{self._client.config.url} (model {self._client.config.model})"
        vectors_of_rows: list[tuple[float, ...]] = []
        for outcome in self._client.ask_blocking(requests):
            if isinstance(outcome, Failure):
                raise InputError(
                    f"{where} gives no vectors ({outcome.message}); serve an exported tower there "
                    "with an API for embeddings that takes token ids, as vLLM's does."
                )
            vectors_of_rows += outcome.vectors
        if not len(rows):
            return np.zeros((0, self._width), np.float32)
        vectors = np.array(vectors_of_rows, np.float32).reshape(len(rows), -1)
        lengths = np.linalg.norm(vectors, axis=1)
        if vectors.shape[1] == self._width and np.isfinite(lengths).all():
            if self._scale == 1.0:
                return vectors
            for length, factor in ((self._scale, 1.0), (1.0, self._scale)):
                if np.allclose(lengths, length, rtol=_NEAR, atol=0):
                    return vectors * np.float32(factor)
        raise InputError(
            f"{where} gives vectors of {vectors.shape[1]} and the length {lengths[0]:.3g}, not of "
            f"{self._width} and {self._scale:.3g}; serve the exported tower with its modules."
        )
