"""All programs of training, evaluation and search of one encoder on one mesh, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.gpu_query import ALGORITHMS, query_program
from benchmarks.gpu_search import CorpusSize, search_program
from benchmarks.gpu_tokens import UPDATES, LanguageModelSize, tokens_program
from benchmarks.memory_cases import ROW_TOKENS, STEPS, Model, Step
from qrag_jax.evaluators.episodes import Player, make_play
from qrag_jax.learners.deferred import make_learn_step, make_play_step, scored_shapes
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.policies.document_scores import Searches, make_best_chunks, padded_chunks
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.rollouts.text_table import GROUP, make_embed
from qrag_jax.runtime.dry_run import Program

# What they do: an update that plays, scores and learns at once; the two halves of one whose rewards
# come from outside; greedy evaluation; embedding the texts of a table; embedding the states of a
# beam search; and scoring all chunks of long documents. The search over a corpus has no encoder.
UPDATE, PLAY, LEARN = "update", "play", "learn"
EVALUATION, TEXTS, STATES, SCORES = "evaluation", "texts", "states", "scores"
NAMES = (UPDATE, PLAY, LEARN, EVALUATION, TEXTS, STATES, SCORES)
# HARR's update, by the name of the algorithm, and those of a token policy are further programs, see
# `gpu_query` and `gpu_tokens`.
# These compute gradients, and take over the buffers of the state.
LEARNS = (UPDATE, LEARN, *ALGORITHMS, *UPDATES)
Subject = Model | CorpusSize | LanguageModelSize
DOCUMENTS, PATHS, DOCUMENT_CHUNKS = 32, 4, 2048  # of a beam search


def program_of(model: Subject, mesh: Mesh, lora: bool, name: str) -> Program:
    """One program of a model, or the search over a corpus.

    Args:
        lora: adapters are trained, else whole towers.
        name: one of `NAMES`, or a key of `ALGORITHMS`; of a language model, one of
            `gpu_tokens.PROGRAMS`; of a corpus, there is its search alone.
    """
    if isinstance(model, CorpusSize):
        return search_program(model, mesh)
    if isinstance(model, LanguageModelSize):
        return tokens_program(model, mesh, lora, name)
    if name in ALGORITHMS:
        return query_program(model, mesh, lora, name)
    return _MAKERS[name](Step(model, mesh, lora))


def _update(step: Step) -> Program:
    return Program(UPDATE, step.program, step.arguments)


def _play(step: Step) -> Program:
    state, batch, *base = step.arguments
    number = _ints()
    return Program(PLAY, make_play_step(step.towers), (state, batch, number, *base))


def _learn(step: Step) -> Program:
    state, batch, *base = step.arguments
    scored = scored_shapes(batch, STEPS)
    return Program(LEARN, make_learn_step(step.towers), (state, scored, *base))


def _evaluation(step: Step) -> Program:
    towers = step.towers
    play = make_play(Player.of(towers, step.feedback), towers.actor.block_shapes)
    return Program(EVALUATION, play, (_params(step), step.arguments[1]))


def _texts(step: Step) -> Program:
    actor = step.towers.actor
    blocks, rows = actor.block_shapes.chunks, _whole(GROUP, step)
    embed = make_embed(step.mesh, step.towers.params_shardings, actor.encoder, blocks, CHUNK)
    return Program(TEXTS, embed, (_params(step), _ints(rows, ROW_TOKENS), _ints(rows)))


def _states(step: Step) -> Program:
    actor = step.towers.actor
    blocks, rows = actor.block_shapes.states, _whole(DOCUMENTS * PATHS, step)
    embed = make_embed(step.mesh, step.towers.params_shardings, actor.encoder, blocks, STATE)
    return Program(STATES, embed, (_params(step), _ints(rows, blocks.lengths[-1]), _ints(rows)))


def _scores(step: Step) -> Program:
    width = step.towers.actor.encoder.width
    best = make_best_chunks(step.mesh, "relative", STEPS, PATHS)
    columns = padded_chunks(DOCUMENT_CHUNKS, step.mesh.size)
    searches = Searches(
        _ints(DOCUMENTS),
        _floats(DOCUMENTS, PATHS, width),
        _ints(DOCUMENTS, PATHS, STEPS),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), DOCUMENTS)),
    )
    rows = _ints(DOCUMENTS, columns)
    return Program(SCORES, best, (_floats(2 * GROUP, width), rows, searches))


_MAKERS: dict[str, Callable[[Step], Program]] = {
    UPDATE: _update,
    PLAY: _play,
    LEARN: _learn,
    EVALUATION: _evaluation,
    TEXTS: _texts,
    STATES: _states,
    SCORES: _scores,
}


def _params(step: Step) -> Any:
    """What is played with: both towers, or their adapters over one base."""
    state, _, *base = step.arguments
    return Adapted(base[0], state.params) if base else state.params


def _whole(count: int, step: Step) -> int:
    """At least so many rows, equally many on every device."""
    return count + -count % step.mesh.size


def _ints(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.int32)


def _floats(*sizes: int) -> Any:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)
