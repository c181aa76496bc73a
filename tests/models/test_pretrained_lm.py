"""Language models beside Hugging Face's: logits, gradients, folders, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from qrag_jax.errors import InputError
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import (
    load_language_model,
    save_language_model,
    table_of,
)
from tests.models.conftest import torch_bert, write_bpe_tokenizer, write_tokenizer

VOCAB, LENGTH = 264, 11
LENGTHS = np.array([11, 1, 6, 9], np.int32)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}),
    "llama": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "llama3-head": ("Llama", {"head_dim": 6, "rope_parameters": LLAMA3}),
}


def torch_model(name: str) -> Any:
    """A small random model of Hugging Face, with noise on every parameter."""
    kind, fields = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**(SIZES | fields))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the folder of a model as Hugging Face does."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch_model(name).save_pretrained(made[name])
            write_bpe_tokenizer(made[name])
        return made[name]

    return folder


def tokens_of(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, (len(LENGTHS), LENGTH)).astype(np.int32)


def inside() -> np.ndarray:
    return np.arange(LENGTH)[None] < LENGTHS[:, None]


def torch_logits(model: Any, tokens: np.ndarray) -> torch.Tensor:
    mask = torch.tensor(inside()).long()
    return model(torch.tensor(tokens).long(), attention_mask=mask).logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_hugging_face(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    loaded, tokens = load_language_model(folder_of(name)), tokens_of()
    model, params = torch_model(name), loaded.params
    expected = torch_logits(model, tokens)
    logits = loaded.model.logits(params, jnp.asarray(tokens), jnp.asarray(LENGTHS))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[inside()], expected.detach()[inside()], atol=1e-4)

    weights = np.random.default_rng(1).normal(size=expected.shape) * inside()[..., None] / 30

    def loss(params: Any) -> jax.Array:
        found = loaded.model.logits(params, jnp.asarray(tokens), jnp.asarray(LENGTHS))
        return (jax.nn.log_softmax(found) * weights).sum()

    (torch.log_softmax(expected, -1) * torch.tensor(weights)).sum().backward()
    gradient = jax.jit(jax.grad(loss))(params)
    ours = tensors_from_params(table_of(loaded.model_config["model_type"]), gradient)
    theirs = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for each, value in theirs.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(ours[each], value, atol=1e-4 * scale, err_msg=each)


@pytest.mark.parametrize("name", ["qwen3", "qwen2-untied", "llama3"])
def test_a_saved_folder_is_opened_by_hugging_face(
    name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    loaded, tokens = load_language_model(folder_of(name)), tokens_of()
    (folder_of(name) / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    changed = jax.tree.map(lambda leaf: leaf * 1.01, loaded.params)
    save_language_model(loaded, changed, folder_of(name), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = torch_logits(theirs.eval(), tokens).detach()
    logits = loaded.model.logits(changed, jnp.asarray(tokens), jnp.asarray(LENGTHS))
    np.testing.assert_allclose(logits[inside()], expected[inside()], atol=1e-4)
    again = load_language_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, changed)
    assert again.model.stop_ids == (5, 7)
    assert again.model.trunk.own_head == loaded.model.trunk.own_head
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_a_file_may_repeat_a_tied_table(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load_language_model(folder_of("llama"))
    save_language_model(loaded, loaded.stored, folder_of("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not load_language_model(tmp_path).model.trunk.own_head
    assert load_language_model(tmp_path).model.stop_ids == (5,)


def edited(source: Path, folder: Path, **fields: Any) -> Path:
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("qwen2", {"tie_word_embeddings": False}, "the weights have no language-model head"),
        ("llama", {"mlp_bias": True}, "mlp_bias is set"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "of type 'yarn' is not supported"),
        (
            "llama3",
            {"rope_parameters": LLAMA3 | {"factor": "eight"}},
            "of type 'llama3' needs numbers above 0 for factor",
        ),
        ("qwen2", {"use_sliding_window": True}, "windowed attention"),
        ("qwen3", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("qwen3", {"vocab_size": 100}, "has shape"),
    ],
)
def test_what_is_refused(
    name: str,
    fields: dict[str, Any],
    told: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = edited(folder_of(name), tmp_path, **fields)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(InputError) as caught:
        load_language_model(folder)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_encoder_has_no_head(tmp_path: Path) -> None:
    torch_bert().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(InputError, match="type 'bert' has no language-model head"):
        load_language_model(tmp_path)
