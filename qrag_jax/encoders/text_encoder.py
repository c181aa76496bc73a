"""A text encoder as the towers use it: a Flax trunk, its pooling and its special tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Params = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Token rows to embeddings: masked mean of the last hidden states times `scale`.

    Q-RAG's BERT towers divide the mean by 10 and do not normalise it (scale 0.1).

    Attributes:
        module: Flax module, (tokens `[B, L]`, lengths `[B]`) → hidden states `[B, L, D]`.
        width: D, even: each half of an embedding is one critic.
        max_positions: longest row the trunk can take, in tokens.
        cls_id, sep_id, pad_id: ids a row opens with, ends each part with, and is padded with.
        scale: factor on the pooled vector.
    """

    module: nn.Module
    width: int
    max_positions: int
    cls_id: int
    sep_id: int
    pad_id: int
    scale: float = 0.1

    def init(self, key: jax.Array) -> Params:
        """Random parameters of one tower."""
        row = jnp.full((1, 2), self.pad_id, jnp.int32)
        return self.module.init(key, row, jnp.full((1,), 2, jnp.int32))["params"]

    def embed(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → float32 embeddings `[B, D]`.

        A row of length 0 yields a finite vector that means nothing.
        """
        lengths = jnp.maximum(lengths, 1)
        hidden = jnp.asarray(self.module.apply({"params": params}, tokens, lengths), jnp.float32)
        inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
        total = jnp.einsum("bld,bl->bd", hidden, inside.astype(jnp.float32))
        return self.scale * total / lengths[:, None].astype(jnp.float32)
