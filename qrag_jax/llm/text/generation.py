"""How answers are sampled and read, and conversations as the one text that a model continues.

That text is for the raw completions endpoint. A server's chat endpoint applies the chat template
itself, so such a text must not go there, or it is wrapped a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.config import SCORE, Drawing
from qrag_jax.llm.outcomes import READ, UNMARKED, UNREAD, Answer, ChatRequest
from qrag_jax.llm.text import extraction
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.llm.text.scaffolds import ChatTemplate
from qrag_jax.runtime.config_fields import check
from qrag_jax.runtime.pretrained_files import auto_tokenizer

SAMPLING = ("temperature", "max_tokens", "top_p", "seed")  # that requests have, too
# For a request with a text that a tokenizer's chat template made: it has its special tokens, such
# as the first one, which vLLM would add again.
HAS_SPECIAL_TOKENS = {"add_special_tokens": False}


@dataclasses.dataclass(frozen=True)
class Generation(Drawing):
    # counts the tokens of messages; None if there is no limit
    count: Callable[[Messages], int] | None = None

    @classmethod
    def of(cls, llm: Mapping[str, Any], prefix: str) -> Generation:
        """By fields of these names; `prefix` is put before them in messages, such as "--llm."."""
        drawing = Drawing(**{each.name: llm[each.name] for each in dataclasses.fields(Drawing)})
        check(drawing, prefix)
        count = None
        if drawing.max_prompt_tokens:
            if not drawing.tokenizer:
                raise InputError(
                    f"{prefix}max_prompt_tokens needs {prefix}tokenizer=FOLDER, that of the model "
                    "served."
                )
            count = token_counter(drawing.tokenizer, drawing.enable_thinking)
        return cls(**vars(drawing), count=count)

    def request(
        self, messages: Messages, reads: Callable[[Answer], str] | None = None
    ) -> ChatRequest:
        sampling = {name: getattr(self, name) for name in SAMPLING}
        # As vLLM and Qwen3 turn thinking on or off; None leaves it to the model.
        thinks = {"enable_thinking": self.enable_thinking}
        extra = {"chat_template_kwargs": thinks} if self.enable_thinking is not None else {}
        return ChatRequest(messages, **sampling, extra=extra, reads=reads)

    def said(self, answer: Answer) -> str | NoAnswer:
        """What the model says after it has thought."""
        text, reason, thinks = self._read(answer)
        return extraction.without_thinking(text, thinks and reason == "length")

    def final_answer(self, answer: Answer) -> str | NoAnswer:
        return extraction.final_answer(*self._read(answer))

    def verdict(self, answer: Answer) -> bool | NoAnswer:
        return extraction.verdict(*self._read(answer))

    def reads_answer(self, answer: Answer) -> str:
        """How `final_answer` reads it; `reads_verdict`: how `verdict` does. Both for `request`."""
        if isinstance(self.final_answer(answer), NoAnswer):
            return UNREAD
        return READ if extraction.is_marked(answer.text) else UNMARKED

    def reads_verdict(self, answer: Answer) -> str:
        return UNREAD if isinstance(self.verdict(answer), NoAnswer) else READ

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
    try:
        loaded = auto_tokenizer().from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"the tokenizer {tokenizer} cannot be loaded ({reason}); give the folder of the model "
            "that is served"
        ) from None
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return ChatTemplate(loaded, options)
