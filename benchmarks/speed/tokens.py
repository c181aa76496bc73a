"""Token policies against TRL, PyTorch and transformers, on a CPU in float32.

A small random decoder of 4 × 192; both sides have its weights, the batch and the loss. GRPO: 8
questions of 8 episodes, prompts of 256 tokens and episodes of 128, half of them sampled; with a
vocabulary of 151,936 there are 2 questions. The sampler is greedy. PPO's and IPO's losses are
compared in tests/learners.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.report import Case
from benchmarks.speed.measure import OURS, Setting, beside, same_update, with_details
from qrag_jax.learners.config import TokenGRPOConfig
from qrag_jax.learners.state import Critic
from qrag_jax.learners.token_policy import make_token_update, token_episodes
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.trajectories import SampleRequest, SamplingConfig, TokenBatch, choose_shape
from tests.support.decoders import (
    RATE,
    TEMPERATURE,
    Size,
    by_name,
    decoder,
    given_tokens,
    policy_of,
)


class Lengths(NamedTuple):
    """A batch: groups of members that share a prompt, tokens of the prompt and behind it."""

    groups: int
    members: int
    prompt: tuple[int, int]  # least and most
    after: tuple[int, int]


def batch_of(size: Size, lengths: Lengths, *, tools: bool = False) -> TokenBatch:
    """Random episodes.

    Args:
        tools: every other quarter of what follows the prompt is a tool's words; else all of it is
            sampled.
    """
    draw, count = np.random.default_rng(0), lengths.groups * lengths.members
    number = np.arange(count, dtype=np.int32)
    first = number // lengths.members * lengths.members
    prompts = draw.integers(lengths.prompt[0], lengths.prompt[1] + 1, count)[first]
    totals = prompts + draw.integers(lengths.after[0], lengths.after[1] + 1, count)
    shape = count, int(totals.max())
    tokens = draw.integers(1, size.vocab, shape).astype(np.int32)
    tokens = np.where(np.arange(shape[1]) < prompts[:, None], tokens[first], tokens)
    place = np.arange(shape[1])[None] - prompts[:, None]
    sampled = (place >= 0) & (np.arange(shape[1])[None] < totals[:, None])
    if tools:
        sampled &= place // max(lengths.after[1] // 4, 1) % 2 == 0
    log_probs = np.where(sampled, draw.normal(-np.log(size.vocab), 0.1, shape), 0.0)
    return TokenBatch(
        tokens=tokens,
        lengths=totals.astype(np.int32),
        log_prob_mask=sampled,
        loss_mask=sampled,
        sampler_log_probs=log_probs.astype(np.float32),
        episode=number,
        leader=first,
        shared=prompts.astype(np.int32),
        rewards=draw.random(count).astype(np.float32),
        scored=np.ones(count, bool),
    )


class Updates:
    """Our update of a state; `episodes` are made of the batch in every call, as in a training."""

    def __init__(self, program: Any, state: Any, episodes: Callable[[], Any]) -> None:
        self.program, self.state, self.episodes = program, state, episodes

    def __call__(self, _: int) -> Any:
        """One update; returns its metrics."""
        arguments = self.episodes()
        self.state, metrics = self.program(self.state, arguments)
        jax.block_until_ready(self.state)
        return metrics


def grpo_cases(setting: Setting) -> Iterator[Case]:
    """GRPO against TRL: loss, gradient, speed and, with the large vocabulary, memory."""
    if setting.quick:
        yield from _grpo(setting, Size(300, 1), Lengths(2, 4, (32, 32), (16, 16)))
        return
    for vocab, groups in ((1024, 8), (151_936, 2)):
        yield from _grpo(setting, Size(vocab), Lengths(groups, 8, (256, 256), (128, 128)))


def _grpo(setting: Setting, size: Size, lengths: Lengths) -> Iterator[Case]:
    from tests.support.trl import TrlLearner

    with tempfile.TemporaryDirectory() as name:
        loaded, batch = decoder(Path(name), size), batch_of(size, lengths, tools=True)
        config = TokenGRPOConfig(members=lengths.members, longest=lengths.after[1])
        theirs = TrlLearner(Path(name), config, TEMPERATURE, RATE)
        policy = policy_of(loaded, config)
        shape = choose_shape(batch, 256 if setting.quick else 2048, lengths.members)
        episodes = token_episodes(policy, batch, shape)
        blocks, credit, divisor = given_tokens(policy, episodes)
        advantages = np.zeros(len(batch.scored) + 1, np.float32)
        advantages[np.asarray(blocks.episode)] = np.asarray(credit.advantages)
        inputs = theirs.inputs(batch, lengths.prompt[1], advantages[:-1], config.sampler_cap)
        title = f"GRPO update, decoder of {size.layers} × 192, vocabulary {size.vocab:,}"
        learned, sums = jax.jit(policy.gradient)(Critic(loaded.params), None, (blocks, credit))
        mean = by_name(jax.tree.map(lambda x: x / divisor, learned.tower))
        mine = float(sums.loss / divisor), mean
        yield from same_update(title, mine, theirs.gradient(inputs))
        del learned, mine, mean
        update = Updates(
            make_token_update(policy),
            policy.first_state(loaded.params, 0),
            lambda: token_episodes(policy, batch, shape),
        )
        case = beside(
            setting,
            f"{title}: episodes",
            len(batch.scored),
            "episodes/s",
            {OURS: update, "TRL": lambda _: theirs.update(inputs)},
            least=1.5,
            details={
                "tokens computed": float(episodes.blocks.tokens.size),
                "tokens of TRL": float(batch.tokens.size),
            },
        )
        # What the program says that it takes beyond weights and moments.
        needed = update.program.lower(update.state, episodes).compile().memory_analysis()
        yield with_details(case, **{"temporary arrays, MiB": needed.temp_size_in_bytes / 2**20})


def sampler_cases(setting: Setting) -> Iterator[Case]:
    """New tokens a second against transformers' `generate`: the same prompts, the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    size, rows, drawn = (Size(300, 1), 8, 16) if setting.quick else (Size(), 64, 64)
    with tempfile.TemporaryDirectory() as name:
        loaded = decoder(Path(name), size)
        theirs: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        params = jax.device_put(loaded.params)
        prompts = np.random.default_rng(0).integers(0, size.vocab, (rows, drawn)).astype(np.int32)
        config = SamplingConfig(temperature=0.0, room=2 * drawn + 1, chunk=drawn)
        sampler = DeviceSampler(loaded.model, config)
        requests = [SampleRequest(prompt, np.zeros(2, np.uint32), drawn) for prompt in prompts]
        ids = torch.tensor(prompts.astype(np.int64))
        samples: dict[str, list[list[int]]] = {}

        def ours(_: int) -> None:
            samples[OURS] = [
                sample.ids.tolist() for sample in RoundSampler(sampler, params).sample(requests)
            ]

        def generate(_: int) -> None:
            with torch.no_grad():
                every = theirs.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=drawn, do_sample=False
                )
            samples["theirs"] = every[:, drawn:].tolist()

        case = beside(
            setting,
            f"sampler, decoder of {size.layers} × 192, vocabulary {size.vocab:,}, {rows} prompts "
            f"of {drawn} tokens, {drawn} new ones",
            rows * drawn,
            "tokens/s",
            {OURS: ours, "transformers' generate": generate},
            least=2.0,
        )
        same = np.mean([one == other for one, other in zip(samples[OURS], samples["theirs"])])
        yield with_details(case, **{"share of prompts with equal tokens": float(same)})

        turns, answer = (2, 8) if setting.quick else (4, 96)  # and tokens of a tool's answer
        longest = SamplingConfig(
            temperature=0.0, room=drawn * (turns + 1) + answer * (turns - 1) + 1, rows=rows // 4
        )
        several = DeviceSampler(loaded.model, longest)

        def episodes(_: int, *, reuse: bool) -> None:
            playing, asked = RoundSampler(several, params, reuse=reuse), requests[: rows // 4]
            for _turn in range(turns):
                results = playing.sample(asked)
                asked = [
                    item._replace(
                        ids=np.concatenate([item.ids, result.ids, item.ids.repeat(3)[:answer]])
                    )
                    for item, result in zip(asked, results, strict=True)
                ]

        yield beside(
            setting,
            f"sampler, the same decoder, {rows // 4} episodes of {turns} turns of {drawn} tokens, "
            f"behind each an answer of {answer}",
            rows // 4 * turns * drawn,
            "tokens/s",
            {
                OURS: partial(episodes, reuse=True),
                "each turn reads its whole prompt": partial(episodes, reuse=False),
            },
        )
