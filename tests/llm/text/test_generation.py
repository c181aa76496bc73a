"""Settings of how texts are drawn, refused before anything is asked."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer
from qrag_jax.llm.text.generation import Generation

FIELDS: dict[str, Any] = {
    "temperature": 0.7,
    "max_tokens": 9,
    "top_p": 0.9,
    "seed": 3,
    "enable_thinking": False,
    "max_prompt_tokens": 0,
    "tokenizer": "",
    "cut_off": "fail",
    "url": "http://127.0.0.1:8000/v1",  # what others read is no matter
}


def test_requests_carry_them() -> None:
    request = Generation.of(FIELDS, "").request((("user", "Who?"),))
    assert request.body("tiny") == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who?"}],
        "temperature": 0.7,
        "max_tokens": 9,
        "top_p": 0.9,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert not request.greedy


def test_what_was_cut_off_counts_only_where_it_shall() -> None:
    cut = Answer("Final answer: Os", finish_reason="length")
    assert Generation.of(FIELDS | {"cut_off": "score"}, "").final_answer(cut) == "Os"
    assert getattr(Generation.of(FIELDS, "").final_answer(cut), "cause", "") == "cut_off"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_prompt_tokens": 9}, "--x.max_prompt_tokens needs --x.tokenizer=FOLDER"),
        ({"max_tokens": 0}, r"--x.max_tokens"),
        ({"temperature": -1.0}, r"--x.temperature"),
        ({"temperature": float("nan")}, r"--x.temperature"),
        ({"top_p": 0.0}, r"--x.top_p"),
        ({"cut_off": "keep"}, r"--x.cut_off"),
    ],
)
def test_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Generation.of(FIELDS | changes, "--x.")
