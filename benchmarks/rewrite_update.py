"""PPO's update, policy and critic, beside the same in plain torch, padded as usual.

Prompts of 120 to 200 tokens and outputs of 10 to 160, as a query rewriter has them; every episode
has its own prompt, so nothing is shared. Both sides compute old log-probabilities, those of the
reference, values, advantages, and one step of AdamW for each model.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.equal_updates import EQUAL_LOSS
from benchmarks.measure import interleave, ratio
from benchmarks.report import Case
from benchmarks.tokens import BLOCK, TEMPERATURE, Size, decoder
from qrag_jax.errors import InputError
from qrag_jax.learners.policy_state import Parts, first_state, state_shardings
from qrag_jax.learners.ppo_config import TokenPPOConfig
from qrag_jax.learners.ppo_update import make_ppo_update, ppo_episodes
from qrag_jax.learners.token_policy import TokenPolicy
from qrag_jax.models.pretrained_lm import LoadedLanguageModel
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.runtime.mesh import make_mesh

ROUNDS, LEAST_RATIO = 5, 1.0
RATE, CRITIC_RATE = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class PpoSize:
    """What is measured."""

    vocab: int = 1024
    layers: int = 4
    episodes: int = 32
    prompt: tuple[int, int] = (120, 200)
    output: tuple[int, int] = (10, 160)


QUICK = PpoSize(vocab=300, layers=1, episodes=4, prompt=(10, 20), output=(5, 12))


def batch_of(size: PpoSize, seed: int = 0) -> TokenBatch:
    """Random episodes of one row; all that follows the prompt is sampled."""
    draw, count = np.random.default_rng(seed), size.episodes
    prompts = draw.integers(size.prompt[0], size.prompt[1] + 1, count)
    lengths = prompts + draw.integers(size.output[0], size.output[1] + 1, count)
    shape = count, int(lengths.max())
    place = np.arange(shape[1])[None]
    sampled = (place >= prompts[:, None]) & (place < lengths[:, None])
    sampler = np.where(sampled, draw.normal(-np.log(size.vocab), 0.1, shape), 0.0)
    number = np.arange(count, dtype=np.int32)
    return TokenBatch(
        tokens=draw.integers(1, size.vocab, shape).astype(np.int32),
        lengths=lengths.astype(np.int32),
        log_prob_mask=sampled,
        loss_mask=sampled,
        sampler_log_probs=sampler.astype(np.float32),
        episode=number,
        leader=number,
        shared=np.zeros(count, np.int32),
        rewards=draw.random((count, 1)).astype(np.float32),
        scored=np.ones(count, bool),
    )


def learner_of(
    loaded: LoadedLanguageModel, config: TokenPPOConfig
) -> tuple[TokenPolicy[TokenPPOConfig], Parts]:
    """The learner of a decoder on one device, and what its state is made of."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    optimizer, of_critic = (optax.adamw(rate, weight_decay=0.0) for rate in (RATE, CRITIC_RATE))
    width = loaded.model.trunk.config.hidden_size
    parts = Parts(optimizer, of_critic, keeps_reference=True, width=width)
    policy: TokenPolicy[TokenPPOConfig] = TokenPolicy(
        mesh=mesh,
        shardings=state_shardings(mesh, loaded.partition_rules, parts, loaded.params),
        trunk=loaded.model.trunk,
        vocabulary=Vocabulary(TEMPERATURE),
        config=config,
        weights=(1.0,),
        optimizer=optimizer,
        critic_optimizer=of_critic,
        schedule=optax.constant_schedule(RATE),
    )
    return policy, parts


def cases(size: PpoSize) -> Iterator[Case]:
    """Losses and speed beside torch's.

    Raises:
        InputError: PyTorch is missing.
    """
    try:
        from benchmarks.peers.torch_ppo import Rates, TorchPpo
    except ImportError as error:
        raise InputError(f"{error}: pip install 'qrag_jax[test]' for this suite.") from None
    config, batch = TokenPPOConfig(), batch_of(size)
    with tempfile.TemporaryDirectory() as name:
        loaded = decoder(Path(name), Size(vocab=size.vocab, layers=size.layers))
        theirs = TorchPpo(Path(name), config, TEMPERATURE, Rates(RATE, CRITIC_RATE))
        policy, parts = learner_of(loaded, config)
        update: Any = make_ppo_update(policy)
        state = first_state(policy.shardings, parts, loaded.params, 0)
        shape = choose_shape(batch, BLOCK, 1)
        given = theirs.given(batch)
        (of_policy, of_critic), _ = theirs.gradients(given)
        state, metrics = update(state, ppo_episodes(policy, batch, shape))
        title = f"PPO update, decoder of {size.layers} × 192, vocabulary {size.vocab:,}"
        for told, own, other in (
            ("policy", float(metrics["loss"]), of_policy),
            ("value", float(metrics["value_loss"]), of_critic),
        ):
            apart = abs(own - other) / max(1.0, abs(other))
            yield Case(
                f"{title}: difference of the {told} losses, beside torch's where that is above 1",
                apart,
                "share",
                target=f"<= {EQUAL_LOSS:g}",
                holds=apart <= EQUAL_LOSS,
                details={"ours": own, "torch": other},
            )

        def ours(_: int) -> None:
            nonlocal state
            state, _metrics = update(state, ppo_episodes(policy, batch, shape))
            jax.block_until_ready(state)

        timings = interleave({"torch": lambda _: theirs.update(batch), "ours": ours}, ROUNDS)
        one, other_times = timings["ours"], timings["torch"]
        yield Case(
            f"{title}: episodes",
            size.episodes / one.median,
            "1/s",
            peer=size.episodes / other_times.median,
            ratio=ratio(one, other_times),
            target=f">= {LEAST_RATIO:g} times torch's",
            holds=ratio(one, other_times) >= LEAST_RATIO,
            details={
                "tokens": float(batch.lengths.sum()),
                "tokens of torch, with padding": float(given.ids.numel()),
                "compiling s": one.compile,
            },
        )
