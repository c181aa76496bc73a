"""Measures HARR's GRPO update beside PyTorch with PEFT: same weights, same batch, same loss.

Float32 on a CPU. The old log-probabilities are a little off those of the weights, so some ratios
are clipped. Both sides compute the same rows; texts are random tokens. Where other jobs use the
cores, torch's threads wait for each other and lose many times what ours do: then measure on one
core (`taskset -c 0 python -m benchmarks --suite harr --only=update`).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from safetensors.numpy import load_file

from benchmarks.measure import forward_flops, interleave, ratio
from benchmarks.report import Case
from qrag_jax.errors import InputError
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_config import GRPOConfig
from qrag_jax.learners.policy_state import Parts, first_state, state_shardings
from qrag_jax.learners.query_encoder import Passes, QueryEncoder, Searches
from qrag_jax.learners.query_update import make_update
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.linear import LORA_B
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.pretrained import (
    LoadedEncoder,
    load_encoder,
    save_adapters,
    with_new_adapters,
)
from qrag_jax.models.trunks.bert import BertConfig
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.block_shapes import choose_row_blocks
from qrag_jax.rollouts.hop_batch import HopBatch
from qrag_jax.runtime.mesh import make_mesh, shard_batch
from qrag_jax.runtime.minilm import find_minilm
from qrag_jax.runtime.platform import Platform

QUESTIONS, MEMBERS, HOPS = 8, 4, 3
SHORTEST, LONGEST = 40, 160  # tokens of a state
RANK, ROUNDS = 16, 5
EQUAL = 1e-4  # of the loss, and of gradients beside the largest one
POLICY = PlackettLuceConfig()
GRPO = GRPOConfig(members=MEMBERS)
OPTIMIZER = OptimizerConfig(schedule="constant", warmup_steps=0)


def cases(quick: bool = False) -> Iterator[Case]:
    """Loss, gradients and speed; quick: of a tiny encoder instead of MiniLM.

    Raises:
        InputError: PyTorch or PEFT is missing, or MiniLM cannot be had.
    """
    try:
        from benchmarks.encoder_cases.small_models import write_trainable_model
        from benchmarks.peers.query_learner import QueryLearner
    except ImportError as error:
        raise InputError(f"{error}: pip install 'qrag_jax[test]' for the part update.") from None
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        folder = (
            write_trainable_model("bert", out / "model", ["a b"], 2) if quick else find_minilm()
        )
        if folder is None:
            raise InputError("MiniLM, which the part update trains, cannot be had here.")
        loaded = _loaded(folder)
        save_adapters(loaded, loaded.adapters, out / "adapters")
        batch = _batch(loaded)
        theirs = QueryLearner(folder, out / "adapters", loaded, GRPO, OPTIMIZER, POLICY.tau)
        batch = batch._replace(log_probs=_log_probs(loaded, batch))
        model = "tiny BERT" if quick else "MiniLM"
        yield from _equality(f"GRPO, {model} LoRA r{RANK}", loaded, batch, theirs, out / "ours")
        yield from _speed(f"GRPO, {model} LoRA r{RANK}", loaded, batch, theirs)


def _loaded(folder: Path) -> LoadedEncoder:
    """The encoder with adapters that do change its outputs."""
    loaded = load_encoder(folder, "float32", 1.0, pooling="mean", normalise=True)
    loaded = with_new_adapters(loaded, LoraConfig(RANK, 2.0 * RANK), seed=0)
    rng = np.random.default_rng(1)

    def filled(path: Any, leaf: np.ndarray) -> np.ndarray:
        if path[-1].key != LORA_B:
            return leaf
        return 0.01 * rng.standard_normal(leaf.shape).astype(np.float32)

    return dataclasses.replace(
        loaded, adapters=jax.tree_util.tree_map_with_path(filled, loaded.adapters)
    )


def _batch(loaded: LoadedEncoder) -> HopBatch:
    """Episodes of 1 to `HOPS` searches; old log-probabilities are noise, to be added to."""
    rng, episodes = np.random.default_rng(0), QUESTIONS * MEMBERS
    searches, vocab = (episodes, HOPS), loaded.encoder.module.config.vocab_size
    hops = rng.integers(1, HOPS + 1, (episodes, 1))
    lengths = rng.integers(SHORTEST, LONGEST + 1, searches)
    lengths = np.where(np.arange(HOPS) < hops, lengths, 0).astype(np.int32)
    tokens = rng.integers(6, vocab, (*searches, LONGEST)).astype(np.int32)
    vectors = rng.standard_normal((*searches, POLICY.pool, loaded.encoder.width), np.float32)
    order = rng.permuted(np.broadcast_to(np.arange(POLICY.pool), (*searches, POLICY.pool)), axis=2)
    arrays: dict[str, Any] = dict(
        tokens=np.where(np.arange(LONGEST) < lengths[..., None], tokens, 0),
        lengths=lengths,
        pool=vectors / np.linalg.norm(vectors, axis=-1, keepdims=True),
        present=np.ones((*searches, POLICY.pool), bool),
        actions=order[..., : POLICY.passages].astype(np.int32),
        log_probs=0.15 * rng.standard_normal(searches, np.float32),
        scored=np.ones(episodes, bool),
        episode_rewards=rng.random((episodes, 1), np.float32),
        hop_rewards=np.zeros((*searches, 0), np.float32),
    )
    return HopBatch(**arrays)


class _Ours:
    """Our learner with an optimizer, on this machine's first device."""

    def __init__(self, loaded: LoadedEncoder, optimizer: optax.GradientTransformation) -> None:
        mesh, rules = make_mesh((1, 1, 1), jax.devices()[:1]), loaded.partition_rules
        parts = Parts(optimizer, None, False, loaded.encoder.width)
        shardings = state_shardings(mesh, rules, parts, loaded.trained)
        of_base = placement.base_shardings(mesh, rules, loaded.stored)
        self.learner = QueryEncoder(
            mesh=mesh,
            shardings=shardings,
            encoder=loaded.encoder,
            blocks=choose_row_blocks(EncoderConfig(), LONGEST, Platform.of(mesh)),
            config=GRPO,
            tau=POLICY.tau,
            weights=((1.0,), ()),
            optimizer=optimizer,
            schedule=learning_rate_schedule(OPTIMIZER),
            base_shardings=of_base,
            is_fresh=False,
        )
        self.base = placement.place(loaded.stored, of_base)
        self.state = first_state(shardings, parts, loaded.trained, 0)
        self._update = make_update(self.learner)

    def step(self, batch: HopBatch) -> dict[str, float]:
        """One update; returns its metrics."""
        placed = shard_batch(self.learner.mesh, batch)
        self.state, metrics = self._update(self.state, placed, self.base)
        return {name: float(value) for name, value in metrics.items()}


def _log_probs(loaded: LoadedEncoder, batch: HopBatch) -> Any:
    """Those of the first weights plus the noise of the batch."""
    ours, noise = _Ours(loaded, optax.sgd(1.0)), batch.log_probs
    searches = Searches(batch.pool, batch.present, batch.actions, *[noise] * 6)
    passes = jax.jit(Passes(ours.learner).log_probs)
    found = passes(ours.state.params, ours.base, TokenRows(batch.tokens, batch.lengths), searches)
    return np.where(batch.lengths > 0, np.asarray(found) + noise, 0.0).astype(np.float32)


def _equality(
    name: str, loaded: LoadedEncoder, batch: HopBatch, theirs: Any, out: Path
) -> Iterator[Case]:
    ours = _Ours(loaded, optax.sgd(1.0))  # so the weights move by their gradient
    before = jax.tree.map(np.asarray, ours.state.params)
    metrics, their_loss = ours.step(batch), theirs.gradients(batch)
    away = abs(metrics["loss"] - their_loss)
    yield Case(
        f"{name}: loss beside torch's",
        metrics["loss"],
        "",
        peer=their_loss,
        target=f"within {EQUAL:g}",
        holds=away <= EQUAL,
        details={"difference": away, "clipped share of the ratios": metrics["clip_fraction"]},
    )
    moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, ours.state.params)
    save_adapters(loaded, moved, out)
    found = load_file(out / "adapter_model.safetensors")
    expected = {n.replace(".default", ""): p.grad.numpy() for n, p in theirs.trained.items()}
    if found.keys() != expected.keys():
        raise ValueError("the adapters of both sides have other names")
    largest = max(np.abs(each).max() for each in expected.values())
    error = max(np.abs(found[n] - each).max() for n, each in expected.items()) / largest
    yield Case(
        f"{name}: largest difference of gradients beside torch's, over the largest gradient",
        float(error),
        "",
        target=f"at most {EQUAL:g}",
        holds=bool(error <= EQUAL),
        details={"largest gradient": float(largest), "arrays": len(expected)},
    )


def _speed(name: str, loaded: LoadedEncoder, batch: HopBatch, theirs: Any) -> Iterator[Case]:
    """The update, and the products of both libraries, without which it cannot be judged."""
    from benchmarks.matmul import measure_peaks

    peaks, of_products = measure_peaks(ROUNDS, "float32")
    yield of_products
    ours = _Ours(loaded, make_optimizer(OPTIMIZER))
    sides: dict[str, Callable[[int], Any]] = {
        "ours": lambda _: ours.step(batch),
        "peer": lambda _: theirs.step(batch),
    }
    timings, lengths = interleave(sides, ROUNDS), np.asarray(batch.lengths)
    lengths, config = lengths[lengths > 0], loaded.encoder.module.config
    assert isinstance(config, BertConfig)
    # The gradient of the frozen weights is not needed: forward, and once more for the inputs.
    flops = 2.0 * forward_flops(config, lengths)
    seconds = {side: timing.median for side, timing in timings.items()}
    yield Case(
        f"{name}: update",
        float(lengths.sum() / seconds["ours"]),
        "tokens/s",
        peer=float(lengths.sum() / seconds["peer"]),
        ratio=ratio(timings["ours"], timings["peer"]),
        details={
            "searches": len(lengths),
            "tokens": int(lengths.sum()),
            "ours: share of jax's matmul peak": flops / seconds["ours"] / peaks.jax,
            "torch: share of torch's matmul peak": flops / seconds["peer"] / peaks.torch,
            "ours: s of a round": ", ".join(f"{each:.2f}" for each in timings["ours"].seconds),
            "torch: s of a round": ", ".join(f"{each:.2f}" for each in timings["peer"].seconds),
            "torch: threads": theirs.threads,
            "compile time, s": timings["ours"].compile,
        },
    )
