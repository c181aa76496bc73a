"""A conversation as one text: by a real tokenizer's chat template, or by one given as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.llm.text.chat_text import chat_tokenizer, in_template, templated
from tests.llm.text.test_token_count import TEMPLATE, saved

MESSAGES = (("user", "Who built {prompt}?"),)


def test_the_tokenizers_own_template_up_to_the_models_turn(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(saved(tmp_path, TEMPLATE))
    plain = "<user> Who built {prompt}? <assistant>"
    assert templated(tokenizer)(MESSAGES) == plain
    assert templated(tokenizer, enable_thinking=False)(MESSAGES) == plain + " <think> </think>"


def test_a_template_given_as_text() -> None:
    written = in_template("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    expected = "<|im_start|>user\nWho built {prompt}?<|im_end|>\n<|im_start|>assistant\n"
    assert written(MESSAGES) == expected
    assert in_template("{prompt}")(MESSAGES) == "Who built {prompt}?"
    with pytest.raises(ValueError, match="prompts of one"):
        written((("system", "Be brief."), *MESSAGES))


@pytest.mark.parametrize("template", ["", "user: ", "{prompt}{prompt}"])
def test_a_template_has_one_place_for_the_prompt(template: str) -> None:
    with pytest.raises(InputError, match=r"places \{prompt\}"):
        in_template(template)
