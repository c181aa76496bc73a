"""A tokenizer of words, without a vocabulary, with any chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

UNKNOWN = "[UNK]"


def saved_tokenizer(folder: Path, template: str | None) -> str:
    words = Tokenizer(WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    words.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)
