"""One search for the nearest passages: by an encoder that was not trained to search in steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.exact import ENGINE, ExactIndex
from qrag_jax.retrieval.manifest import read_manifest
from qrag_jax.retrieval.multi_step import Hit
from qrag_jax.retrieval.protocol import NONE, Index, Queries, Where
from qrag_jax.systems.indexing import BM25, CORPUS
from qrag_jax.systems.passage_encoder import PassageEncoder


class Nearest:
    """An index that is searched once for each question.

    Args:
        folder: of the index.
        encoder: the one that embedded its passages, which embeds questions as well, after its
            `state_prefix`; None: words are compared (BM25).

    Raises:
        InputError: the folder holds no such index, or another encoder embedded it.
    """

    def __init__(self, folder: Path, encoder: PassageEncoder | None) -> None:
        corpus = StoredCorpus(folder / CORPUS)
        self._encoder, self._index = encoder, _opened(folder, corpus, encoder)
        self._tower = None
        if encoder is not None:
            self._tower = encoder.tower()

    def search(
        self, questions: Sequence[str], k: int, where: Where | None = None
    ) -> list[list[Hit]]:
        """The k nearest passages of each question, best first; each has the step 1.

        Raises:
            InputError: as the engine raises it.
        """
        vectors = None
        if self._encoder is not None and self._tower is not None:
            text = self._encoder.encoder
            kept = self._encoder.row_tokens - len(text.state_opening) - 1
            encoded = self._encoder.tokenizer.encode(questions)
            vectors = self._tower(
                [[*text.state_opening, *ids[:kept], text.sep_id] for ids in encoded]
            )
        found = self._index.search(Queries(list(questions), vectors), k, where)
        return [self._hits(*row) for row in zip(*found, strict=True)]

    def _hits(self, numbers: Sequence[int], scores: Sequence[float]) -> list[Hit]:
        there = [int(number) for number in numbers if number != NONE]
        passages = self._index.corpus.passages(there)
        pairs = zip(passages, scores, strict=False)
        return [Hit(1, float(score), p.name, p.title, p.text, p.metadata) for p, score in pairs]


def _opened(folder: Path, corpus: StoredCorpus, encoder: PassageEncoder | None) -> Index:
    if encoder is None:
        return BM25Index.open(folder / BM25, corpus)
    found = read_manifest(folder / ENGINE, engine=ENGINE).encoder
    if found != encoder.digest():
        raise InputError(
            f"{folder} was embedded by another encoder, or with another dtype, pooling, prefix or "
            "length, than those given; give the ones that it was built with."
        )
    return ExactIndex.open(folder / ENGINE, corpus, encoder.mesh)
