"""A small encoder with a tokenizer of its own, and documents of any length made of its words."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.sample import Sample
from qrag_jax.learners import placement
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import Params
from qrag_jax.models.pretrained import LoadedEncoder, load_encoder
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.rollouts.text_table import Store, TextTable, make_embed
from tests.devices import mesh_of
from tests.episodes_maker import towers

WORDS = (
    *("anna", "bo", "cleo", "moved", "went", "to", "the", "red", "green", "old", "garden"),
    *("kitchen", "hall", "took", "gave"),
)
ROW_TOKENS = 10  # of a chunk, special tokens counted
MOST_WORDS = 12  # so that some chunks are cut
QUESTION_TOKENS = 6
POSITIONS = 64


@functools.cache
def loaded() -> LoadedEncoder:
    """A real model folder, read as a run reads it: one layer, width 16, one token a word."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=200, positions=POSITIONS)
        make_scratch_folder(Path(folder), [" ".join(WORDS)] * 3, sizes, seed=0)
        found = load_encoder(Path(folder))
        return dataclasses.replace(found, stored=found.params)


def params() -> Params:
    """Two towers whose embeddings lie far from each other."""
    return towers(loaded().encoder, 0)


def shardings(mesh: Mesh) -> Params:
    return placement.params_shardings(mesh, (), loaded().params)


def block_shapes(state_tokens: int) -> BlockShapes:
    """One shape for each kind of row, so that little has to be compiled."""
    chunks = Blocks((128,), (ROW_TOKENS,), (7.0,))
    states = Blocks((256,), (state_tokens,), (20.0,))
    return BlockShapes(chunks, states, states)


def table(store: Store | None = None, seed: int = 0, tower: int = 1) -> TextTable:
    """A table of texts on one device."""
    mesh, encoder = mesh_of(), loaded().encoder
    embed = make_embed(mesh, shardings(mesh), encoder, block_shapes(ROW_TOKENS).chunks, tower)
    return TextTable(
        *(mesh, encoder, loaded().tokenizer, embed, towers(encoder, seed)),
        row_tokens=ROW_TOKENS,
        store=store,
    )


def text(rng: np.random.Generator, least: int = 0) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(least, MOST_WORDS + 1)))


def sample(seed: int, chunks: int, facts: int = 2) -> Sample:
    """A document in which some texts occur more than once."""
    rng = np.random.default_rng(seed)
    pool = [text(rng) for _ in range(max(2, chunks * 2 // 3))]
    return Sample(
        id=f"made-{seed}",
        question=text(rng, least=1),
        chunks=tuple(str(chunk) for chunk in rng.choice(pool, chunks)),
        support=tuple(sorted(rng.choice(chunks, min(facts, chunks), replace=False).tolist())),
        answers=("garden",),
        source="made",
    )
