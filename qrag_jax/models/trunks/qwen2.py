"""Qwen2.5 (arXiv 2412.15115): Qwen3's layers with biases, and without norms of heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from qrag_jax.models.trunks.qwen3 import Qwen3Config


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
