"""Greedy episodes over a set of samples, batched on the device: retrieval-log rows and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qrag_jax.algorithms.returns import discounted_return
from qrag_jax.data.episodes import EpisodeBatch, EpisodeShape, evaluation_batches
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments.chunks import with_stop
from qrag_jax.learners.pqn import Feedback
from qrag_jax.metrics.facts import fact_em, fact_f1
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.models.compute.ragged import BlockShapes
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.rollouts.chunks import RolloutConfig, rollout
from qrag_jax.runtime.mesh import shard_batch
from qrag_jax.runtime.sharding import BATCH_AXES, gather, specs_of


class Played(NamedTuple):
    """Chunks taken `[B, T]`, whether each step happened, their Q, and the return `[B]`."""

    taken: jax.Array
    valid: jax.Array
    q: jax.Array
    ret: jax.Array


class Episodes(NamedTuple):
    """The same questions answered in several steps and by one look-up with the same encoder."""

    multi_step: Played
    single_step: Played


Play = Callable[[Params, EpisodeBatch], Episodes]


def make_play(
    mesh: Mesh,
    shardings: Params,
    encoder: TextEncoder,
    block_shapes: BlockShapes,
    config: RolloutConfig,
    feedback: Feedback,
    gamma: float,
) -> Play:
    """The jitted `(params, batch) → Episodes`; greedy, split over the mesh's batch axes.

    Args:
        shardings: where the parameters live; those that are split are gathered to play.
    """
    specs = specs_of(shardings)

    def on_device(params: Params, batch: EpisodeBatch) -> Episodes:
        params = gather(params, specs)
        chunks = batch.chunk_mask.shape[1]
        if config.stop_action:
            batch = with_stop(batch)
        trajectory = rollout(
            encoder, block_shapes, config, (params,), batch, None, jnp.float32(1.0)
        )
        # One look-up: the chunks that score highest for the question alone, best first.
        steps = min(config.max_steps, chunks)
        first_q, first = jax.lax.top_k(trajectory.first_q[:, :chunks], steps)
        present = jnp.take_along_axis(batch.chunk_mask, first, axis=1)
        looked_up = trajectory._replace(actions=first, valid=present)

        def returns(played):
            return jax.vmap(discounted_return, (0, None))(feedback(batch, played), gamma)

        took_chunk = trajectory.valid & (trajectory.actions < chunks)  # STOP is no chunk
        return Episodes(
            Played(trajectory.actions, took_chunk, trajectory.q, returns(trajectory)),
            Played(first, present, first_q, returns(looked_up)),
        )

    by_episode = PartitionSpec(BATCH_AXES)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, by_episode),
            out_specs=by_episode,
            check_vma=False,
        ),
        in_shardings=(shardings, NamedSharding(mesh, by_episode)),
        out_shardings=NamedSharding(mesh, by_episode),
    )


def play_samples(
    play: Play,
    mesh: Mesh,
    params: Params,
    samples: Sequence[Sample],
    store: TokenStore,
    shape: EpisodeShape,
    batch_size: int,
    indices: Sequence[int],
) -> Iterator[tuple[list[Row], list[Row]]]:
    """Plays the samples of `indices` in order.

    Yields:
        for each batch the rows of multi-step and of single-step retrieval.
    """
    running: tuple[Sequence[Sample], Episodes] | None = None
    for number, batch in enumerate(evaluation_batches(store, shape, batch_size, indices)):
        episodes = play(params, shard_batch(mesh, batch))
        shown = [samples[i] for i in indices[number * batch_size : (number + 1) * batch_size]]
        # The device plays this batch while the host makes rows of the one before.
        if running is not None:
            yield _both_rows(*running)
        running = shown, episodes
    if running is not None:
        yield _both_rows(*running)


def _both_rows(samples: Sequence[Sample], episodes: Episodes) -> tuple[list[Row], list[Row]]:
    played = jax.device_get(episodes)
    return _rows(samples, played.multi_step), _rows(samples, played.single_step)


def _rows(samples: Sequence[Sample], played: Played) -> list[Row]:
    return [
        make_row(
            sample,
            np.asarray(played.taken[i])[played.valid[i]].tolist(),
            np.asarray(played.q[i])[played.valid[i]].tolist(),
            float(played.ret[i]),
        )
        for i, sample in enumerate(samples)
    ]


def make_row(sample: Sample, taken: list[int], q: list[float], ret: float) -> Row:
    """The retrieval log's row of one played episode."""
    return Row(
        id=sample.id,
        question=sample.question,
        answer=sample.answers[0] if sample.answers else "",
        sf_idx=list(sample.support),
        pred_idx=taken,
        q_values=q,
        sf_texts=[sample.chunks[i] for i in sample.support],
        pred_texts=[sample.chunks[i] for i in taken],
        ret=ret,
        text_len=sum(map(len, sample.chunks)),
        f1=fact_f1(sample.support, taken),
        em=fact_em(sample.support, taken),
        aliases=list(sample.answers[1:]),
    )
