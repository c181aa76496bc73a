"""Turns a run's samples into tokens, cut to the lengths that the config allows."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.data.config import DataConfig
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, Tokens, TokenStore, tokenise


def tokenise_samples(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> TokenStore:
    """Returns the samples' tokens."""
    return tokenise(samples, tokenizer, **config.token_limits(tokenizer))


def tokenise_training(
    config: DataConfig, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> Tokens:
    """Returns the samples' tokens; redrawn samples get a store that covers every epoch."""
    if isinstance(samples, RedrawnSamples):
        return tokenise_redrawn(samples, tokenizer, **config.token_limits(tokenizer))
    return tokenise_samples(config, tokenizer, samples)


def truncation_report(store: Tokens) -> str:
    """One line on how many texts were cut; empty if none was cut."""
    if not store.truncated_questions and not store.truncated_chunks:
        return ""
    return (
        f"truncated: {store.truncated_questions} of {len(store)} questions, "
        f"{store.truncated_chunks} of {store.chunk_texts} chunks"
    )
