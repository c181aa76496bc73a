"""A Boolean query that any of many words satisfies."""

from __future__ import annotations

from qrag_jax.data.generators.function_words import words_of


def any_of(*texts: str) -> str:
    """A Boolean query for any of the words of the texts, without their marks and operators."""
    # In lower case, since AND, OR and NOT are operators in upper case alone.
    return " OR ".join(dict.fromkeys(word.lower() for text in texts for word in words_of(text)))
