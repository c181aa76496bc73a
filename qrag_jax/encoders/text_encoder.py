"""A text encoder as the towers use it: a Flax trunk, its pooling and its special tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qrag_jax.encoders.bert import WORDS, Bert, Params
from qrag_jax.encoders.packing import Layout, padded_layout


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Token rows to embeddings: masked mean of the last hidden states times `scale`.

    Q-RAG's BERT towers divide the mean by 10 and do not normalise it (scale 0.1).

    Attributes:
        module: Flax trunk, (word vectors `[T, D]`, layout) → hidden states `[T, D]`.
        width: D, even: each half of an embedding is one critic.
        max_positions: longest row the trunk can take, in tokens.
        cls_id, sep_id, pad_id: ids a row opens with, ends each part with, and is padded with.
        scale: factor on the pooled vector.
    """

    module: Bert
    width: int
    max_positions: int
    cls_id: int
    sep_id: int
    pad_id: int
    scale: float = 0.1

    def init(self, key: jax.Array) -> Params:
        """Random parameters of one tower, as they rest."""
        return self.module.init_params(key)

    def embed(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → float32 embeddings `[B, D]`.

        `params` as they rest. A row of length 0 yields zeros.
        """
        prepared = self.module.prepare(params)
        where = padded_layout(lengths, tokens.shape[1])
        return self.embed_words(prepared, prepared[WORDS][tokens.reshape(-1)], where)

    def embed_words(self, prepared: Params, words: jax.Array, where: Layout) -> jax.Array:
        """R rows packed into T places as `where` says → float32 embeddings `[R, D]`.

        Args:
            prepared: parameters that `module.prepare` cut apart. words: `[T, D]`, rows of the
                word table.

        Returns:
            Zeros for a row of length 0.
        """
        hidden = jnp.asarray(self.module.apply({"params": prepared}, words, where), jnp.float32)
        member = where.row == jnp.arange(len(where.lengths))[:, None]
        total = jnp.einsum("rt,td->rd", member.astype(jnp.float32), hidden)
        return self.scale * total / jnp.maximum(where.lengths, 1)[:, None].astype(jnp.float32)
