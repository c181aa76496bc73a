"""How texts are drawn, refused before anything is asked; conversations as one text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer
from qrag_jax.llm.text.generation import (
    Generation,
    chat_tokenizer,
    in_template,
    templated,
    token_counter,
)

DRAWN: dict[str, Any] = {"temperature": 0.7, "max_tokens": 9, "top_p": 0.9, "seed": 3}
FIELDS = DRAWN | {"enable_thinking": False, "max_prompt_tokens": 0, "tokenizer": ""}
FIELDS |= {"cut_off": "fail", "url": "http://127.0.0.1:8000/v1"}  # what others read is no matter


def test_requests_carry_them() -> None:
    request = Generation.of(FIELDS, "").request((("user", "Who?"),))
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], **DRAWN}
    assert request.body("tiny") == sent | {"chat_template_kwargs": {"enable_thinking": False}}
    assert not request.greedy


def test_what_was_cut_off_counts_only_where_it_shall() -> None:
    cut = Answer("Final answer: Os", finish_reason="length")
    assert Generation.of(FIELDS | {"cut_off": "score"}, "").final_answer(cut) == "Os"
    assert getattr(Generation.of(FIELDS, "").final_answer(cut), "cause", "") == "cut_off"


def test_refusals() -> None:
    wrong = {"max_prompt_tokens": 9, "max_tokens": 0, "temperature": float("nan"), "top_p": 0.0}
    for name, value in (wrong | {"cut_off": "keep"}).items():
        with pytest.raises(InputError, match=f"--x.{name}"):
            Generation.of(FIELDS | {name: value}, "--x.")


UNKNOWN = "[UNK]"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} <think> </think>{% endif %}"
)


def saved(folder: Path, template: str | None) -> str:
    made = Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=UNKNOWN)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


MESSAGES = (("user", "Who built {prompt}?"),)


def test_the_template_and_the_opening_of_the_turn_count(tmp_path: Path) -> None:
    folder = saved(tmp_path, TEMPLATE)
    messages = (("system", "Be brief."), ("user", "Who built it?"))
    assert token_counter(folder)(messages) == 1 + 2 + 1 + 3 + 1
    assert token_counter(folder, enable_thinking=False)(messages) == 10
    with pytest.raises(InputError, match="chat template"):
        token_counter(saved(tmp_path / "bare", None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty cannot be loaded"):
        token_counter(str(tmp_path / "empty"))
    tokenizer = chat_tokenizer(folder)
    plain = "<user> Who built {prompt}? <assistant>"
    assert templated(tokenizer)(MESSAGES) == plain
    assert templated(tokenizer, enable_thinking=False)(MESSAGES) == plain + " <think> </think>"


def test_a_template_given_as_text() -> None:
    written = in_template("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    expected = "<|im_start|>user\nWho built {prompt}?<|im_end|>\n<|im_start|>assistant\n"
    assert written(MESSAGES) == expected
    for template in ("user: ", "{prompt}{prompt}"):
        with pytest.raises(InputError, match=r"places \{prompt\}"):
            in_template(template)
