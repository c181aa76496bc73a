"""Llama 3 (Grattafiori et al., arXiv 2407.21783) and its kin, such as SmolLM2; Qwen2.5.

Both have Qwen3's layers without norms of heads; Qwen2.5 (arXiv 2412.15115) has biases. Llama 3.1
and later turn slow pairs slower, for longer contexts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.qwen3 import ROPE, Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen2Config(Qwen3Config):
    """Sizes of a Qwen2 or Qwen2.5 model, named as in Hugging Face's `config.json`."""

    NORMS_HEADS: ClassVar[bool] = False

    @property
    def biases(self) -> tuple[bool, bool]:
        """Queries, keys and values have biases; attention's output has none."""
        return True, False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """See `Qwen3Config.from_dict`; a head is a part of the hidden size."""
        return super().from_dict(with_head_dim(config), where)


def with_head_dim(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed `config.json` that says how wide a head is; where it does not, all heads are H."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
        return {**config, "head_dim": hidden // max(heads, 1)}
    return {**config}


LLAMA3 = "llama3"


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """How slow pairs are slowed down, named as in Hugging Face's `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def slowed(self, frequency: np.ndarray) -> np.ndarray:
        """Pairs with few turns in the original context get 1/factor of their frequency.

        Those with many keep it, and in between it goes from the one to the other.
        """
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Qwen3Config):
    """Sizes of a Llama model, named as in Hugging Face's `config.json`."""

    scaling: Llama3Rope | None = None

    NORMS_HEADS: ClassVar[bool] = False

    @property
    def frequency(self) -> np.ndarray:
        """See `Qwen3Config.frequency`."""
        plain = super().frequency
        return plain if self.scaling is None else self.scaling.slowed(plain)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """See `Qwen3Config.from_dict`; a head is a part of the hidden size."""
        if config.get("mlp_bias"):
            raise InputError(
                f"{where}: mlp_bias is set, but biases of the feed-forward are not supported; use "
                "a model without them."
            )
        return super().from_dict(with_head_dim(config), where)

    @classmethod
    def rope_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Also reads the scaling of Llama 3.1."""
        plain, found = dict(config), {}
        for name in ROPE:
            rope = dict(config.get(name) or {})
            if rope.get("rope_type", rope.get("type")) != LLAMA3:
                continue
            fields = {field.name: field.type for field in dataclasses.fields(Llama3Rope)}
            values = {field: rope.pop(field, None) for field in fields}
            wrong = [
                field
                for field, value in values.items()
                if not isinstance(value, int | float) or not value > 0
            ]
            if wrong or values["high_freq_factor"] <= values["low_freq_factor"]:
                raise InputError(
                    f"{where}: {name} of type {LLAMA3!r} needs numbers above 0 for "
                    f"{', '.join(fields)}, the high factor above the low one; copy it from the "
                    "model's own config.json."
                )
            found["scaling"] = Llama3Rope(**values)
            plain[name] = rope | {"rope_type": "default"}
            plain[name].pop("type", None)
        return super().rope_fields(plain, where) | found
