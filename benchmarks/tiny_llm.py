"""Makes a random Qwen3 model of some hundred kilobytes, as a folder that vLLM can serve.

Its answers are gibberish.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<pad>", "<eos>", "<|user|>", "<|system|>", "<|assistant|>")
TEXT = ("Which city is the capital of France?", "Ada Berg is an engineer, born in Oslo.")


def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    fast.chat_template = TEMPLATE
    return fast


def model(seed: int) -> Qwen3ForCausalLM:
    """A model with random weights from `seed`; word vectors and head share one array."""
    config = Qwen3Config(
        vocab_size=len(tokenizer()),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    made = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():  # large, so that no two tokens nearly tie
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def save(made: Qwen3ForCausalLM, folder: Path) -> Path:
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
