"""How answers are sampled and read, and conversations as the one text that a model continues.

That text is for the raw completions endpoint. A server's chat endpoint applies the chat template
itself, so such a text must not go there, or it is wrapped a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm import outcomes
from qrag_jax.llm.config import SCORE, Drawing
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, Failure
from qrag_jax.llm.text import extraction
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import ChatTemplate
from qrag_jax.runtime.config_fields import check
from qrag_jax.runtime.pretrained_files import auto_tokenizer
from qrag_jax.runtime.whole_files import reading


@dataclasses.dataclass(frozen=True)
class Generation(Drawing):
    # counts the tokens of messages; None if there is no limit
    count: Callable[[Messages], int] | None = None

    @classmethod
    def of(cls, llm: Mapping[str, Any], prefix: str) -> Generation:
        """By fields of these names; `prefix` is put before them in messages, such as "--llm."."""
        drawing = Drawing(**{field.name: llm[field.name] for field in dataclasses.fields(Drawing)})
        check(drawing, prefix)
        count = None
        if drawing.max_prompt_tokens:
            if not drawing.tokenizer:
                raise InputError(f"{prefix}max_prompt_tokens needs {prefix}tokenizer=FOLDER.")
            count = token_counter(drawing.tokenizer, drawing.enable_thinking)
        return cls(**vars(drawing), count=count)

    def request(
        self, messages: Messages, reads: Callable[[Answer], str] | None = None, **extra: Any
    ) -> ChatRequest:
        """Asks in a chat; `extra` are further fields of the body."""
        if self.enable_thinking is not None:  # as vLLM and Qwen3 turn it on or off
            extra["chat_template_kwargs"] = {"enable_thinking": self.enable_thinking}
        return ChatRequest(messages, **self._sampling(), extra=extra, reads=reads)

    def continuation(
        self, text: str, reads: Callable[[Answer], str], **extra: Any
    ) -> CompletionRequest:
        """Asks to go on with a text that a tokenizer's chat template made."""
        # It has its special tokens, such as the first one, which vLLM would add again.
        extra["add_special_tokens"] = False
        return CompletionRequest(text, **self._sampling(), extra=extra, reads=reads)

    def _sampling(self) -> dict[str, Any]:
        names = ("temperature", "max_tokens", "top_p", "seed")
        return {name: getattr(self, name) for name in names}

    def said(self, answer: Answer) -> str | Failure:
        """What the model says after it has thought."""
        text, reason, thinks = self._read(answer)
        return extraction.without_thinking(text, thinks and reason == "length")

    def final_answer(self, answer: Answer) -> str | Failure:
        return extraction.final_answer(*self._read(answer))

    def verdict(self, answer: Answer) -> bool | Failure:
        return extraction.verdict(*self._read(answer))

    def reads_answer(self, answer: Answer) -> str:
        """How `final_answer` reads it, for `request`."""
        if isinstance(self.final_answer(answer), Failure):
            return outcomes.UNREAD
        return outcomes.READ if extraction.is_marked(answer.text) else outcomes.UNMARKED

    def _read(self, answer: Answer) -> tuple[str, str, bool]:
        """The text, the finish reason, and whether the prompt may have opened the thinking."""
        reason = "stop" if self.cut_off == SCORE else answer.finish_reason
        return answer.text, reason, self.enable_thinking is True


def token_counter(tokenizer: str, enable_thinking: bool | None = None) -> Callable[[Messages], int]:
    """Counts the tokens of messages in the chat template, with the opening of the model's turn."""
    template = chat_template(tokenizer, enable_thinking)
    return lambda messages: len(template.opening(messages))


def chat_template(tokenizer: str, enable_thinking: bool | None = None) -> ChatTemplate:
    """That of the folder (or hub name) of the model that is served."""
    with reading(f"the tokenizer {tokenizer}", "give the folder of the model that is served"):
        loaded = auto_tokenizer().from_pretrained(tokenizer, trust_remote_code=False)
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return ChatTemplate(loaded, options)
