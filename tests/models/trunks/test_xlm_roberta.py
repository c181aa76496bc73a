"""Folders of XLM-R and RoBERTa, in and out (their parity is in test_parity)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, XLMRobertaModel

from qrag_jax.errors import InputError
from qrag_jax.models.files.weight_names import params_from_tensors, tensors_from_params
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.bert import Bert
from qrag_jax.models.trunks.xlm_roberta import ROBERTA_TABLE, XlmRobertaConfig
from tests.models.conftest import numpy_tensors, torch_xlm_roberta, write_unigram_tokenizer

PAD = 1
TEXTS = ["the moth", "query: what is a moth?", "x"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch_xlm_roberta().save_pretrained(tmp_path / "model")
    write_unigram_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def their_vectors(folder: Path, texts: list[str]) -> np.ndarray:
    """Hugging Face's tokenizer, model and mean, of a folder."""
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        hidden = model(**{k: torch.from_numpy(v) for k, v in batch.items()}).last_hidden_state
    inside = torch.from_numpy(batch["attention_mask"])[..., None].float()
    return ((hidden * inside).sum(1) / inside.sum(1)).numpy()


def our_vectors(folder: Path, texts: list[str], **settings: Any) -> np.ndarray:
    loaded = load_encoder(folder, scale=1.0, **settings)
    encoder = loaded.encoder
    texts_ids = loaded.tokenizer.encode(texts)
    made = [[*encoder.state_opening, *ids, encoder.sep_id] for ids in texts_ids]
    lengths = np.array([len(row) for row in made], np.int32)
    tokens = np.array([row + [encoder.pad_id] * (22 - len(row)) for row in made], np.int32)
    return np.asarray(encoder.embed(loaded.params, tokens, lengths))


def test_a_folder_gives_hugging_faces_vectors(folder: Path) -> None:
    encoder = load_encoder(folder, chunk_prefix="passage: ").encoder
    assert (encoder.opening_id, encoder.sep_id, encoder.pad_id) == (0, 2, PAD)
    assert len(encoder.chunk_opening) == 3  # <s> ▁passage :
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", False, 0.1)
    np.testing.assert_allclose(our_vectors(folder, TEXTS), their_vectors(folder, TEXTS), atol=1e-5)
    asked = [f"query: {text}" for text in ("the moth", "x")]
    found = our_vectors(folder, ["the moth", "x"], state_prefix="query: ")
    np.testing.assert_allclose(found, their_vectors(folder, asked), atol=1e-5)


def test_a_saved_folder_is_read_by_transformers(folder: Path, tmp_path: Path) -> None:
    for name in ("sentencepiece.bpe.model", "chat_template.jinja"):  # kept whatever is in them
        (folder / name).write_bytes(b"as it was")
    save_encoder(load_encoder(folder), folder, tmp_path / "out")
    for name in ("sentencepiece.bpe.model", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == b"as it was"
        (folder / name).unlink()
    back = AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False)
    assert isinstance(back, XLMRobertaModel)
    for name, tensor in torch_xlm_roberta().state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    found = their_vectors(tmp_path / "out", TEXTS)
    np.testing.assert_allclose(our_vectors(tmp_path / "out", TEXTS), found, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "roberta.", "0.auto_model."])
def test_names_round_trip_bit_for_bit(prefix: str) -> None:
    model = torch_xlm_roberta(roberta=True)
    config = XlmRobertaConfig.from_dict(model.config.to_dict(), "test")
    tensors = numpy_tensors(model)
    given = {prefix + name: tensor for name, tensor in tensors.items()}
    given[prefix + "pooler.dense.weight"] = np.ones((16, 16), np.float32)
    given["lm_head.bias"] = np.ones(60, np.float32)
    params = params_from_tensors(ROBERTA_TABLE, Bert(config), given, "test")
    back = tensors_from_params(ROBERTA_TABLE, params)
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor, err_msg=name)


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]},
            "the architecture 'deberta-v2' (DebertaV2Model) is not supported; use a folder whose "
            "model_type is one of bert, qwen3, new, xlm-roberta, roberta, modernbert, mpnet, "
            "nomic_bert.",
        ),
        ({"pad_token_id": 23}, "pad_token_id 23, but max_position_embeddings is 24"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"max_position_embeddings": 20}, "has shape (24, 16), expected (20, 16)"),
    ],
)
def test_models_that_are_not_computed(folder: Path, fields: dict[str, Any], told: str) -> None:
    edit_json(folder / "config.json", **fields)
    with pytest.raises(InputError) as caught:
        load_encoder(folder)
    assert str(folder) in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_of_another_architecture() -> None:
    config = torch_xlm_roberta().config.to_dict() | {"model_type": "bert"}
    with pytest.raises(InputError, match="'bert' is not computed here, only xlm-roberta or robert"):
        XlmRobertaConfig.from_dict(config, "test")
