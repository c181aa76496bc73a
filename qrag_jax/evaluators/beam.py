"""What a config says of planning, and planned episodes written to a retrieval log."""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from tqdm import tqdm

from qrag_jax import experiment
from qrag_jax.algorithms.returns import discounted_return
from qrag_jax.block_shapes import choose_block_shapes
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import state_width
from qrag_jax.evaluators.episodes import make_row
from qrag_jax.evaluators.log_record import LATER
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.runtime.embedding_files import EmbeddingFiles, encoder_key
from qrag_jax.runtime.locks import log_locks
from qrag_jax.saved_run import SavedRun


def make_beam_search(
    run: SavedRun, params: Params, stores: Sequence[TokenStore], embeddings: Path | None = None
) -> BeamSearch:
    """The planner that the run's config asks for.

    Args:
        stores: tokens of samples of the usual lengths; blocks are chosen for them.
        embeddings: folder where embeddings of chunks are kept for later commands.

    Raises:
        InputError: rows can be longer than the encoder's positions.
    """
    config, loaded = run.config, run.loaded
    rollout = experiment.rollout_config(config)
    data = config.data
    # Not what these samples need but the longest there can be: other documents come.
    longest = max(data.max_chunk_tokens - 2, data.max_chunk_tokens_in_state)
    in_state = data.max_chunk_tokens_in_state
    opening = len(loaded.encoder.state_opening)
    others = state_width(opening, 0, in_state, rollout.max_steps - 1)
    room = loaded.encoder.max_positions - others
    found = max(int(store.question_lengths.max()) for store in stores)
    questions = max(found, min(data.max_question_tokens, room))
    shape = EpisodeShape(questions, longest, max(int(s.chunk_counts.max()) for s in stores))
    experiment.check_fit(config, loaded.encoder, shape, {"evaluation": stores[0]})
    store = None
    if embeddings is not None:
        tower = loaded.encoder.tower(params, CHUNK)
        settings = {
            "row_tokens": data.max_chunk_tokens,
            "tokenizer": loaded.tokenizer.fingerprint(),
            "scale": loaded.encoder.scale,
            "pooling": [loaded.encoder.pooling, loaded.encoder.normalise],
            "opening": list(loaded.encoder.chunk_opening),
            "precision": list(map(str, loaded.encoder.module.precision)),
        }
        folder = embeddings / encoder_key(tower, settings)
        store = EmbeddingFiles(folder, loaded.encoder.width)
    return BeamSearch(
        run.mesh,
        run.shardings,
        loaded.encoder,
        loaded.tokenizer,
        params,
        choose_block_shapes(config, loaded.encoder, shape, stores),
        rollout,
        experiment.beam_config(config),
        questions,
        store,
    )


def play_to_log(
    searcher: BeamSearch,
    config: ml_collections.ConfigDict,
    samples: Sequence[Sample],
    log: Path,
    meta: dict[str, Any],
    *,
    restart: bool,
) -> tuple[list[Row], int]:
    """Plays the samples that the log does not hold yet.

    Args:
        meta: `log_record` of the planner.

    Returns:
        all rows, and how many of them were played now, which are the last ones.

    Raises:
        InputError: the log was begun with other settings, another process writes to it, or it is
            broken.
    """
    with log_locks(log):
        if restart:
            retrieval_log.discard(log)
        retrieval_log.check_meta(log, meta, LATER)
        return _play_missing(searcher, config, samples, log)


def _play_missing(
    searcher: BeamSearch, config: ml_collections.ConfigDict, samples: Sequence[Sample], log: Path
) -> tuple[list[Row], int]:
    rows = retrieval_log.read_partial(log)
    retrieval_log.check_count(log, len(rows), len(samples))
    todo = samples[len(rows) :]
    if rows:
        print(f"{log.name}: {len(rows)} of {len(samples)} questions are in the log already")
    bar = tqdm(total=len(todo), unit="episode", desc=log.stem, disable=not todo)
    with bar:
        for sample, path in searcher.play(todo):
            ret = _return(config, sample, path.taken)
            row = make_row(sample, list(path.taken), list(path.q), ret)
            retrieval_log.append(log, [row])
            rows.append(row)
            bar.update()
    return rows, len(todo)


def _return(config: ml_collections.ConfigDict, sample: Sample, taken: Sequence[int]) -> float:
    """The discounted return of one episode, over the chunks that matter alone."""
    if not taken:
        return 0.0
    chunks = sorted({*taken, *sample.support})
    support = np.isin([*chunks, -1], sample.support)[None]  # the last column is STOP's
    actions = np.searchsorted(chunks, taken)[None]
    played = types.SimpleNamespace(actions=actions, valid=np.ones(actions.shape, bool))
    batch = types.SimpleNamespace(support=support)
    rewards = experiment.feedback(config)(batch, played)  # type: ignore[arg-type]
    return float(discounted_return(rewards[0], config.pqn.gamma))
