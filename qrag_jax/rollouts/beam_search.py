"""Plays documents of any length, greedily or by beam search over actions ("Plan Q-RAG").

Texts are embedded once, into a table. After that, a step encodes W states per document and takes
the best of W × C actions. The Q-values are the learned ones (Q-RAG, arXiv 2511.07328).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import NOT_TAKEN, state_width
from qrag_jax.models.heads.embedding import Params
from qrag_jax.policies.document_scores import Searches, make_best_chunks, padded_chunks
from qrag_jax.policies.soft_q import MASKED
from qrag_jax.retrieval.paths import Choices, Path, best_paths
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor
from qrag_jax.rollouts.text_table import TextTable, make_embed, padded_rows
from qrag_jax.runtime.embedding_files import EmbeddingFiles
from qrag_jax.runtime.mesh import replicate
from qrag_jax.runtime.retriever_config import Search

CHUNKS_AT_ONCE = 65_536  # in all documents played side by side, at most


class Question(NamedTuple):
    sample: Sample
    question: list[int]  # its tokens
    rows: np.ndarray  # of its chunks in the table


class BeamSearch:
    """Plays documents with one set of parameters.

    Args:
        shardings: where `params` live (two towers stacked on axis 0).
        actor: its `chunks` blocks must hold the longest chunk row, its `states` blocks any state.
        batch_size: documents played at once; of long ones fewer.
        max_question_tokens: longer questions are cut.
        store: keeps the chunks' embeddings between processes.
    """

    def __init__(
        self,
        mesh: Mesh,
        shardings: Params,
        actor: Actor,
        params: Params,
        *,
        tokenizer: TextTokenizer,
        config: Search,
        batch_size: int,
        max_question_tokens: int,
        store: EmbeddingFiles | None = None,
    ) -> None:
        encoder, block_shapes, rollout = actor.encoder, actor.block_shapes, actor.config
        self._mesh, self._encoder, self._tokenizer = mesh, encoder, tokenizer
        self._params, self._rollout, self._config = params, rollout, config
        self._batch_size, self._max_question_tokens = batch_size, max_question_tokens
        self._width = state_width(
            len(encoder.state_opening),
            max_question_tokens,
            rollout.max_chunk_tokens_in_state,
            rollout.max_steps - 1,
        )
        embed_chunks = make_embed(mesh, shardings, encoder, block_shapes.chunks, CHUNK)
        self._embed_states = make_embed(mesh, shardings, encoder, block_shapes.states, STATE)
        row_tokens = rollout.max_chunk_tokens
        self.table = TextTable(
            mesh, encoder, tokenizer, embed_chunks, params, row_tokens=row_tokens, store=store
        )
        self._best = make_best_chunks(mesh, rollout.positions, rollout.max_steps, config.actions)
        self._devices = mesh.size
        self._stop = None
        if rollout.stop_action:  # an empty chunk
            (row,) = self.table.rows_of([""])  # first: this makes the array grow
            self._stop = self.table.array[int(row)]

    def play(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Path]]:
        """The best path through each document, in order; of long documents fewer at a time."""
        batch: list[Sample] = []
        longest = 0  # number of chunks in the longest document of the batch
        for sample in samples:
            own = len(sample.chunks)
            if batch and len(batch) >= self.room(max(longest, own)):
                yield from zip(batch, self._play(batch, self.room(longest)), strict=True)
                batch, longest = [], 0
            batch.append(sample)
            longest = max(longest, own)
        if batch:
            yield from zip(batch, self._play(batch, self.room(longest)), strict=True)

    def room(self, chunks: int) -> int:
        """Number of documents played side by side if the longest has this many chunks."""
        columns = padded_chunks(chunks, self._devices)
        return max(1, min(self._batch_size, CHUNKS_AT_ONCE // columns))

    def _questions(self, samples: list[Sample]) -> list[Question]:
        encoded = self._tokenizer.encode([sample.question for sample in samples])
        rows = self.table.rows_of([text for sample in samples for text in sample.chunks])
        ends = np.cumsum([len(sample.chunks) for sample in samples])
        parts = np.split(rows, ends[:-1])
        most = self._max_question_tokens
        return [Question(*own) for own in zip(samples, (ids[:most] for ids in encoded), parts)]

    def _play(self, samples: list[Sample], size: int) -> list[Path]:
        questions = self._questions(samples)
        columns = padded_chunks(max(len(q.rows) for q in questions), self._devices)
        rows, counts = padded_rows([each.rows for each in questions], (size, columns), 1, 0)
        keys = self._keys(questions, size)
        beams = [[Path()] for _ in questions]
        for _ in range(self._rollout.max_steps):
            if all(path.ended for beam in beams for path in beam):
                break
            states = self._states(questions, beams, size)
            values, index = self._actions(rows, counts, states, keys, beams)
            beams = [
                self._search(beam, values[i], index[i], question.sample)
                for i, (question, beam) in enumerate(zip(questions, beams, strict=True))
            ]
        return [beam[0] for beam in beams]

    def _actions(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        states: jax.Array,
        keys: jax.Array,
        beams: list[list[Path]],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Q-values and indices `[B, W, k]` of the best actions.

        If there is a STOP action, it is one more column at the end.
        """
        taken = np.full((*states.shape[:2], self._rollout.max_steps), NOT_TAKEN, np.int32)
        for i, beam in enumerate(beams):
            for j, path in enumerate(beam):
                taken[i, j, : len(path.taken)] = path.taken
        of_host: Any = (counts, states, taken, keys)  # NumPy's too: every process has all of them
        best = self._best(self.table.array, rows, Searches(*of_host))
        values, index = np.asarray(best.values), np.asarray(best.actions)
        if self._stop is None:
            return values, index
        of_stop = np.asarray(states @ self._stop)[..., None]
        stop = np.broadcast_to(counts[:, None, None], of_stop.shape)
        return np.concatenate([values, of_stop], -1), np.concatenate([index, stop], -1)

    def _search(
        self, beam: list[Path], values: np.ndarray, index: np.ndarray, sample: Sample
    ) -> list[Path]:
        """The W best continuations of the paths of one document, best first."""
        able = [values[j] > MASKED / 2 for j in range(len(beam))]
        choices = [Choices(values[j][there], index[j][there]) for j, there in enumerate(able)]
        # Paths end where `environments.chunks.step` ends them.
        support = () if self._rollout.never_terminate else sample.support
        return best_paths(beam, choices, self._config, len(sample.chunks), support)

    def _states(self, questions: list[Question], beams: list[list[Path]], size: int) -> jax.Array:
        """Embeddings `[size, W, 2D]` of the states that the paths lead to."""
        beam = self._config.beam
        count = size * beam
        rows: list[list[int]] = [[] for _ in range(count)]
        for i, (question, paths) in enumerate(zip(questions, beams, strict=True)):
            for j, path in enumerate(paths):
                if not path.ended:
                    rows[i * beam + j] = self._state_row(question, path)
        given = padded_rows(rows, (count, self._width), self._devices, self._encoder.pad_id)
        embedded = replicate(self._mesh, self._embed_states(self._params, *given))
        return embedded[:count].reshape(size, beam, -1)

    def _state_row(self, question: Question, path: Path) -> list[int]:
        encoder, rollout = self._encoder, self._rollout
        taken = sorted(path.taken) if rollout.sort_by_index else path.taken
        row = [*encoder.state_opening, *question.question, encoder.sep_id]
        for ids in self._tokenizer.encode([question.sample.chunks[i] for i in taken]):
            row += [*ids[: rollout.max_chunk_tokens_in_state], encoder.sep_id]
        return row

    def _keys(self, questions: list[Question], size: int) -> jax.Array:
        """PRNG keys `[size]` of the draws of the chunks' positions."""
        rows, shape = [each.question for each in questions], (size, self._max_question_tokens)
        return positions.evaluation_keys(*padded_rows(rows, shape, 1, 0))
