"""What the retrieval suite's cases embed with, and their indexes of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.retrieval.exact import ExactIndex
from qrag_jax.runtime.minilm import MINILM
from qrag_jax.systems.indexing import CORPUS, index_corpus
from qrag_jax.systems.passage_encoder import PassageEncoder

ROW_TOKENS = 256  # of MiniLM, as its folder says


def minilm() -> PassageEncoder:
    """MiniLM as published: normalised means, rows of `ROW_TOKENS`.

    Raises:
        InputError: it is not on this machine and cannot be had.
    """
    config = EncoderConfig(pooling="mean", normalise=True, scale=1.0)
    return PassageEncoder.of_folder(MINILM, config, max_tokens=ROW_TOKENS)


def vectors_of(folder: Path, encoder: PassageEncoder) -> ExactIndex:
    """The index of the corpus in `folder / CORPUS`; made if it is not there."""
    digest = encoder.digest()
    out = folder / digest[:12]
    if not out.exists():
        out.mkdir()
        (out / CORPUS).symlink_to((folder / CORPUS).absolute())
    indexed = index_corpus(None, out, encoder)
    return ExactIndex.open(indexed.folder, indexed.corpus, encoder=digest)


def embedded(encoder: PassageEncoder, texts: Sequence[str]) -> np.ndarray:
    """float32 `[texts, width]`: queries, with the encoder's one tower."""
    tower = encoder.tower()
    return tower([encoder.row(ids).tolist() for ids in encoder.tokenizer.encode(texts)])
