"""A causal language model: a trunk and its head, which is the word table or a map of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.precision import exact
from qrag_jax.models.trunks.qwen3 import HEAD, Qwen3
from qrag_jax.models.trunks.trunk import WORDS, Params


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Maps rows of tokens to logits of their next tokens.

    Training and sampling never make all logits of a batch: see `policies.tokens`.

    Attributes:
        trunk: maps word vectors to hidden states.
        stop_ids: tokens that end a turn.
        max_positions: longest row that the model was made for.
        lora_scale: factor on the product of an adapter's two matrices, if there are adapters.
    """

    trunk: Qwen3
    stop_ids: tuple[int, ...]
    max_positions: int
    lora_scale: float = 1.0

    def init(self, key: jax.Array) -> Params:
        """Random parameters, layers stacked."""
        return self.trunk.init_params(key)

    def head(self, params: Params) -> jax.Array:
        """The head `[V, H]`, stored or prepared parameters alike."""
        return params[HEAD] if self.trunk.own_head else params[WORDS]

    def logits(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → float32 `[B, L, V]`.

        `params` are stacked. At positions ≥ length the values are finite but meaningless.
        """
        hidden = self.trunk.hidden_states(params, tokens, lengths)
        return self.logits_of(hidden, self.head(params))

    def logits_of(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Hidden states `[..., H]` → float32 `[..., V]`."""
        products = self.trunk.precision.products
        return jax.lax.dot_general(
            hidden.astype(products),
            head.astype(products),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=exact(products),
            preferred_element_type=jnp.float32,
        )
