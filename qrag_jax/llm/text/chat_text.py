"""A conversation as the one text that its model continues, for the raw completions endpoint.

A server's chat endpoint applies the chat template itself. A text that was made here must not go
there, or it is wrapped a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.runtime.fast_tokenizer import auto_tokenizer

SLOT = "{prompt}"
# For a request with a text that a tokenizer's chat template made: it has its special tokens, such
# as the first one, which vLLM would add again.
HAS_SPECIAL_TOKENS = {"add_special_tokens": False}


def chat_tokenizer(tokenizer: str) -> Any:
    """The tokenizer of the model that is served."""
    try:
        loaded = auto_tokenizer().from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"the tokenizer {tokenizer} cannot be loaded ({reason}); give the folder of the model "
            "that is served"
        ) from None
    if not loaded.chat_template:
        raise InputError(f"the tokenizer {tokenizer} has no chat template; give a chat model's")
    return loaded


def templated(tokenizer: Any, enable_thinking: bool | None = None) -> Callable[[Messages], str]:
    """Makes the text with the tokenizer's own chat template, up to the opening of the model's turn.

    Args:
        tokenizer: see `chat_tokenizer`.
        enable_thinking: passed to the chat template; None leaves it to the template.
    """
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def text(messages: Messages) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **options
        )

    return text


def in_template(template: str) -> Callable[[Messages], str]:
    """Puts the one message of a prompt into a template given as text.

    Args:
        template: such as "<|im_start|>user\\n{prompt}<|im_end|>\\n<|im_start|>assistant\\n"; for a
            base model, "{prompt}".
    """
    if template.count(SLOT) != 1:
        raise InputError(
            f"the chat template {template!r} has {template.count(SLOT)} places {SLOT}; write one, "
            "where the prompt goes"
        )
    before, after = template.split(SLOT)

    def text(messages: Messages) -> str:
        (_, content), *more = messages
        if more:
            raise ValueError("a template given as text takes prompts of one message.")
        return before + content + after

    return text
