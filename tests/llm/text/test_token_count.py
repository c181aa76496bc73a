"""Counting a prompt's tokens with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from qrag_jax.errors import InputError
from qrag_jax.llm.text.generation import token_counter

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


def test_the_template_and_the_opening_of_the_turn_count(tmp_path: Path) -> None:
    folder = saved(tmp_path, TEMPLATE)
    messages = (("system", "Be brief."), ("user", "Who built it?"))
    assert token_counter(folder)(messages) == 1 + 2 + 1 + 3 + 1
    assert token_counter(folder, enable_thinking=True)(messages) == 8
    assert token_counter(folder, enable_thinking=False)(messages) == 10


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="chat template"):
        token_counter(saved(tmp_path / "bare", None))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty cannot be loaded .* give the folder of the model"):
        token_counter(str(tmp_path / "empty"))
