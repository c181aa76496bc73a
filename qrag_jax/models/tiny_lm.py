"""Writes the folder of a tiny Qwen3 language model: random weights, tokenizer, chat template.

The tokenizer is a byte-level BPE trained on given texts. Two rules of how it cuts texts into words
make unseen names easy to copy: a capitalised word does not carry the blank before it, and digits
stand alone. So a name is the same tokens after a blank, after a quotation mark and at the start.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from qrag_jax.errors import Count, InputError, least
from qrag_jax.models.files.weight_names import save_folder
from qrag_jax.models.pretrained_lm import GENERATION, table_of
from qrag_jax.models.trunks.qwen3 import Qwen3, Qwen3Config
from qrag_jax.runtime import own_code
from qrag_jax.runtime.whole_files import write_whole

START, END = "<|im_start|>", "<|im_end|>"
# As in Qwen3's tokenizer these are single tokens, but a decoded text keeps them.
_TAGS = ("tool_call", "tool_response", "think")
TAGS = tuple(f"<{slash}{name}>" for name in _TAGS for slash in ("", "/"))
# Each turn is rendered by itself, so a longer conversation begins with the text of a shorter one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content']"
    " + '\\n</tool_response><|im_end|>\\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WEIGHTS = "config.model.tiny.weights"
# A capitalised word | a blank and a word | one digit | a blank and signs | one white space.
# A word may have underscores, as the names of tools and arguments have.
_WORDS = (
    r"\p{Lu}[\p{L}\p{M}_]*"
    r"| ?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}][\p{L}\p{M}_]*"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s"
)


@dataclasses.dataclass(frozen=True)
class TinyLMConfig:
    """Section `model.tiny`: sizes of a tiny language model, by default 1.77 million weights."""

    layers: Count = 4  # transformer layers
    hidden: Count = 192  # width of a hidden state
    heads: Count = 6  # query heads
    key_heads: Count = 2  # heads of keys and values, which share the query heads evenly
    head_dim: Count = 32  # width of a head
    intermediate: Count = 512  # width inside a feed-forward
    # most tokens of the vocabulary; the word table is also the head
    vocab: Annotated[int, least(258 + len(TAGS))] = 1024
    positions: Count = 1024  # longest row, in tokens
    # θ of the rotation; a large one lets far places be compared
    rope_theta: Annotated[float, least(1)] = 1e8
    # FILE.py:FUNCTION(params, config, seed) that changes the random weights; it has no sandbox
    weights: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.key_heads or self.head_dim % 2:
            raise InputError(
                f"config.model.tiny.heads is {self.heads}, key_heads {self.key_heads}, head_dim "
                f"{self.head_dim}; heads must be a multiple of key_heads, head_dim even."
            )
        if self.weights:
            own_code.check_form(self.weights, _WEIGHTS)


def write_tiny_lm(
    folder: Path, texts: Iterable[str], config: TinyLMConfig | None = None, *, seed: int
) -> None:
    """Writes a folder that `load_language_model` and Hugging Face's classes open.

    The same texts, sizes and seed give the same bytes. Few texts may give fewer tokens than
    `config.vocab`; the weights have as many as there are.
    """
    config, change = config or TinyLMConfig(), None
    if config.weights:  # before anything is written
        change = own_code.load(config.weights, _WEIGHTS, ("params", "config", "seed")).function
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = trained_tokenizer(texts, config.vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": config.positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_whole(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    write_whole(folder / GENERATION, json.dumps({"eos_token_id": end}, indent=2) + "\n")
    sizes = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.key_heads,
        intermediate_size=config.intermediate,
        head_dim=config.head_dim,
        max_position_embeddings=config.positions,
        rope_theta=config.rope_theta,
        tie_word_embeddings=True,
    )
    params = jax.tree.map(np.asarray, jax.jit(Qwen3(sizes).init_params)(jax.random.key(seed)))
    if change is not None:
        params = change(params=params, config=sizes, seed=seed)
    fields = dataclasses.asdict(sizes) | {"hidden_act": "silu", "eos_token_id": end}
    save_folder(table_of("qwen3"), params, fields, folder, folder)


def trained_tokenizer(texts: Iterable[str], vocab: int) -> tokenizers.Tokenizer:
    """A byte-level BPE. Ids: the bytes, then what is learnt, then the marks of turns and tags."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - 2 - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer
