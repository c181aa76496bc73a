"""Predicts how long a language model takes to answer, from the bytes that its tokens read."""

from __future__ import annotations

import dataclasses

from qrag_jax.runtime.device_speeds import Speeds


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Tokens that are drawn one after the other.

    Attributes:
        parameters: of the model, of two bytes each.
        token_bytes: bytes of the cache of one token.
        tokens: drawn for each row, on the mean.
        before: tokens of the cache before the first one is drawn, on the mean.
    """

    parameters: float
    token_bytes: float
    tokens: int
    before: int


def decode_seconds(decoding: Decoding, rows: int, speeds: Speeds) -> float:
    """Seconds of drawing the tokens of so many rows at a time, bound by bytes: a floor.

    Every token reads all parameters once, and the cache of every row.
    """
    cache = rows * (decoding.before + decoding.tokens / 2) * decoding.token_bytes
    return decoding.tokens * (2 * decoding.parameters + cache) / speeds.bandwidth


@dataclasses.dataclass(frozen=True)
class Sidecar:
    """A language model that answers on devices of its own.

    Attributes:
        title: its name.
        parameters: their number; each takes two bytes.
        token_bytes: bytes of the cache of one token.
        calls: calls for each question of a step.
        prompt, answer: tokens of a call.
        at_once: calls that a device answers at a time.
        devices: its devices for each host of the training.
    """

    title: str
    parameters: float
    token_bytes: float
    calls: int
    prompt: int
    answer: int
    at_once: int
    devices: int = 1

    def seconds(self, questions: int, speeds: Speeds) -> float:
        """Seconds until all calls of so many questions are answered, by one device.

        Prompts are bound by products, answers by the bytes that every token reads: a floor.
        """
        calls = self.calls * questions
        rounds = -(-calls // (self.at_once * self.devices))
        reads = 2 * self.parameters * self.prompt * calls / self.devices / speeds.peak("bf16")
        return reads + rounds * decode_seconds(
            Decoding(self.parameters, self.token_bytes, self.answer, self.prompt),
            self.at_once,
            speeds,
        )
