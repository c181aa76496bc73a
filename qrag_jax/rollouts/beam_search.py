"""Plays documents of any length, greedily or by beam search over actions ("Plan Q-RAG").

Texts are embedded once, into a table. After that, a step encodes W states per document and takes
the best of W × C actions. The Q-values are the learned ones (Q-RAG, arXiv 2511.07328).
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.sample import Sample
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import NOT_TAKEN
from qrag_jax.policies.soft_q import MASKED, make_best_chunks, padded_chunks
from qrag_jax.retrieval.multi_step import Path, best_paths
from qrag_jax.retrieval.towers import Towers
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.rollouts.text_table import TextTable, padded_rows
from qrag_jax.runtime.retriever_config import Search

CHUNKS_AT_ONCE = 65_536  # in all documents played side by side, at most


class BeamSearch:
    """Plays documents with one set of parameters; `batch_size` at once, of long ones fewer."""

    def __init__(
        self,
        mesh: Mesh,
        towers: Towers,
        rollout: RolloutConfig,
        config: Search,
        *,
        batch_size: int,
        store: pathlib.Path | None = None,
    ) -> None:
        self._towers, self._rollout, self._config = towers, rollout, config
        self._batch_size, self._devices = batch_size, mesh.size
        self.table = TextTable(mesh, towers.chunks, store)
        self._best = make_best_chunks(mesh, rollout.positions, rollout.max_steps, config.actions)
        # An empty chunk.
        self._stop = towers.chunks([""])[0] if rollout.stop_action else None

    def play(self, samples: Sequence[Sample]) -> Iterator[tuple[Sample, Path]]:
        """The best path through each document, in order; of long documents fewer at a time."""
        batch: list[Sample] = []
        longest = 0  # number of chunks in the longest document of the batch
        for sample in samples:
            count = len(sample.chunks)
            if batch and len(batch) >= self.room(max(longest, count)):
                yield from zip(batch, self._play(batch, self.room(longest)), strict=True)
                batch, longest = [], 0
            batch.append(sample)
            longest = max(longest, count)
        if batch:
            yield from zip(batch, self._play(batch, self.room(longest)), strict=True)

    def room(self, chunks: int) -> int:
        """Number of documents played side by side if the longest has this many chunks."""
        columns = padded_chunks(chunks, self._devices)
        return max(1, min(self._batch_size, CHUNKS_AT_ONCE // columns))

    def _play(self, samples: list[Sample], size: int) -> list[Path]:
        rows_of_all = self.table.rows_of([text for sample in samples for text in sample.chunks])
        ends = np.cumsum([len(sample.chunks) for sample in samples])
        chunks = np.split(rows_of_all, ends[:-1])
        columns = padded_chunks(max(map(len, chunks)), self._devices)
        rows, counts = padded_rows(chunks, (size, columns), 1, 0)
        # PRNG keys `[size]` of the draws of the chunks' positions.
        most = self._towers.form.question_tokens
        encoded = self._towers.tokenizer.encode([sample.question for sample in samples])
        cut = padded_rows([ids[:most] for ids in encoded], (size, most), 1, 0)
        keys = positions.evaluation_keys(*cut)
        beams = [[Path()] for _ in samples]
        for _ in range(self._rollout.max_steps):
            if all(path.ended for beam in beams for path in beam):
                break
            states = self._states(samples, beams, size)
            values, index = self._actions(rows, counts, states, keys, beams)
            beams = [
                self._search(beam, values[i], index[i], sample)
                for i, (sample, beam) in enumerate(zip(samples, beams, strict=True))
            ]
        return [beam[0] for beam in beams]

    def _actions(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        states: np.ndarray,
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
        best = self._best(self.table.array, rows, (counts, states, taken, keys))
        values, index = map(np.asarray, best)
        if self._stop is None:
            return values, index
        of_stop = (states @ self._stop)[..., None]
        stop = np.broadcast_to(counts[:, None, None], of_stop.shape)
        return np.concatenate([values, of_stop], -1), np.concatenate([index, stop], -1)

    def _search(
        self, beam: list[Path], values: np.ndarray, index: np.ndarray, sample: Sample
    ) -> list[Path]:
        """The W best continuations of the paths of one document, best first."""
        able = [values[j] > MASKED / 2 for j in range(len(beam))]
        choices = [(values[j][there], index[j][there]) for j, there in enumerate(able)]
        # Paths end where `environments.chunks.step` ends them.
        support = () if self._rollout.never_terminate else sample.support
        return best_paths(beam, choices, self._config, len(sample.chunks), support)

    def _states(self, samples: list[Sample], beams: list[list[Path]], size: int) -> np.ndarray:
        """Embeddings `[size, W, 2D]` of the states that the paths lead to; 0 where none is."""
        places, read = list[tuple[int, int]](), list[tuple[str, list[str]]]()
        for i, (sample, paths) in enumerate(zip(samples, beams, strict=True)):
            for j, path in enumerate(paths):
                if not path.ended:
                    taken = sorted(path.taken) if self._rollout.sort_by_index else path.taken
                    places.append((i, j))
                    read.append((sample.question, [sample.chunks[chunk] for chunk in taken]))
        embedded = self._towers.states(read)
        states = np.zeros((size, self._config.beam, embedded.shape[1]), np.float32)
        states[tuple(np.transpose(places))] = embedded
        return states
