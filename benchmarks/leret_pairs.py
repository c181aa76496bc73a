"""Measures updates by pairs of queries beside TRL's `DPOTrainer`, on a CPU in float32.

Both sides have one random decoder, the same pairs, log-probabilities by a reference that were
computed before, and one step of AdamW. The loss is IPO of averaged log-probabilities, which both
know. TRL computes a pair's prompt twice, we once; tokens are counted as TRL has them.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.equal_updates import Learned, equality_cases
from benchmarks.measure import interleave, ratio
from benchmarks.report import Case
from benchmarks.tokens import (
    BLOCK,
    RATE,
    ROUNDS,
    Size,
    decoder,
    policy_of,
)
from qrag_jax.errors import InputError
from qrag_jax.learners.policy_state import first_state
from qrag_jax.learners.preference_config import IPO, PreferenceConfig
from qrag_jax.learners.preference_update import (
    MEMBERS,
    PairLoss,
    make_preference_update,
    pair_episodes,
    row_log_probs,
)
from qrag_jax.learners.token_policy import BlockPasses
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import table_of
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape

CONFIG = PreferenceConfig(IPO, averaged=True)
MOVED = 0.003  # deviation of the policy's weights from those of the reference
FASTER = 1.5


@dataclasses.dataclass(frozen=True)
class PairSize:
    """What is measured."""

    vocab: int = 1024
    layers: int = 4
    pairs: int = 32
    prompt: int = 200
    query: int = 12


QUICK = PairSize(vocab=300, layers=1, pairs=8, prompt=48, query=8)


def batch_of(size: PairSize) -> TokenBatch:
    """Random prompts, each with two random queries."""
    draw, episodes = np.random.default_rng(0), MEMBERS * size.pairs
    length = size.prompt + size.query
    tokens = draw.integers(0, size.vocab, (episodes, length)).astype(np.int32)
    number = np.arange(episodes, dtype=np.int32)
    winner = number // MEMBERS * MEMBERS
    tokens[:, : size.prompt] = tokens[winner, : size.prompt]
    sampled = np.repeat((np.arange(length) >= size.prompt)[None], episodes, axis=0)
    return TokenBatch(
        tokens=tokens,
        lengths=np.full(episodes, length, np.int32),
        log_prob_mask=sampled,
        loss_mask=sampled,
        sampler_log_probs=np.zeros(tokens.shape, np.float32),
        episode=number,
        leader=winner,
        shared=np.where(number == winner, 0, size.prompt).astype(np.int32),
        rewards=np.zeros((episodes, 1), np.float32),
        scored=np.ones(episodes, bool),
    )


def pair_cases(size: PairSize) -> Iterator[Case]:
    """Loss, gradient and speed of an update beside TRL's.

    Raises:
        InputError: PyTorch or TRL is missing.
    """
    with tempfile.TemporaryDirectory() as name:
        loaded, batch = (
            decoder(Path(name), Size(vocab=size.vocab, layers=size.layers)),
            batch_of(size),
        )
        try:
            from benchmarks.peers.trl_pairs import TrlPairs
        except ImportError as error:
            raise InputError(f"{error}: pip install 'qrag_jax[test]' for this suite.") from None
        theirs = TrlPairs(Path(name), loaded.tokenizer, RATE)
        draw = np.random.default_rng(0)
        params = jax.tree.map(
            lambda leaf: (leaf + draw.normal(0, MOVED, leaf.shape)).astype(np.float32),
            jax.tree.map(np.asarray, loaded.params),
        )
        table = table_of("qwen3")
        theirs.load(
            tensors_from_params(table, params),
            tensors_from_params(table, jax.tree.map(np.asarray, loaded.params)),
        )
        policy, parts = policy_of(loaded, CONFIG, temperature=1.0)
        shape = choose_shape(batch, BLOCK, MEMBERS, whole=True)
        reference = row_log_probs(policy)(loaded.params, batch, shape)
        weights = np.ones(size.pairs, np.float32)
        episodes = pair_episodes(policy, batch, shape, reference, weights)
        inputs = theirs.inputs(batch, range(size.pairs))
        title = (
            f"IPO update, decoder of {size.layers} × 192, vocabulary {size.vocab:,}, {size.pairs} "
            f"pairs, prompts of {size.prompt} tokens, queries of {size.query}"
        )

        passes = BlockPasses(policy, PairLoss(CONFIG))
        gradient, sums = jax.jit(passes.gradient)(params, None, *episodes)
        of_ours = tensors_from_params(
            table, jax.tree.map(lambda leaf: np.asarray(leaf / sums.weight), gradient)
        )
        learned = Learned(float(sums.loss / sums.weight), of_ours)
        yield from equality_cases(title, learned, Learned(*theirs.gradient(inputs, CONFIG)), "TRL")
        del gradient, of_ours, learned

        update: Any = make_preference_update(policy)
        state = first_state(policy.shardings, parts, params, 0)

        def ours(_: int) -> None:
            nonlocal state
            again = pair_episodes(policy, batch, shape, reference, weights)
            state, _metrics = update(state, again)
            jax.block_until_ready(state)

        timings = interleave({"TRL": lambda _: theirs.update(inputs, CONFIG), "ours": ours}, ROUNDS)
        one, other, tokens = timings["ours"], timings["TRL"], int(batch.lengths.sum())
        used = (episodes.blocks.lengths > 0).any(axis=1).sum()
        yield Case(
            f"{title}: tokens, a prompt counted for both rows",
            tokens / one.median,
            "1/s",
            peer=tokens / other.median,
            ratio=ratio(one, other),
            target=f">= {FASTER:g} times TRL's",
            holds=ratio(one, other) >= FASTER,
            details={
                "tokens of TRL": float(tokens),
                "tokens computed": float(used * shape.tokens),
                "tokens, prompts once": float(tokens - size.pairs * size.prompt),
                "compiling s": one.compile,
            },
        )
