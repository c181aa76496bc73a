"""Log-probabilities of sampled tokens, without an array of tokens × vocabulary.

The vocabulary is computed a block at a time: the forward pass keeps a running maximum and sums (as
in Milakov & Gimelshein, arXiv 1805.02867), the backward pass computes each block's logits again. So
memory holds the logits of one block only; autodiff would keep those of all blocks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qrag_jax.models.compute.precision import rounded_einsum

_LOWEST = -1e30  # below every logit; -inf would make NaNs of differences


class Vocabulary(NamedTuple):
    """How logits become log-probabilities. It is hashable, so it can be static under jit."""

    temperature: float = 1.0  # logits are divided by it, as by the sampler
    numbers: int = 2**24  # logits that exist at a time, at most; a block has at least one column
    products: jnp.dtype = jnp.dtype(jnp.float32)  # dtype of the factors of logits; sums are float32

    def block(self, rows: int, words: int) -> int:
        """Columns of a block: the fewest blocks that are small enough, all of one size."""
        most = min(words, max(1, self.numbers // max(rows, 1)))
        return math.ceil(words / math.ceil(words / most))


class TokenScores(NamedTuple):
    """Of the policy at each sampled token; float32 `[S]`."""

    log_probs: jax.Array  # of the token that was sampled
    entropy: jax.Array  # of the distribution that it was sampled from, in nats


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_scores(
    how: Vocabulary, hidden: jax.Array, head: jax.Array, tokens: jax.Array
) -> TokenScores:
    """Log-probabilities of tokens, and the entropies; both have gradients.

    Args:
        hidden: `[S, H]`, the hidden states before the tokens.
        head: `[V, H]`, tied to the word table or not.
        tokens: int `[S]`, each below V.
    """
    return _forward(how, hidden, head, tokens)[0]


class _Blocks:
    """Walks over the vocabulary; the last block overlaps the one before if V is no multiple."""

    def __init__(self, how: Vocabulary, hidden: jax.Array, head: jax.Array) -> None:
        self.how, self.hidden, self.head = how, hidden, head
        self.words = len(head)
        self.size = how.block(len(hidden), self.words)
        self.number = math.ceil(self.words / self.size)

    def columns(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The words of a block, and which of them no earlier block has had."""
        first = jnp.minimum(number * self.size, self.words - self.size)
        words = first + jnp.arange(self.size)
        return words, words >= number * self.size

    def part(self, first: jax.Array) -> jax.Array:
        """The head of a block, `[size, H]`."""
        part = jax.lax.dynamic_slice_in_dim(self.head, first, self.size)
        return part.astype(self.how.products)

    def logits(self, part: jax.Array) -> jax.Array:
        """float32 `[S, size]`, divided by the temperature."""
        product = rounded_einsum(self.how.products, "sh,vh->sv", self.hidden, part)
        return product / self.how.temperature


def _forward(how, hidden, head, tokens):
    blocks = _Blocks(how, hidden, head)

    def one(number, sums):
        most, total, weighted, chosen = sums
        words, new = blocks.columns(number)
        logits = blocks.logits(blocks.part(words[0]))
        known = jnp.where(new[None], logits, _LOWEST)
        highest = jnp.maximum(most, known.max(axis=1))
        scale, powers = jnp.exp(most - highest), jnp.exp(known - highest[:, None])
        place = tokens - words[0]
        inside = (place >= 0) & (place < blocks.size)
        hit = jnp.take_along_axis(logits, jnp.clip(place, 0, blocks.size - 1)[:, None], 1)[:, 0]
        return (
            highest,
            total * scale + powers.sum(axis=1),
            weighted * scale + (powers * logits).sum(axis=1),
            jnp.where(inside, hit, chosen),
        )

    nothing = jnp.zeros(len(hidden), jnp.float32)
    start = nothing + _LOWEST, nothing, nothing, nothing
    most, total, weighted, chosen = jax.lax.fori_loop(0, blocks.number, one, start)
    log_total, mean = most + jnp.log(total), weighted / total
    scores = TokenScores(chosen - log_total, log_total - mean)
    return scores, (hidden, head, tokens, log_total, mean)


def _backward(how, saved, gradient):
    """With p the probabilities, z the logits: ∂log p_a/∂z = 1[a] − p, ∂H/∂z = −p·(z − Σ p·z)."""
    hidden, head, tokens, log_total, mean = saved
    blocks = _Blocks(how, hidden, head)
    of_log_probs, of_entropy = (cotangent[:, None] for cotangent in gradient)

    def one(number, sums):
        of_hidden, of_head = sums
        words, new = blocks.columns(number)
        part = blocks.part(words[0])
        logits = blocks.logits(part)
        powers = jnp.exp(logits - log_total[:, None])
        chosen = (tokens[:, None] == words[None]).astype(jnp.float32)
        grad = of_log_probs * (chosen - powers) - of_entropy * powers * (logits - mean[:, None])
        grad = jnp.where(new[None], grad, 0.0) / how.temperature
        of_hidden += rounded_einsum(how.products, "sv,vh->sh", grad, part)
        # JAX leaves this out where nobody asks for the gradient of the head.
        delta = rounded_einsum(how.products, "sv,sh->vh", grad, hidden)
        before = jax.lax.dynamic_slice_in_dim(of_head, words[0], blocks.size)
        of_head = jax.lax.dynamic_update_slice_in_dim(of_head, before + delta, words[0], 0)
        return of_hidden, of_head

    start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    of_hidden, of_head = jax.lax.fori_loop(0, blocks.number, one, start)
    return of_hidden.astype(hidden.dtype), of_head.astype(head.dtype), None


token_scores.defvjp(_forward, _backward)
