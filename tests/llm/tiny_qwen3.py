"""The tiny Qwen3 of the benchmarks, adapters for it, and its answers in Hugging Face's code."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen3ForCausalLM

from benchmarks.tiny_llm import model, save, tokenizer

__all__ = ["model", "save", "tokenizer"]

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
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
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


def numpy_tensors(made: Qwen3ForCausalLM) -> dict[str, np.ndarray]:
    """All weights by their names in the files of the model's folder."""
    return {
        name: tensor.detach().numpy().copy()
        for name, tensor in made.state_dict().items()
        if name != "lm_head.weight"
    }
