"""Token rollouts that were sampled once and stored: tool turns, one cut off, one failed, one flat.

`python -m tests.learners.stored_rollouts` wrote the file. The tiny decoder of the benchmarks
sampled the turns; the tools' words are random. Their log-probabilities are the decoder's with
noise, as those of another engine are, and some are far away.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.trajectories import (
    DONE,
    MASKED,
    TRUNCATED,
    BatchRules,
    TokenTrajectory,
    Turn,
    token_batch,
)
from tests.support.decoders import TEMPERATURE, Size, decoder

STORED = Path(__file__).parent / "golden" / "token_rollouts.json"
SIZE = Size(vocab=260, layers=2)
GROUPS, MEMBERS, LONGEST, PART = 3, 4, 40, "answer"
CUT_OFF, FAILED = 2, 7  # episodes
FLAT = 2  # a group of equal rewards
PROMPTS, REWARDS = (5, 9, 7), (0.0, 1.0, 0.25, 0.75)


def trajectories() -> list[TokenTrajectory]:
    """The stored episodes, group by group."""
    return [TokenTrajectory.from_json(each) for each in json.loads(STORED.read_text())]


def batch_of(stored: list[TokenTrajectory]) -> TokenBatch:
    """Their arrays; an episode that was cut off is masked."""
    return token_batch(stored, BatchRules(MEMBERS, (PART,), MASKED, longest=128))


def learned_episodes(stored: list[TokenTrajectory]) -> list[int]:
    """Numbers of the episodes that something is learned from, by the facts that are known above."""
    left_out = {CUT_OFF, FAILED, *range(FLAT * MEMBERS, (FLAT + 1) * MEMBERS)}
    return [number for number in range(len(stored)) if number not in left_out]


def sampled() -> Iterator[TokenTrajectory]:
    """Episodes of one or two calls of a tool and an answer that ends with the eos_token."""
    import torch
    from transformers import AutoModelForCausalLM

    draw = np.random.default_rng(17)
    with tempfile.TemporaryDirectory() as name:
        end = decoder(Path(name), SIZE).tokenizer.eos_token_id
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()

    def turn(before: list[int], observed: list[int], count: int, *, ends: bool) -> Turn:
        ids, found = [*before, *observed], []
        for place in range(count):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE
            every = torch.log_softmax(logits, dim=-1).numpy()
            token = int(draw.choice(len(every), p=np.exp(every)))
            token = end if ends and place == count - 1 else token
            ids.append(token)
            found.append(every[token] + draw.normal(0, 0.5))
        finish = "stop" if ends else "length"
        new = np.array(ids[-count:], np.int32)
        return Turn(np.array(observed, np.int32), new, np.array(found, np.float32), finish)

    for number in range(GROUPS * MEMBERS):
        group, member = divmod(number, MEMBERS)
        if member == 0:
            prompt = draw.integers(0, end - 1, PROMPTS[group]).tolist()
        before: list[int] = []
        turns, observed = [], prompt
        calls = 1 + (number + group) % 2
        for call in range(calls + 1):
            ends = call < calls or number != CUT_OFF
            made = turn(before, observed, int(draw.integers(3, 8)), ends=ends)
            turns.append(made)
            before += [*made.observed.tolist(), *made.sampled.tolist()]
            observed = draw.integers(0, end - 1, int(draw.integers(3, 7))).tolist()
        status = {CUT_OFF: TRUNCATED, FAILED: "the judge did not answer"}.get(number, DONE)
        reward = 0.5 if group == FLAT else REWARDS[member]
        parts = {} if number == FAILED else {PART: reward}
        yield TokenTrajectory(group, member, 1, (tuple(turns),), status, parts)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(each.to_json()) for each in sampled())
    STORED.write_text(f"[\n{lines}\n]\n")
