"""Beam search over documents of any length, written to a retrieval log."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from qrag_jax.algorithms.advantages import discounted_return
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, TokenStore
from qrag_jax.environments.chunks import state_width
from qrag_jax.evaluators.episodes import Player, make_row
from qrag_jax.metrics.row_log import begin
from qrag_jax.metrics.rows import RETRIEVALS, Row
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.heads.embedding import Params
from qrag_jax.retrieval.paths import BeamConfig
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.block_shapes import choose_block_shapes
from qrag_jax.rollouts.chunks import CHUNK, Actor, check_fit
from qrag_jax.runtime.embedding_files import EmbeddingFiles, encoder_key
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.whole_files import log_locks


@dataclasses.dataclass(frozen=True)
class SearchSettings:
    """What a search needs besides a `Player`."""

    beam: BeamConfig  # how actions are searched
    encoder: EncoderConfig  # config from which the block shapes are chosen
    tokenizer: TextTokenizer  # for texts that are not tokenised yet
    max_question_tokens: int  # longer questions are cut


def make_beam_search(
    player: Player,
    settings: SearchSettings,
    params: Params | Adapted,
    stores: Sequence[TokenStore],
    embeddings: Path | None = None,
) -> BeamSearch:
    """Makes the beam search of a config.

    Args:
        stores: tokens of samples of typical lengths, for which the block shapes are chosen.
        embeddings: folder where embeddings of chunks are kept for later commands.
    """
    encoder, rollout = player.encoder, player.config
    # The longest possible rows, not the longest of these samples: other documents follow.
    in_state = rollout.max_chunk_tokens_in_state
    longest = max(rollout.max_chunk_tokens - 2, in_state)
    others = state_width(len(encoder.state_opening), 0, in_state, rollout.max_steps - 1)
    room = encoder.max_positions - others
    found = max(int(store.question_lengths.max()) for store in stores)
    questions = max(found, min(settings.max_question_tokens, room))
    shape = EpisodeShape(questions, longest, max(int(s.chunk_counts.max()) for s in stores))
    check_fit(rollout, encoder, shape, {"evaluation": stores[0]})
    store = None
    if embeddings is not None:
        tower = encoder.tower(params, CHUNK)
        made_by = {
            "row_tokens": rollout.max_chunk_tokens,
            "tokenizer": settings.tokenizer.fingerprint(),
            "scale": encoder.scale,
            "pooling": [encoder.pooling, encoder.normalise],
            "opening": list(encoder.chunk_opening),
            "precision": list(map(str, encoder.module.precision)),
        }
        folder = embeddings / encoder_key(tower, made_by)
        store = EmbeddingFiles(folder, encoder.width)
    shapes = choose_block_shapes(
        settings.encoder, rollout, encoder, shape, stores, platform=Platform.of(player.mesh)
    )
    return BeamSearch(
        player.mesh,
        player.shardings,
        Actor(encoder, shapes, rollout),
        params,
        tokenizer=settings.tokenizer,
        config=settings.beam,
        max_question_tokens=questions,
        store=store,
    )


@dataclasses.dataclass(frozen=True)
class SearchLog:
    """Writes searched episodes to a retrieval log."""

    searcher: BeamSearch
    player: Player  # gives the returns
    path: Path  # the log's file
    meta: dict[str, Any]  # `log_record` of the search

    def play(self, samples: Sequence[Sample], *, restart: bool) -> tuple[list[Row], int]:
        """Plays the samples that the log does not hold yet.

        Returns:
            all rows, and the number of rows that this call played (the last ones).
        """
        with log_locks(self.path):
            begin(self.path, self.meta, restart=restart)
            rows = RETRIEVALS.read_partial(self.path, len(samples))
            todo, count = samples[len(rows) :], len(samples)
            if rows:
                print(f"{self.path.name}: {len(rows)} of {count} questions are in the log already")
            with tqdm(
                total=len(todo), unit="episode", desc=self.path.stem, disable=not todo
            ) as bar:
                for sample, path in self.searcher.play(todo):
                    facts = bool(sample.support)  # without them there is no return
                    ret = _return(self.player, sample, path.taken) if facts else None
                    row = make_row(sample, list(path.taken), list(path.q), ret)
                    RETRIEVALS.append(self.path, [row])
                    rows.append(row)
                    bar.update()
        return rows, len(todo)


def _return(player: Player, sample: Sample, taken: Sequence[int]) -> float:
    """The discounted return of one episode, from its taken and its supporting chunks alone."""
    if not taken:
        return 0.0
    chunks = sorted({*taken, *sample.support})
    support = np.isin([*chunks, -1], sample.support)[None]  # the last column is STOP's
    actions = np.searchsorted(chunks, taken)[None]
    played = types.SimpleNamespace(actions=actions, valid=np.ones(actions.shape, bool))
    batch = types.SimpleNamespace(support=support)
    rewards = player.feedback(batch, played)  # type: ignore[arg-type]
    return float(discounted_return(rewards[0], player.gamma))
