"""A random language model that calls tools: some of its tokens are whole calls.

Such tokens, and the one that ends a turn, are likelier than others. So its episodes have searches,
malformed calls, answers and turns that are cut off, and their rewards differ, without any training.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import load_file, save_file

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.play import COMPLETE, RETRIEVE
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.models.files.tiny_lm import END, TinyLMConfig, write_tiny_lm

# vLLM's attention on CPU wants heads of 32 numbers.
SIZES = TinyLMConfig(
    copies=False,
    layers=1,
    hidden=64,
    heads=2,
    key_heads=1,
    head_dim=32,
    intermediate=64,
    vocab=400,
    positions=700,
)
_QUESTIONS = 6  # whose names are searched for
_LIKELY = 0.4  # standard deviation of the head's rows of calls; others have 0.05
_TENSORS, _CONFIG, _TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"


def write_calling_model(folder: Path, seed: int = 0) -> Path:
    """Writes the folder of such a model; returns it."""
    questions = [bridge_question(0, "train", index) for index in range(_QUESTIONS)]
    texts = [f"{q.question} {p.text}" for q in questions for p in q.passages]
    write_tiny_lm(folder, texts, SIZES, seed=seed)
    calls = [_call(RETRIEVE, query=question.passages[0].text[:30]) for question in questions]
    calls += [_call(COMPLETE, final_answer="Oslo"), _call(COMPLETE, reasoning="So it is.")]
    calls += [_call(COMPLETE, final_answer="x", cited_doc_ids=[str(n)]) for n in range(1, 5)]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER))
    tokenizer.add_tokens([tokenizers.AddedToken(call, normalized=False) for call in calls])
    tokenizer.save(str(folder / _TOKENIZER))
    draw, words = np.random.default_rng(seed), tokenizer.get_vocab_size()
    tensors = load_file(folder / _TENSORS)
    width = SIZES.hidden
    tensors["model.embed_tokens.weight"] = draw.normal(0, 0.5, (words, width)).astype(np.float32)
    head = draw.normal(0, 0.05, (words, width))
    likely = [tokenizer.token_to_id(each) for each in (END, *calls)]
    head[likely] = draw.normal(0, _LIKELY, (len(likely), width))
    tensors["lm_head.weight"] = head.astype(np.float32)
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    config = json.loads((folder / _CONFIG).read_text())
    config |= {"vocab_size": words, "tie_word_embeddings": False}
    (folder / _CONFIG).write_text(json.dumps(config))
    return folder


def _call(name: str, **arguments: object) -> str:
    return write_call(ToolCall(name, arguments), HERMES)
