"""A tiny random Qwen3 that vLLM can serve, adapters, and its answers by Hugging Face's code."""

from __future__ import annotations

from pathlib import Path

import peft
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.support.small_models import torch_decoder

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
    special = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    fast.chat_template = TEMPLATE
    return fast


def model(seed: int) -> Qwen3ForCausalLM:
    """A model with random weights from `seed`, so large that no two tokens nearly tie."""
    sizes = {"vocab_size": len(tokenizer()), "hidden_size": 64, "intermediate_size": 128}
    sizes |= {"head_dim": 32, "max_position_embeddings": 2048}  # vLLM on CPU wants heads of 32
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    return torch_decoder("qwen3", seed=seed, noise=0.3, **sizes, **ends)


def save(made: Qwen3ForCausalLM, folder: Path) -> Path:
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def adapted(seed: int, folder: Path) -> tuple[Path, Qwen3ForCausalLM]:
    """Writes a random adapter by PEFT; returns its folder, and model 0 merged with it."""
    base = model(0)  # which is drawn by a seed of its own
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    found = peft.get_peft_model(base, config)
    found.save_pretrained(folder)
    return folder, found.merge_and_unload()


def greedy(made: Qwen3ForCausalLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The likeliest next tokens, up to `count` or the end of text, and their log-probabilities."""
    ids, log_probs = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            scores = torch.log_softmax(made(torch.tensor([ids])).logits[0, -1].float(), -1)
        ids.append(int(scores.argmax()))
        log_probs.append(float(scores.max()))
        if ids[-1] == 1:
            break
    return ids[len(prompt) :], log_probs
