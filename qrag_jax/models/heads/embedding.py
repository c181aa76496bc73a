"""A text encoder as the towers use it: a Flax trunk, its pooling and its special tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.trunks.trunk import WORDS, Params, Trunk

POOLINGS = MEAN, LAST, CLS = "mean", "last", "cls"


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Token rows to embeddings: pooled last hidden states times `scale`.

    Q-RAG's BERT towers divide the mean by 10 and do not normalise it (scale 0.1). Qwen3-Embedding
    takes the last token's and normalises it.

    Attributes:
        module: Flax trunk, (word vectors `[T, D]`, layout) → hidden states `[T, D]`.
        width: D, even: each half of an embedding is one critic.
        max_positions: longest row the trunk can take, in tokens.
        opening_id: token a row opens with ([CLS], <s>); None: with its text.
        sep_id, pad_id: ids a row ends each part with, and is padded with.
        scale: factor on the pooled vector, after it is normalised.
        pooling: mean of a row's hidden states, the last one or the first (a name of `POOLINGS`).
        normalise: the pooled vector to length 1 (L2).
        state_prefix, chunk_prefix: ids that the rows of a tower have behind the opening token, such
            as those of "query: ".
        lora_scale: factor on the product of an adapter's two matrices, where there are adapters.
        lora_dropout: share of an adapter's inputs dropped where there is a key of dropout.
        dropout, attention_dropout: shares of hidden states and of attention's weights that the
            trunk drops where there is a key.
    """

    module: Trunk
    width: int
    max_positions: int
    opening_id: int | None
    sep_id: int
    pad_id: int
    scale: float = 0.1
    pooling: str = MEAN
    normalise: bool = False
    state_prefix: tuple[int, ...] = ()
    chunk_prefix: tuple[int, ...] = ()
    lora_scale: float = 1.0
    lora_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def drops(self, adapted: bool) -> bool:
        """Whether a training step draws masks: for adapters where they are trained (`adapted`),
        else for the trunk."""
        return self.lora_dropout > 0 if adapted else max(self.dropout, self.attention_dropout) > 0

    @property
    def state_opening(self) -> tuple[int, ...]:
        """The ids that every state begins with."""
        return self._opening() + self.state_prefix

    @property
    def chunk_opening(self) -> tuple[int, ...]:
        """The ids that every chunk row begins with."""
        return self._opening() + self.chunk_prefix

    def _opening(self) -> tuple[int, ...]:
        return () if self.opening_id is None else (self.opening_id,)

    def init(self, key: jax.Array) -> Params:
        """Random parameters of one tower, layers stacked."""
        return self.module.init_params(key)

    def tower(self, params: Params | Adapted, number: int) -> Params:
        """The stacked parameters of one of several towers stacked on axis 0.

        Where only adapters are stacked they stand beside the kernels of the shared base. With the
        tower's key of dropout if there is one.
        """
        if not isinstance(params, Adapted):
            return jax.tree.map(lambda leaf: leaf[number], params)
        stacked = params.adapters, params.dropout_key
        adapters, key = jax.tree.map(lambda leaf: leaf[number], stacked)
        return attach(Adapted(params.base, adapters, key), self.lora_scale)

    def embed(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → float32 embeddings `[B, D]`.

        `params` stacked, without keys of dropout. A row of length 0 yields zeros.
        """
        unstacked = self.module.unstack(params)
        layout = padded_layout(lengths, tokens.shape[1])
        return self.embed_words(unstacked, unstacked[WORDS][tokens.reshape(-1)], layout)

    def embed_words(self, unstacked: Params, words: jax.Array, layout: Layout) -> jax.Array:
        """R rows packed into T places as `layout` says → float32 embeddings `[R, D]`.

        Args:
            prepared: parameters that `module.prepare` cut apart. words: `[T, D]`, rows of the
                word table.

        Returns:
            Zeros for a row of length 0.
        """
        hidden = jnp.asarray(self.module.apply({"params": unstacked}, words, layout))
        if not self.normalise:
            return pool(self.pooling, hidden, layout, self.scale)
        pooled = pool(self.pooling, hidden, layout)
        # As torch's normalize, but with a gradient of 0, not NaN, where there is no row.
        squares = jnp.square(pooled).sum(axis=-1, keepdims=True)
        return self.scale * pooled * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def pool(pooling: str, hidden: jax.Array, layout: Layout, scale: float = 1.0) -> jax.Array:
    """One vector for each of R rows of hidden states `[T, D]` that stand as `layout` says.

    Args:
        pooling: a name of `POOLINGS`. scale: factor on the result.

    Returns:
        float32 `[R, D]`, zeros for a row of length 0.
    """
    if pooling == MEAN:
        member = layout.row == jnp.arange(len(layout.lengths))[:, None]
        hidden = hidden.astype(jnp.float32)
        total = jnp.einsum("rt,td->rd", member.astype(jnp.float32), hidden)
        return scale * total / jnp.maximum(layout.lengths, 1)[:, None].astype(jnp.float32)
    number = (
        jnp.maximum(layout.lengths - 1, 0) if pooling == LAST else jnp.zeros_like(layout.lengths)
    )
    place = jnp.take_along_axis(layout.place, number[:, None], axis=1)[:, 0]
    # An absent row may share its place with a present one, which must get no gradient from it.
    one = jnp.where(layout.lengths[:, None] > 0, hidden[place], 0)
    return scale * one.astype(jnp.float32)
