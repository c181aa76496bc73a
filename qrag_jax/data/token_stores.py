"""The samples of a run as tokens, cut to the lengths that its config allows."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.data.config import DataConfig
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, Tokens, TokenStore, tokenise


def tokenise_samples(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> TokenStore:
    """The samples' tokens."""
    return tokenise(samples, tokenizer, **config.token_limits(tokenizer))


def tokenise_training(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> Tokens:
    """As `tokenise_samples`; of samples that are drawn anew in every epoch, those of all."""
    if isinstance(samples, RedrawnSamples):
        return tokenise_redrawn(samples, tokenizer, **config.token_limits(tokenizer))
    return tokenise_samples(config, tokenizer, samples)


def truncation_report(store: Tokens) -> str:
    """How many texts were cut, as one line; empty if none was."""
    if not store.truncated_questions and not store.truncated_chunks:
        return ""
    return (
        f"truncated: {store.truncated_questions} of {len(store)} questions, "
        f"{store.truncated_chunks} of {store.chunk_texts} chunks"
    )
