"""A tiny random Qwen3 that vLLM can serve, adapters, and its answers by Hugging Face's code."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
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


RANK, ALPHA = 4, 8.0
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def adapter(seed: int) -> dict[str, np.ndarray]:
    """Random low-rank pairs by module name: A `(r, in)` as `.lora_A`, B `(out, r)` as `.lora_B`."""
    rng = np.random.default_rng(seed)
    modules = dict(model(0).named_modules())
    pairs = {}
    for name, module in modules.items():
        if name.endswith(ADAPTED):
            rows, columns = module.weight.shape
            pairs[f"{name}.lora_A"] = rng.normal(0, 0.5, (RANK, columns)).astype(np.float32)
            pairs[f"{name}.lora_B"] = rng.normal(0, 0.5, (rows, RANK)).astype(np.float32)
    return pairs


def save_adapter(pairs: Mapping[str, np.ndarray], folder: Path) -> Path:
    """Writes an adapter in PEFT's format; returns the folder."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": array for name, array in pairs.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"},
        **{"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0},
        "target_modules": sorted({name.rpartition(".")[2] for name in ADAPTED}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(made: Qwen3ForCausalLM, pairs: Mapping[str, np.ndarray]) -> Qwen3ForCausalLM:
    """The model with W + (alpha / r)·B·A in the place of each adapted W."""
    result = copy.deepcopy(made)
    modules = dict(result.named_modules())
    with torch.no_grad():
        for name in {name.rpartition(".")[0] for name in pairs}:
            a, b = (torch.from_numpy(pairs[f"{name}.lora_{x}"]) for x in "AB")
            modules[name].weight += ALPHA / RANK * (b @ a)
    return result


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
