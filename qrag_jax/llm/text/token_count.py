"""Counts a prompt's tokens with the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import Callable

from qrag_jax.llm.text.chat_text import chat_tokenizer, templated
from qrag_jax.llm.text.prompts import Messages


def token_counter(tokenizer: str, enable_thinking: bool | None = None) -> Callable[[Messages], int]:
    """Makes a function that counts the tokens of messages in the chat template.

    The count includes what the template adds to open the model's turn.

    Args:
        tokenizer: folder (or hub name) of the model that is served.
        enable_thinking: passed to the chat template; None leaves it to the template.

    Raises:
        InputError: the tokenizer cannot be loaded, or has no chat template.
    """
    loaded = chat_tokenizer(tokenizer)
    text = templated(loaded, enable_thinking)
    return lambda messages: len(loaded(text(messages), add_special_tokens=False).input_ids)
