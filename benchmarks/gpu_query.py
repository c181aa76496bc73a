"""HARR's update by GRPO or PPO as a program of the suite gpu, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.memory_cases import QWEN3, REMAT, Model, adapter_shapes, encoder_of
from benchmarks.report import Case
from qrag_jax.learners import placement
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule, make_optimizer
from qrag_jax.learners.policy_config import GRPOConfig, PPOConfig
from qrag_jax.learners.policy_state import Parts, state_shapes, state_shardings
from qrag_jax.learners.query_encoder import QueryEncoder
from qrag_jax.learners.query_update import make_update
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.block_rounds import BATCHES, rounds_of
from qrag_jax.rollouts.block_shapes import choose_row_blocks
from qrag_jax.rollouts.hop_batch import HopBatch, HopShape, batch_shapes
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.sharding import BATCH_AXES
from qrag_jax.runtime.step_time import Rounds

GRPO, PPO = "grpo", "ppo"
ALGORITHMS: Mapping[str, GRPOConfig | PPOConfig] = {GRPO: GRPOConfig(), PPO: PPOConfig()}
EPISODES, HOPS = 128, 5  # 16 questions of 8 members; every episode searches as often as it may
STATE_TOKENS, HOP_TOKENS = 1024, (60, 140)  # of a state at most; that a search adds to the next
REWARDS = (1.0, 0.5), (0.2,)  # weights of an episode's rewards and of a search's
RANK = 32
FEWEST_WORDS = 500  # of a vocabulary, of the smallest model
LEAST_SHARE, ASKED = 0.4, [model.name for model in QWEN3]  # of the peak, and whose


def query_program(
    model: Model, mesh: Mesh, lora: bool, name: str, *, values: bool = False
) -> Program:
    """One update by all episodes.

    Args:
        name: a key of `ALGORITHMS`.
        values: the batch has values, not only shapes; the devices are then here.
    """
    config, platform = ALGORITHMS[name], Platform.of(mesh)
    encoder, rules = encoder_of(model, platform), model.parts.rules
    tower = jax.eval_shape(encoder.init, jax.random.key(0))
    base_shardings, base = None, []
    if lora:
        base_shardings = placement.base_shardings(mesh, rules, tower)
        base = [placement.shapes_on(tower, base_shardings)]
        tower = adapter_shapes(model, encoder, RANK)
    optimizer, critic, kl = OptimizerConfig(), None, 0.0
    if isinstance(config, PPOConfig):
        critic, kl = make_optimizer(optimizer), config.kl
    parts = Parts(make_optimizer(optimizer), critic, kl > 0, encoder.width)
    shardings = state_shardings(mesh, rules, parts, tower)
    longest = min(STATE_TOKENS, encoder.max_positions)
    blocks = choose_row_blocks(EncoderConfig(remat=REMAT), longest, platform)
    policy = PlackettLuceConfig()
    learner = QueryEncoder(
        mesh=mesh,
        shardings=shardings,
        encoder=encoder,
        blocks=blocks,
        config=config,
        tau=policy.tau,
        weights=REWARDS,
        optimizer=parts.optimizer,
        critic_optimizer=critic,
        schedule=learning_rate_schedule(optimizer),
        base_shardings=base_shardings,
    )
    state = placement.shapes_on(state_shapes(parts, tower), shardings)
    shape = HopShape(HOPS, longest, encoder.width, *map(len, REWARDS))
    by_episode = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    batch = batch_shapes(EPISODES, shape, policy)
    where = jax.tree.map(lambda _: by_episode, batch)
    if values:
        batch = jax.device_put(invented_batch(shape, policy), where)
    else:
        batch = placement.shapes_on(batch, where)
    # Devices along `tensor` compute all their rows together (`models.compute.dealing`).
    rows = EPISODES // mesh.size * encoder.on(mesh).module.group.tensor * HOPS

    def loops() -> dict[tuple[int, int], Rounds]:
        return {(rows, longest): rounds_of(blocks, state_lengths(rows, longest))}

    return Program(name, make_update(learner), (state, batch, *base), loops)


def query_cases(name: str, row: dict[str, Any]) -> list[Case]:
    """How much of the devices' peak an update is estimated to use."""
    found = row.get("estimate")
    if found is None or row["program"] not in ALGORITHMS:
        return []
    share, asked = found["share_of_peak"], row["model"] in ASKED
    return [
        Case(
            f"{name}: share of peak, estimated",
            share,
            "",
            target=f"at least {LEAST_SHARE:g}" if asked else None,
            holds=share >= LEAST_SHARE if asked else None,
        )
    ]


def invented_batch(shape: HopShape, policy: PlackettLuceConfig) -> HopBatch:
    """Episodes of random states and pools, that search as often as they may."""
    rng, shapes = np.random.default_rng(0), batch_shapes(EPISODES, shape, policy)
    lengths = state_lengths(EPISODES * HOPS, shape.tokens)[0].reshape(EPISODES, HOPS)
    pool = rng.standard_normal(shapes.pool.shape, np.float32)
    arrays: dict[str, Any] = dict(
        tokens=rng.integers(5, FEWEST_WORDS, shapes.tokens.shape, np.int32),
        lengths=lengths.astype(np.int32),
        pool=pool / np.linalg.norm(pool, axis=-1, keepdims=True),
        present=np.ones(shapes.present.shape, bool),
        actions=np.broadcast_to(np.arange(policy.passages, dtype=np.int32), shapes.actions.shape),
        log_probs=np.full(shapes.log_probs.shape, -policy.passages * np.log(policy.pool)),
        scored=np.ones(EPISODES, bool),
        episode_rewards=rng.random(shapes.episode_rewards.shape, np.float32),
        hop_rewards=rng.random(shapes.hop_rewards.shape, np.float32),
    )
    return HopBatch(**arrays)


def state_lengths(rows: int, longest: int) -> np.ndarray:
    """Invented lengths of the states of several batches, `[batches, rows]`."""
    added = np.random.default_rng(0).integers(*HOP_TOKENS, (BATCHES, rows // HOPS, HOPS))
    return np.minimum(added.cumsum(axis=2).reshape(BATCHES, rows), longest)
