"""Turns a run's samples into tokens, cut to the lengths that the config allows."""

from __future__ import annotations

from collections.abc import Sequence

from qrag_jax.data.config import DataConfig
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TextTokenizer, Tokens, TokenStore, tokenise

_MANY = 0.1  # share of truncated texts above which it is a warning


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


def truncation_report(store: Tokens, config: DataConfig, tokenizer: TextTokenizer) -> str:
    """One line on how many texts were cut, and by which fields; empty if none was cut.

    It is a warning if more than a tenth of the questions or chunks were.
    """
    row = config.row_tokens(tokenizer)
    chunks = store.truncated_chunks
    if row < config.token_limits(tokenizer)["max_chunk_tokens"]:
        chunks = int((store.chunk_lengths > row).sum())
    cut = [
        (store.truncated_questions, len(store), "questions", "max_question_tokens"),
        (chunks, store.chunk_texts, "chunks", "max_chunk_tokens"),
    ]
    said = [
        f"{some} of {every} {what} ({some / every:.0%}), by config.data.{field} = "
        f"{getattr(config, field)}"
        for some, every, what, field in cut
        if some
    ]
    if not said:
        return ""
    line = f"truncated: {'; '.join(said)}"
    if all(some <= _MANY * every for some, every, *_ in cut):
        return line
    return f"warning: {line}. What is cut off is not read: raise the field, or split the texts."
