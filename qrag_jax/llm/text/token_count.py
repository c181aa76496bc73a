"""Counts a prompt's tokens with the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qrag_jax.errors import InputError
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
    from transformers import AutoTokenizer  # slow to import, and only needed with a budget

    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"the tokenizer {tokenizer} cannot be loaded ({reason}); give the folder of the model "
            "that is served"
        ) from None
    if not loaded.chat_template:
        raise InputError(f"the tokenizer {tokenizer} has no chat template; give a chat model's")
    options: dict[str, Any] = (
        {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    )

    def count(messages: Messages) -> int:
        turns = [{"role": role, "content": content} for role, content in messages]
        text = loaded.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **options
        )
        return len(loaded(text, add_special_tokens=False).input_ids)

    return count
