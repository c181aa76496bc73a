"""Measures the cost of an episode over a long document: beside the peer, and by length."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.report import Case
from benchmarks.speed.measure import on_gpu
from qrag_jax.data.episodes import EpisodeShape, EpisodeSource, stack
from qrag_jax.data.loading import tokenise_samples
from qrag_jax.data.sample import Sample
from qrag_jax.evaluators import beam
from qrag_jax.evaluators.lengths import documents_of_length
from qrag_jax.learners.pqn import PQNConfig
from qrag_jax.models.heads.embedding import Params
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.runtime.process import peak_bytes
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.systems import q_rag_config
from qrag_jax.systems.saved_run import SavedRun

CLEAR_PEAK = Path("/proc/self/clear_refs")


def cost_cases(
    workdir: Path, length: int, lengths: Sequence[int], documents: int = 8
) -> list[Case]:
    """Episodes/s at `length` chunks beside torch-sequential; time and memory over `lengths`."""
    run = SavedRun.open(workdir, q_rag_config.load_config(workdir / CONFIG_NAME))
    params, _ = run.trained("best")
    shown = documents_of_length(run.config.dev_data, length, 2 * documents)
    store = tokenise_samples(run.config.data, run.loaded.tokenizer, list(shown[:2]))
    searcher = beam.make_beam_search(run.player, run.search, params, [store])
    list(searcher.play(shown[documents:]))  # compiles
    return [
        *_peer_cases(run, params, searcher, list(shown[:documents]), length),
        *_growth_cases(run, searcher, lengths),
    ]


def _peer_cases(
    run: SavedRun, params: Params, searcher: BeamSearch, documents: list[Sample], length: int
) -> list[Case]:
    searcher.table.forget()
    seconds, ours = _timed(searcher, documents)
    again, _ = _timed(searcher, documents)
    beside = documents[:2]
    taken, theirs = _sequential(run, params, beside)
    same = np.mean([path == other for path, other in zip(ours, taken, strict=False)])
    rate, other = len(documents) / seconds, len(beside) / theirs
    case = Case(
        f"evaluation at {length} chunks beside torch-sequential",
        rate,
        "episodes/s",
        peer=other,
        ratio=rate / other,
        target=">= 4x",
        holds=rate / other >= 4.0,
        details={
            "documents": len(documents),
            "their texts": sum(len(sample.chunks) for sample in documents),
            "different ones, embedded": searcher.table.counts.embedded,
            "peer: documents, one at a time, all embedded anew": len(beside),
            "share of these with the same chunks taken": float(same),
        },
    )
    known = Case(
        f"evaluation at {length} chunks, texts embedded before",
        len(documents) / again,
        "episodes/s",
        peer=other,
        ratio=len(documents) / again / other,
    )
    return [case, known]


def _timed(searcher: BeamSearch, documents: list[Sample]) -> tuple[float, list[tuple[int, ...]]]:
    started = time.perf_counter()
    taken = [path.taken for _, path in searcher.play(documents)]
    return time.perf_counter() - started, taken


def _sequential(
    run: SavedRun, params: Params, documents: list[Sample]
) -> tuple[list[tuple[int, ...]], float]:
    """Plays the peer on the same tokens and weights; returns the chunks it took and its seconds."""
    from tests.support.torch_pqn import BatchedPeer as SequentialPeer
    from tests.support.torch_pqn import Settings

    config = run.config
    settings = Settings(
        encoder=run.loaded.encoder,
        rollout=config.rollout,
        pqn=PQNConfig(gamma=0.99, lambda_=0.5, tau=0.02, alpha=0.01, learning_start=0),
        optimizer=config.optimizer,
        learning_rates=(1e-5,),
        penalize_extra_steps=True,
        per_fact_reward=0.0,
    )
    peer = SequentialPeer(settings, params)
    store = tokenise_samples(config.data, run.loaded.tokenizer, documents)
    source = EpisodeSource(store, EpisodeShape.holding([store]))
    batch = stack([source[i] for i in range(len(source))])
    peer.play(stack([source[0]])._replace(chunk_mask=batch.chunk_mask[:1] & _first(batch, 64)))
    started = time.perf_counter()
    actions, valid = peer.play(batch)
    seconds = time.perf_counter() - started
    return [tuple(row[mask].tolist()) for row, mask in zip(actions, valid, strict=True)], seconds


def _first(batch, count: int) -> np.ndarray:
    return np.arange(batch.chunk_mask.shape[1])[None] < count


def _growth_cases(run: SavedRun, searcher: BeamSearch, lengths: Sequence[int]) -> list[Case]:
    """Plays one document per length; all its texts are different and embedded anew."""
    seconds, beyond, details = [], [], {}
    for length in lengths:
        document = _all_different(documents_of_length(run.config.dev_data, length, 1)[0])
        searcher.table.forget()
        list(searcher.play([document]))  # compiles for this length
        searcher.table.forget()
        reset_peak_memory()
        taken, _ = _timed(searcher, [document])
        table = searcher.table.array.nbytes / 2**20
        peak = peak_memory(ours=True) / 2**20
        seconds.append(taken)
        beyond.append(peak - table)
        details[f"{length} chunks: an episode, s"] = taken
        details[f"{length} chunks: table of embeddings, MiB"] = table
        details[f"{length} chunks: peak memory besides, MiB"] = peak - table
    exponent = float(np.polyfit(np.log(lengths), np.log(seconds), 1)[0])
    return [
        Case(
            f"time of an episode against chunks, {lengths[0]} to {lengths[-1]}: exponent",
            exponent,
            "",
            target="0.95 to 1.05",
            holds=0.95 <= exponent <= 1.05,
            details=details,
        ),
        Case(
            f"memory besides the table, {lengths[-1]} chunks beside {lengths[0]}",
            beyond[-1] / beyond[0],
            "times",
        ),
    ]


def _all_different(sample: Sample) -> Sample:
    chunks = tuple(f"{i} {text}" for i, text in enumerate(sample.chunks))
    return dataclasses.replace(sample, chunks=chunks)


def reset_peak_memory() -> None:
    """Resets the peak if the system allows it; the peak of jax's arrays on a GPU stays."""
    if on_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()
    elif CLEAR_PEAK.exists():
        CLEAR_PEAK.write_text("5")


def peak_memory(ours: bool) -> float:
    """Peak bytes: of the process on CPU, of jax's (`ours`) or torch's arrays on a GPU."""
    if on_gpu():
        import torch

        stats = jax.devices()[0].memory_stats() or {}
        return float(stats["peak_bytes_in_use"] if ours else torch.cuda.max_memory_allocated())
    return float(peak_bytes())
