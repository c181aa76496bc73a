"""Settings of generation: how answers are sampled and how they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import READ, UNMARKED, UNREAD, Answer, ChatRequest
from qrag_jax.llm.text import extraction
from qrag_jax.llm.text.chat_text import chat_tokenizer, templated
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.prompts import Messages

FAIL, SCORE = "fail", "score"  # how an answer is read that max_tokens cut off


@dataclasses.dataclass(frozen=True)
class Generation:
    """How answers are sampled and read.

    Attributes:
        temperature, max_tokens, top_p, seed: as in `ChatRequest`.
        enable_thinking: turns a thinking model's thinking on or off; None leaves it to the model.
        max_prompt_tokens: longest prompt; 0: no limit.
        count: counts the tokens of messages; None if there is no limit.
        score_cut_off: read an answer that max_tokens cut off as if it were complete.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float | None = None
    seed: int | None = None
    enable_thinking: bool | None = None
    max_prompt_tokens: int = 0
    count: Callable[[Messages], int] | None = None
    score_cut_off: bool = False

    @classmethod
    def of(cls, llm: Mapping[str, Any], prefix: str) -> Generation:
        """Makes the settings from fields of the same names, `tokenizer` and `cut_off`.

        Args:
            llm: the fields.
            prefix: put before the fields' names in error messages, such as "--llm.".
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
            temperature=llm["temperature"],
            max_tokens=llm["max_tokens"],
            top_p=llm["top_p"],
            seed=llm["seed"],
            enable_thinking=thinks,
            max_prompt_tokens=budget,
            count=token_counter(llm["tokenizer"], thinks) if budget else None,
            score_cut_off=llm["cut_off"] == SCORE,
        )

    def request(
        self, messages: Messages, reads: Callable[[Answer], str] | None = None
    ) -> ChatRequest:
        """The request for one answer; `reads` as in `Sampling`."""
        return ChatRequest(
            messages,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            seed=self.seed,
            extra=extraction.thinking(self.enable_thinking),
            reads=reads,
        )

    def said(self, answer: Answer) -> str | NoAnswer:
        """What the model says after it has thought."""
        text, reason, thinks = self._read(answer)
        return extraction.without_thinking(text, thinks and reason == "length")

    def final_answer(self, answer: Answer) -> str | NoAnswer:
        """The answer that the model's text ends with."""
        return extraction.final_answer(*self._read(answer))

    def verdict(self, answer: Answer) -> bool | NoAnswer:
        """A judge's yes or no."""
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

    The count includes what the template adds to open the model's turn.

    Args:
        tokenizer: folder (or hub name) of the model that is served.
        enable_thinking: passed to the chat template; None leaves it to the template.
    """
    loaded = chat_tokenizer(tokenizer)
    text = templated(loaded, enable_thinking)
    return lambda messages: len(loaded(text(messages), add_special_tokens=False).input_ids)
