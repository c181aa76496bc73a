"""Exports a trained run to sentence-transformers and compares its vectors with training's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.report import Case
from qrag_jax.models.files.sentence_transformers_tokenizer import token_name
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import q_rag_config, towers_export
from qrag_jax.systems.saved_run import SavedRun

TOLERANCE = 1e-5
MOST_TOKENS = 24  # per text: exported towers cut long rows, as training does


def our_vectors(
    loaded: LoadedEncoder, params: Any, tower: towers_export.Tower, texts: Sequence[Sequence[str]]
) -> np.ndarray:
    """Embeddings `[len(texts), D]` of rows that are joined from parts, as in training.

    Args:
        loaded: the encoder and its tokenizer.
        params: parameters of both towers, stacked on axis 0.
        tower: the tower that embeds the rows.
        texts: the parts of each row.
    """
    encoder = loaded.encoder
    rows = []
    for parts in texts:
        row = list(tower.opening)
        for ids in loaded.tokenizer.encode(list(parts)):
            row += [*ids, encoder.sep_id]
        rows.append(row)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths)), encoder.pad_id, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return np.asarray(
        encoder.embed(
            encoder.tower(params, tower.number), jnp.asarray(tokens), jnp.asarray(lengths)
        )
    )


def round_trip_case(name: str, workdir: Path, out: Path, texts: Sequence[str]) -> Case:
    """Exports a run's last checkpoint to `out`; the largest difference between both vectors."""
    from sentence_transformers import SentenceTransformer

    config = q_rag_config.load_config(workdir / CONFIG_NAME)
    config.encoder.dtype = "float32"  # as sentence-transformers
    run = SavedRun.open(workdir, config)
    towers_export.export(run, "last", out)
    params, _ = run.trained("last")
    ids = run.loaded.tokenizer.encode(list(texts))
    fitting = [text for text, its in zip(texts, ids, strict=True) if len(its) <= MOST_TOKENS][:16]
    separator = token_name(run.loaded.tokenizer, run.loaded.encoder.sep_id)
    largest = {}
    for tower in towers_export.towers(run.loaded, run.config):
        pairs = zip(fitting[::2], fitting[1::2], strict=True)
        rows = [[text] for text in fitting] if tower.plain else [list(pair) for pair in pairs]
        model = SentenceTransformer(str(out / tower.name), device="cpu")
        theirs = model.encode([separator.join(parts) for parts in rows])
        ours = our_vectors(run.loaded, params, tower, rows)
        largest[f"{tower.name} tower"] = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    worst = max(largest.values())
    return Case(
        f"{name}: vectors of the exported towers in sentence-transformers beside ours",
        worst,
        "of the largest number",
        target=f"<= {TOLERANCE:g}",
        holds=worst <= TOLERANCE,
        details=largest,
    )
