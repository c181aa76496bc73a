"""Folders of language models: tied heads, and what is refused.

Their parity with Hugging Face's: `tests.conformance.test_decoders`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_language_model, save_language_model
from tests.support.small_models import LLAMA3, torch_decoder, write_bpe_tokenizer, write_small_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("qwen3", "qwen2", "llama", "llama3"):
        found[name] = tmp_path_factory.mktemp(name)
        torch_decoder(name).save_pretrained(found[name])
        write_bpe_tokenizer(found[name])
    return found


def test_a_file_may_repeat_a_tied_table(folders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_language_model(folders["llama"])
    save_language_model(loaded, loaded.stored, folders["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not load_language_model(tmp_path).model.trunk.own_head
    assert load_language_model(tmp_path).model.stop_ids == (5,)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        ("llama3", {"rope_parameters": LLAMA3 | {"factor": "eight"}}, "factor"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("qwen3", {"vocab_size": 100}, "embed_tokens.weight"),
    ],
)
def test_what_is_refused(
    name: str, fields: dict[str, Any], named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders[name], tmp_path / "model"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as caught:
        load_language_model(folder)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_encoder_has_no_head(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'bert'"):
        load_language_model(write_small_model("bert", tmp_path))
