"""What passes read of the hidden states before the sampled tokens: log-probabilities, values."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.precision import EXACT
from qrag_jax.policies.tokens import TokenScores, Vocabulary, token_scores

Scores = TypeVar("Scores", covariant=True)


class ValueHead(NamedTuple):
    """The linear map of a critic: weights float32 `[H]`, zeros at first, and a bias, scalar."""

    weights: jax.Array
    bias: jax.Array


class Readout(Protocol[Scores]):
    """Reads hidden states. It is hashable."""

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: Any, tokens: jax.Array
    ) -> Scores:
        """What is read, `[S]`.

        Args:
            hidden: `[S, H]`, the hidden states before the tokens.
            head: `[V, H]` of the language model, or this device's part of it.
            further: parameters that the language model does not have; a pytree.
            tokens: int32 `[S]`, the sampled ones.
        """


@dataclasses.dataclass(frozen=True)
class ReadTokens:
    """The scores of the sampled tokens; there are no further parameters."""

    vocabulary: Vocabulary

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: Any, tokens: jax.Array
    ) -> TokenScores:
        """See `Readout`."""
        return token_scores(self.vocabulary, hidden, head, tokens)


@dataclasses.dataclass(frozen=True)
class ReadValues:
    """The value of the state in which each token was sampled; `further` is a `ValueHead`."""

    def __call__(
        self, hidden: jax.Array, head: jax.Array, further: ValueHead, tokens: jax.Array
    ) -> jax.Array:
        """See `Readout`; float32."""
        weighed = jnp.einsum(
            "sh,h->s", hidden.astype(jnp.float32), further.weights, precision=EXACT
        )
        return weighed + further.bias
