"""How answers are sampled and read, and conversations as the one text that a model continues.

That text is for the raw completions endpoint. A server's chat endpoint applies the chat template
itself, so such a text must not go there, or it is wrapped a second time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import READ, UNMARKED, UNREAD, Answer, ChatRequest
from qrag_jax.llm.text import extraction
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.prompts import Messages
from qrag_jax.runtime.pretrained_files import auto_tokenizer

FAIL, SCORE = "fail", "score"  # how an answer is read that max_tokens cut off
SLOT = "{prompt}"
SAMPLING = ("temperature", "max_tokens", "top_p", "seed")  # that requests have, too
# For a request with a text that a tokenizer's chat template made: it has its special tokens, such
# as the first one, which vLLM would add again.
HAS_SPECIAL_TOKENS = {"add_special_tokens": False}


@dataclasses.dataclass(frozen=True)
class Generation:
    """How answers are sampled (as in `ChatRequest`) and read."""

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float | None = None
    seed: int | None = None
    # turns a thinking model's thinking on or off; None leaves it to the model
    enable_thinking: bool | None = None
    max_prompt_tokens: int = 0  # longest prompt; 0: no limit
    # counts the tokens of messages; None if there is no limit
    count: Callable[[Messages], int] | None = None
    score_cut_off: bool = False  # read an answer that max_tokens cut off as if it were complete

    @classmethod
    def of(cls, llm: Mapping[str, Any], prefix: str) -> Generation:
        """Makes the settings from fields of the same names, `tokenizer` and `cut_off`.

        `prefix` is put before the fields' names in error messages, such as "--llm.".
        """
        if llm["max_prompt_tokens"] and not llm["tokenizer"]:
            raise InputError(
                f"{prefix}max_prompt_tokens needs {prefix}tokenizer=FOLDER, that of the model "
                "served."
            )
        if llm["max_tokens"] < 1 or llm["max_prompt_tokens"] < 0 or not llm["temperature"] >= 0:
            raise InputError(
                f"{prefix}max_tokens must be at least 1, {prefix}max_prompt_tokens and "
                f"{prefix}temperature at least 0."
            )
        if llm["top_p"] is not None and not 0 < llm["top_p"] <= 1:
            raise InputError(f"{prefix}top_p is {llm['top_p']}; use a share above 0 and up to 1.")
        if llm["cut_off"] not in (FAIL, SCORE):
            raise InputError(f"{prefix}cut_off is {llm['cut_off']!r}; use {FAIL} or {SCORE}.")
        budget, thinks = llm["max_prompt_tokens"], llm["enable_thinking"]
        return cls(
            **{name: llm[name] for name in SAMPLING},
            enable_thinking=thinks,
            max_prompt_tokens=budget,
            count=token_counter(llm["tokenizer"], thinks) if budget else None,
            score_cut_off=llm["cut_off"] == SCORE,
        )

    def request(
        self, messages: Messages, reads: Callable[[Answer], str] | None = None
    ) -> ChatRequest:
        sampling = {name: getattr(self, name) for name in SAMPLING}
        extra = extraction.thinking(self.enable_thinking)
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
        """How `final_answer` reads it, for `request`."""
        if isinstance(self.final_answer(answer), NoAnswer):
            return UNREAD
        return READ if extraction.is_marked(answer.text) else UNMARKED

    def reads_verdict(self, answer: Answer) -> str:
        """How `verdict` reads it, for `request`."""
        return UNREAD if isinstance(self.verdict(answer), NoAnswer) else READ

    def _read(self, answer: Answer) -> tuple[str, str, bool]:
        """The text, the finish reason, and whether the prompt may have opened the thinking."""
        reason = "stop" if self.score_cut_off else answer.finish_reason
        return answer.text, reason, self.enable_thinking is True


def token_counter(tokenizer: str, enable_thinking: bool | None = None) -> Callable[[Messages], int]:
    """Makes a function that counts the tokens of messages in the chat template.

    The count includes what the template adds to open the model's turn. `tokenizer` is the folder
    (or hub name) of the model that is served.
    """
    loaded = chat_tokenizer(tokenizer)
    text = templated(loaded, enable_thinking)
    return lambda messages: len(loaded(text(messages), add_special_tokens=False).input_ids)


def chat_tokenizer(tokenizer: str) -> Any:
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
    """Makes the text with the tokenizer's chat template, up to the opening of the model's turn."""
    options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def text(messages: Messages) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        return tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, **options
        )

    return text


def in_template(template: str) -> Callable[[Messages], str]:
    """Puts the one message of a prompt into a template given as text.

    Such as "<|im_start|>user\\n{prompt}<|im_end|>\\n<|im_start|>assistant\\n"; for a base model,
    "{prompt}".
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
