"""Small problems that tests of plays share: random episodes, and documents of real words."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.environments.chunks import state_width
from qrag_jax.feedback.facts import FactReward, fact_feedback
from qrag_jax.learners.config import PQNConfig
from qrag_jax.learners.state import params_shardings
from qrag_jax.learners.two_towers import PQNGradient, Towers
from qrag_jax.learners.update import Sums
from qrag_jax.models.compute.packing import Blocks
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.embedding import Params
from qrag_jax.models.first_encoder import ScratchConfig, load_encoder, make_scratch_folder
from qrag_jax.models.pretrained import LoadedEncoder
from qrag_jax.retrieval.towers import RowForm
from qrag_jax.retrieval.towers import Towers as TextTowers
from qrag_jax.rollouts.chunks import CHUNK, STATE, Actor, Draws, RolloutConfig, Trajectory, rollout
from qrag_jax.rollouts.text_table import MeshTower, TextTable
from qrag_jax.runtime.retriever_config import Search
from tests.devices import mesh_of
from tests.episodes_maker import random_episodes, tiny_encoder, towers

SHAPE = EpisodeShape(question_tokens=6, chunk_tokens=8, chunks=6)
# More chunks than steps, fewer (2, 1), as many (3), and empty rows that fill up the batch (0).
CHUNK_COUNTS = (6, 2, 4, 0, 1, 3, 6, 0)
EPISODES = len(CHUNK_COUNTS)

ENCODER = tiny_encoder()
CONFIG = RolloutConfig(
    max_steps=3,
    never_terminate=True,
    sort_by_index=False,
    max_chunk_tokens=9,  # so that chunks of 8 tokens are cut to 7
    max_chunk_tokens_in_state=5,
    top_k_actions=3,
)
WIDTH = state_width(1, SHAPE.question_tokens, 5, CONFIG.max_steps - 1)
PLAN = BlockShapes(
    chunks=Blocks((18, 40), (6, 9), (4.0, 8.0)),
    states=Blocks((40,), (10, WIDTH), (8.0, 15.0)),
    gradients=Blocks((WIDTH, 50), (9, WIDTH), (8.0, 15.0)),
)
# For tests of other things than blocks: one bucket each compiles faster.
ONE_BUCKET = BlockShapes(
    Blocks((144,), (9,), (8.0,)), Blocks((80,), (WIDTH,), (12.0,)), Blocks((80,), (WIDTH,), (12.0,))
)
ACTOR = Actor(ENCODER, PLAN, CONFIG)
ONE_BUCKET_ACTOR = Actor(ENCODER, ONE_BUCKET, CONFIG)
PQN = PQNConfig(gamma=0.9, lambda_=0.6, tau=0.1, alpha=0.5, learning_start=10)
ALPHA = np.float32(0.5)


def unique_tokens(tokens: np.ndarray, lengths: np.ndarray) -> int:
    """Number of tokens of all different rows; tokens `[..., L]`, lengths `[...]` of all rows."""
    rows = zip(np.asarray(tokens).reshape(-1, tokens.shape[-1]), np.ravel(lengths), strict=True)
    return sum(map(len, {tuple(row[:length].tolist()) for row, length in rows}))


# Compiled here, so that tests in several files share the programs.
jitted_rollout = jax.jit(rollout, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def jitted_gradient(
    gradient: PQNGradient, towers: Towers, experience: Any, draws: Draws
) -> tuple[Any, Sums]:
    """The result of `gradient`; equal gradient objects share a program."""
    return gradient(towers, experience, draws)


def episodes(seed: int = 0) -> EpisodeBatch:
    return random_episodes(seed, CHUNK_COUNTS, SHAPE)


def online() -> dict:
    return towers(ENCODER, 0)


def target() -> dict:
    return towers(ENCODER, 1)


def feedback(batch: EpisodeBatch, trajectory: Trajectory):
    """Ground truth with every option in use, so that rewards differ from step to step."""
    config = FactReward(penalize_extra_steps=True, per_fact_reward=0.25)
    return fact_feedback(config)(batch, trajectory)


# ---------------------------------------------------------------- documents of real words

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
        result = load_encoder(Path(folder))
        return dataclasses.replace(result, stored=result.params)


def params() -> Params:
    """Two towers whose embeddings lie far from each other."""
    return towers(loaded().encoder, 0)


def shardings(mesh: Mesh) -> Params:
    return params_shardings(mesh, (), loaded().params)


def block_shapes(state_tokens: int) -> BlockShapes:
    """One shape for each kind of row, so that little has to be compiled."""
    chunks = Blocks((128,), (ROW_TOKENS,), (7.0,))
    states = Blocks((256,), (state_tokens,), (20.0,))
    return BlockShapes(chunks, states, states)


ROLLOUT = RolloutConfig(
    max_steps=3,
    never_terminate=True,
    sort_by_index=False,
    max_chunk_tokens=ROW_TOKENS,
    max_chunk_tokens_in_state=5,
    top_k_actions=3,
)
STATE_TOKENS = state_width(1, QUESTION_TOKENS, 5, ROLLOUT.max_steps - 1)
KINDS = {
    "none": ROLLOUT,
    "absolute": dataclasses.replace(ROLLOUT, positions="absolute"),
    "sorted": dataclasses.replace(ROLLOUT, positions="relative", sort_by_index=True),
    "stop": dataclasses.replace(ROLLOUT, positions="relative", stop_action=True),
}


@functools.cache
def towers_of(seed: int = 0) -> TextTowers:
    """The towers of states and of chunks that `ROLLOUT` plays with, on one device."""
    encoder, mesh, shapes = loaded().encoder, mesh_of(), block_shapes(STATE_TOKENS)
    form = RowForm(
        state_opening=encoder.state_opening,
        chunk_opening=encoder.chunk_opening,
        sep_id=encoder.sep_id,
        max_question_tokens=QUESTION_TOKENS,
        max_chunk_tokens_in_state=ROLLOUT.max_chunk_tokens_in_state,
        state_tokens=STATE_TOKENS,
        chunk_tokens=ROW_TOKENS,
        max_chunks=ROLLOUT.max_steps - 1,
    )
    on_mesh = mesh, shardings(mesh), encoder, towers(encoder, seed)
    return TextTowers(
        loaded().tokenizer,
        form,
        MeshTower(*on_mesh, number=STATE, row_tokens=STATE_TOKENS, blocks=shapes.states),
        MeshTower(*on_mesh, number=CHUNK, row_tokens=ROW_TOKENS, blocks=shapes.chunks),
    )


def table(folder: Path | None = None) -> TextTable:
    """A table of texts on one device."""
    return TextTable(mesh_of(), towers_of().chunks, folder)


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


def planned(**changes: Any) -> Search:
    """How actions are searched: greedily, up to three of them, unless changed."""
    usual: dict[str, Any] = {"max_steps": 3, "beam": 1, "beam_score": "policy", "gamma": 0.99}
    usual |= {"alpha": 0.05, "top_k_actions": 5, "stop_action": False, "stop_threshold": None}
    return Search(**usual | changes)
