"""HARR's GRPO update against PyTorch with PEFT: same weights, same batch, same loss.

Float32 on a CPU. The old log-probabilities are a little off those of the weights, so some ratios
are clipped. Texts are random tokens. The peer is written from the paper (arXiv 2602.03645, eq. 7 to
12) and shares no formula with ours. Where other jobs use the cores, torch's threads wait for each
other and lose many times what ours do: then measure on one core (`taskset -c 0`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import peft
import torch
from safetensors.numpy import load_file
from transformers import AutoModel

from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside, same_update
from qrag_jax.errors import InputError
from qrag_jax.learners.config import SearchGRPOConfig
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.query_encoder import QueryEncoder, Searches, make_query_update
from qrag_jax.learners.state import Critic, Parts, place
from qrag_jax.learners.update import PerAction
from qrag_jax.models.compute.lora import LORA_B
from qrag_jax.models.compute.ragged import TokenRows
from qrag_jax.models.first_encoder import (
    EncoderConfig,
    ScratchConfig,
    load_encoder,
    make_scratch_folder,
    with_new_adapters,
)
from qrag_jax.models.pretrained import LoadedEncoder, LoraConfig, write_adapters
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.pool_search import HopBatch
from qrag_jax.rollouts.text_table import blocks_of
from qrag_jax.runtime.mesh import make_mesh, shard_batch, shardings_of
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import find_minilm
from tests.support.torch_encoder import Batch, mini_batches, model_options, pool

QUESTIONS, MEMBERS, HOPS = 8, 4, 3
SHORTEST, LONGEST = 40, 160  # tokens of a state
RANK = 16
ADAPTERS = LoraConfig(RANK, 2.0 * RANK)
POLICY = PlackettLuceConfig()
GRPO = SearchGRPOConfig(members=MEMBERS)
OPTIMIZER = OptimizerConfig(schedule="constant", warmup_steps=0)
ROWS = 8  # of a mini-batch: the fastest on a CPU, where 32 take a fifth longer


def harr_cases(setting: Setting) -> Iterator[Case]:
    """Loss, gradients and speed; quick: of a tiny encoder instead of MiniLM.

    Raises:
        InputError: MiniLM cannot be had.
    """
    folder, name = None if setting.quick else find_minilm(), "MiniLM"
    if setting.quick:
        folder = setting.folder / "harr"
        make_scratch_folder(folder, ["a b"], ScratchConfig(2, 32, 2, 500, 256), seed=0)
        name = "tiny BERT"
    if folder is None:
        raise InputError("MiniLM, which the case harr trains, cannot be had here.")
    title = f"HARR, GRPO update, {name} LoRA r{RANK}"
    loaded = _loaded(folder)
    write_adapters(setting.folder / "harr-adapters", loaded.table, ADAPTERS, loaded.adapters)
    batch = _batch(loaded)
    theirs = QueryLearner(folder, setting.folder / "harr-adapters", loaded)
    plain, ours = (
        _Ours(loaded, optimizer, EncoderConfig(**setting.blocks))
        for optimizer in (optax.sgd(1.0), make_optimizer(OPTIMIZER))
    )
    batch = batch._replace(log_probs=_log_probs(plain, batch))
    mine, metrics = _gradients(plain, batch, setting.folder / "harr-moved")
    of_theirs = theirs.gradients(batch), theirs.named_gradients()
    clipped = {"clipped share of the ratios": metrics["clip_fraction"]}
    yield from same_update(title, mine, of_theirs, **clipped)
    lengths = np.asarray(batch.lengths)
    lengths = lengths[lengths > 0]
    yield beside(
        setting,
        f"{title}: tokens of {len(lengths)} searches",
        float(lengths.sum()),
        "tokens/s",
        {OURS: lambda _: ours.step(batch), "PyTorch and PEFT": lambda _: theirs.step(batch)},
        details={"threads of torch": torch.get_num_threads()},
    )


def _gradients(
    ours: _Ours, batch: HopBatch, out: Path
) -> tuple[tuple[float, dict[str, np.ndarray]], dict[str, float]]:
    """Our loss and gradient by PEFT's names, and the metrics, from a step of plain descent.

    Args:
        out: adapters are written there.
    """
    before = jax.tree.map(np.asarray, ours.state.params)
    metrics = ours.step(batch)
    moved = jax.tree.map(lambda old, new: old - np.asarray(new), before, ours.state.params)
    write_adapters(out, ours.loaded.table, ADAPTERS, moved)
    return (metrics["loss"], load_file(out / "adapter_model.safetensors")), metrics


def _loaded(folder: Path) -> LoadedEncoder:
    """The encoder with adapters that do change its outputs."""
    loaded = load_encoder(
        folder, EncoderConfig(dtype="float32", scale=1.0, pooling="mean", normalise=True)
    )
    loaded = with_new_adapters(loaded, ADAPTERS, seed=0)
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

    def __init__(
        self, loaded: LoadedEncoder, optimizer: optax.GradientTransformation, config: EncoderConfig
    ) -> None:
        mesh, rules = make_mesh((1, 1, 1), jax.devices()[:1]), loaded.trunk.partition_rules()
        parts = Parts(optimizer)
        shardings = parts.shardings(mesh, rules, loaded.trained)
        of_base = shardings_of(mesh, rules, loaded.stored)
        self.learner = QueryEncoder(
            mesh=mesh,
            shardings=shardings,
            encoder=loaded.encoder,
            blocks=blocks_of(config, np.ones(LONGEST + 1), Platform.of(mesh)),
            config=GRPO,
            tau=POLICY.tau,
            weights=((1.0,), ()),
            parts=parts,
            schedule=learning_rate_schedule(OPTIMIZER),
            base_shardings=of_base,
            is_fresh=False,
        )
        self.loaded, self.base = loaded, place(loaded.stored, of_base)
        self.state = self.learner.first_state(loaded.trained, 0)
        self._update = make_query_update(self.learner)

    def step(self, batch: HopBatch) -> dict[str, float]:
        """One update; returns its metrics."""
        placed = shard_batch(self.learner.mesh, batch)
        self.state, metrics = self._update(self.state, placed, self.base)
        return {name: float(value) for name, value in metrics.items()}


def _log_probs(ours: _Ours, batch: HopBatch) -> Any:
    """Those of the first weights plus the noise of the batch."""
    noise = batch.log_probs
    searches = Searches(batch.pool, batch.present, batch.actions, PerAction(*[noise] * 6))
    read = jax.jit(ours.learner.read)
    log_probs = read(
        Critic(ours.state.params), ours.base, TokenRows(batch.tokens, batch.lengths), searches
    )
    return np.where(batch.lengths > 0, np.asarray(log_probs) + noise, 0.0).astype(np.float32)


class Drawn(NamedTuple):
    """All searches of a batch, `[R, …]`: what was drawn from which pool, and its worth."""

    pool: torch.Tensor
    actions: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor


class QueryLearner:
    """Adapters of a frozen model, and their optimizer.

    Args:
        folder: the model, in Hugging Face's layout.
        adapters: the first adapters, in PEFT's format.
        ours: our encoder of the same folder: its pooling.
    """

    def __init__(self, folder: Path, adapters: Path, ours: LoadedEncoder) -> None:
        options = model_options(ours.model_config["model_type"])
        base = AutoModel.from_pretrained(folder, dtype=torch.float32, **options)
        self.model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True).eval()
        self.encoder = ours.encoder
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=OPTIMIZER.learning_rate,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )

    def gradients(self, batch: HopBatch) -> float:
        """Computes the gradients of the loss again; returns the loss."""
        present = np.asarray(batch.lengths) > 0
        tokens, lengths = (np.asarray(array)[present] for array in (batch.tokens, batch.lengths))
        searches = self._searches(batch, present)
        self.optimizer.zero_grad()
        total = 0.0
        for part in mini_batches(tokens, lengths, ROWS, "cpu"):
            losses = self._losses(part, Drawn(*(array[part.rows] for array in searches)))
            loss = (losses * searches.weights[part.rows]).sum()
            loss.backward()
            total += float(loss.detach())
        return total

    def named_gradients(self) -> dict[str, np.ndarray]:
        """The gradients of the last loss, by the names in PEFT's files."""
        named = ((n.replace(".default", ""), p.grad) for n, p in self.trained.items())
        return {name: grad.numpy() for name, grad in named if grad is not None}

    def step(self, batch: HopBatch) -> float:
        """One update; returns the loss before it."""
        loss = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.trained.values(), OPTIMIZER.clip_norm)
        self.optimizer.step()
        return loss

    def _searches(self, batch: HopBatch, present: np.ndarray) -> Drawn:
        rewards = torch.from_numpy(np.asarray(batch.episode_rewards)[:, 0])
        groups = rewards.reshape(-1, GRPO.members)
        spread = groups.std(dim=1, keepdim=True) + 1e-4
        advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).reshape(-1, 1)
        there = torch.from_numpy(present)
        # The mean over an episode's searches, then over the episodes.
        weights = 1.0 / (there.sum(dim=1, keepdim=True) * len(there))
        pool, actions, old = (
            torch.from_numpy(np.asarray(array)[present])
            for array in (batch.pool, batch.actions, batch.log_probs)
        )
        of_search = (values.expand(there.shape)[there] for values in (advantages, weights))
        return Drawn(pool, actions.long(), old, *of_search)

    def _losses(self, part: Batch, searches: Drawn) -> torch.Tensor:
        hidden = self.model(input_ids=part.tokens, attention_mask=part.mask).last_hidden_state
        queries = pool(self.encoder, hidden, part.mask)
        scores = torch.einsum("rd,rkd->rk", queries, searches.pool) / POLICY.tau
        log_prob, left = torch.zeros(len(scores)), scores
        for number in searches.actions.T:  # each is drawn from the passages that are left
            chosen = torch.log_softmax(left, dim=1).gather(1, number[:, None])
            log_prob = log_prob + chosen[:, 0]
            left = left.scatter(1, number[:, None], float("-inf"))
        ratio = torch.exp(log_prob - searches.old)
        bounded = ratio.clamp(1 - GRPO.clip_low, 1 + GRPO.clip_high)
        return -torch.minimum(ratio * searches.advantages, bounded * searches.advantages)
