"""What is made of a trunk's hidden states: vectors of texts, and logits of the next tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qrag_jax.models.compute.lora import Adapted, attach, of_tower
from qrag_jax.models.compute.packing import Layout
from qrag_jax.models.compute.precision import EXACT, rounded_einsum
from qrag_jax.models.trunks.transformer import HEAD, WORDS, Params, Transformer

POOLINGS = MEAN, LAST, CLS = "mean", "last", "cls"


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """Maps token rows to embeddings: pooled last hidden states times `scale`.

    Q-RAG's BERT towers divide the mean by 10 and do not normalise it (scale 0.1). Qwen3-Embedding
    takes the last token's hidden state and normalises it.
    """

    module: Transformer  # Flax trunk, (word vectors `[T, D]`, layout) → hidden states `[T, D]`
    width: int  # D, even: each half of an embedding is one critic
    max_positions: int  # longest row the trunk can take, in tokens
    sep_id: int  # id that ends each part of a row
    pad_id: int  # id of padding
    scale: float = 0.1  # factor on the pooled vector, applied after normalisation
    # mean of a row's hidden states, the last one or the first (a name of `POOLINGS`)
    pooling: str = MEAN
    normalise: bool = False  # whether the pooled vector is scaled to length 1 (L2)
    # Ids that every row of a tower begins with: [CLS] or <s> if there is one, then a prefix such as
    # "query: " or "passage: "
    state_opening: tuple[int, ...] = ()
    chunk_opening: tuple[int, ...] = ()
    # factor on the product of an adapter's two matrices, if there are adapters
    lora_scale: float = 1.0
    # Shares that a pass with a dropout key drops: of an adapter's inputs, and of the trunk's hidden
    # states and attention weights
    lora_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def tower(self, params: Params | Adapted, number: int) -> Params:
        """Selects one of several towers stacked on axis 0; its layers stay stacked.

        If only adapters are stacked on axis 0, they are put next to the kernels of the shared base.
        """
        return self.alone(of_tower(params, number))

    def alone(self, params: Params | Adapted) -> Params:
        """The parameters of one tower; adapters are put next to the kernels of their base."""
        return attach(params, self.lora_scale)

    def on(self, mesh: Mesh) -> TextEncoder:
        """The encoder as programs compute it on a mesh."""
        return dataclasses.replace(self, module=self.module.clone(mesh=mesh))

    def embed_words(self, prepared: Params, words: jax.Array, layout: Layout) -> jax.Array:
        """R rows placed in T places as in `layout` → float32 embeddings `[R, D]`.

        A row of length 0 yields zeros.

        Args:
            prepared: parameters as `module.prepare` returns them.
            words: `[T, D]`, rows of the word table.
        """
        hidden = jnp.asarray(self.module.apply({"params": prepared}, words, layout))
        if not self.normalise:
            return pool(self.pooling, hidden, layout, self.scale)
        pooled = pool(self.pooling, hidden, layout)
        # As torch's normalize, but the gradient of an absent row is 0, not NaN.
        squares = jnp.square(pooled).sum(axis=-1, keepdims=True)
        return self.scale * pooled * jax.lax.rsqrt(jnp.maximum(squares, 1e-24))


def pool(pooling: str, hidden: jax.Array, layout: Layout, scale: float = 1.0) -> jax.Array:
    """Pools hidden states `[T, D]`, placed as in `layout`, to vectors times a scale.

    The result is float32 `[R, D]`, with zeros for a row of length 0; `pooling` is a name of
    `POOLINGS`.
    """
    if pooling == MEAN:
        member = layout.row[None] == jnp.arange(len(layout.lengths))[:, None]
        hidden = hidden.astype(jnp.float32)
        total = jnp.einsum("rt,td->rd", member.astype(jnp.float32), hidden, precision=EXACT)
        return scale * total / jnp.maximum(layout.lengths, 1)[:, None].astype(jnp.float32)
    number = jnp.maximum(layout.lengths - 1, 0) if pooling == LAST else 0 * layout.lengths
    place = jnp.take_along_axis(layout.place, number[:, None], axis=1)[:, 0]
    # An absent row may point to the place of a present row, which must get no gradient from it.
    one = jnp.where(layout.lengths[:, None] > 0, hidden[place], 0)
    return scale * one.astype(jnp.float32)


# ---------------------------------------------------------------------- language models


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Maps rows of tokens to logits of their next tokens.

    Training and sampling never make all logits of a batch: see `policies.tokens`.
    """

    trunk: Transformer  # maps word vectors to hidden states
    stop_ids: tuple[int, ...]  # tokens that end a turn
    max_positions: int  # longest row that the model was made for
    lora_scale: float = 1.0  # factor on the product of an adapter's two matrices, if there are any

    def head(self, params: Params) -> jax.Array:
        """The head `[V, H]`, stored or prepared parameters alike."""
        return params[HEAD] if self.trunk.own_head else params[WORDS]

    def logits_of(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Hidden states `[..., H]` → float32 `[..., V]`."""
        return rounded_einsum(self.trunk.precision.products, "...h,vh->...v", hidden, head)
