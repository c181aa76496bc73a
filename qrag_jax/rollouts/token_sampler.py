"""What a token sampler is asked for, and what it gives: ids in, ids and log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from qrag_jax.errors import Count, Weight, one_of

STOP, LENGTH = "stop", "length"
DEVICE, SERVER = ENGINES = ("device", "server")


class SampleRequest(NamedTuple):
    """One turn of one episode."""

    ids: np.ndarray  # int32, the whole context so far; never empty
    # uint32 `[2]`, of the segment's draws (run, batch, episode, attempt, segment). A token's draw
    # depends on it and on the token's position alone.
    key: np.ndarray
    most: int  # sampled tokens, at most


class Sampled(NamedTuple):
    """The turn that was sampled."""

    ids: np.ndarray  # int32, with the token that ended the turn if there is one
    log_probs: np.ndarray  # float32, of these by the distribution they were drawn from
    finish: str  # "stop", or "length" where the turn had no end within `most` tokens


def rooms(requests: Sequence[SampleRequest], room: int) -> list[int]:
    """How many tokens each turn may have: as many as asked for that fit behind its context."""
    return [min(request.most, room - len(request.ids)) for request in requests]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Section `sampling`."""

    # What plays the episodes that are learned from: the device that trains, or a vLLM server
    # (section llm). Evaluations are always on the device.
    engine: Annotated[str, one_of(ENGINES)] = DEVICE
    temperature: Weight = 1.0  # logits are divided by it; 0: the likeliest token
    room: Count = 1024  # tokens of the longest episode
    chunk: Count = 64  # tokens of prompts that are read at a time
    rows: Count = 64  # turns that a device draws side by side, at most
