"""Pooling, normalisation and scale as a model's folder states them, with the library as judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import read_published
from qrag_jax.models.pretrained import load_encoder, save_encoder
from tests.support.parity import vectors_of
from tests.support.small_models import write_small_model

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a b", "b", "a a b a"]
MODELS = "sentence_transformers.models"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_small_model("bert", tmp_path / "bert")


def write_modules(folder: Path, *modules: str, types: str = MODELS, **pooling: Any) -> None:
    """The library's files for these modules behind the transformer, by hand."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{types}.Transformer"}]
    for i, module in enumerate(modules, start=1):
        path = f"{i}_{module}"
        entries.append({"idx": i, "name": str(i), "path": path, "type": f"{types}.{module}"})
        (folder / path).mkdir()
        settings = pooling if module == "Pooling" else {}
        (folder / path / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(entries))


def how(folder: Path, **settings: Any) -> tuple[str, bool, float]:
    encoder = load_encoder(folder, **settings).encoder
    return encoder.pooling, encoder.normalise, encoder.scale


@pytest.mark.parametrize(
    ("mode", "normalised"), [("mean", False), ("mean", True), ("cls", True), ("lasttoken", False)]
)
def test_folders_that_the_library_saved(mode: str, normalised: bool, tmp_path: Path) -> None:
    family = "qwen3" if mode == "lasttoken" else "bert"
    plain = write_small_model(family, tmp_path / "plain")
    if family == "bert":  # lets the tokenizer itself write the special tokens of a row
        path = str(plain / "tokenizer.json")
        backend = Tokenizer.from_file(path)
        names = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        backend.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=names)
        backend.save(path)
    modules = sentence_transformers.sentence_transformer.modules
    transformer = modules.Transformer(str(plain))
    parts = [transformer, modules.Pooling(transformer.get_embedding_dimension(), mode)]
    parts += [modules.Normalize()] if normalised else []
    library = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    saved, kept = tmp_path / "saved", tmp_path / "kept"
    library.save(str(saved))
    found = vectors_of(load_encoder(saved, scale=1.0), TEXTS)
    np.testing.assert_allclose(found, library.encode(TEXTS), atol=1e-5)
    # Without a word about scale: as Q-RAG has it, or cosines.
    assert how(saved)[2] == (1.0 if normalised else 0.1)
    # The folder that a run keeps says the same.
    save_encoder(load_encoder(saved), saved, kept)
    assert read_published(kept) == read_published(saved)
    back = sentence_transformers.SentenceTransformer(str(kept), device="cpu")
    np.testing.assert_allclose(back.encode(TEXTS), found, atol=1e-5)


@pytest.mark.parametrize(  # files of older and newer releases
    "pooling",
    [
        {"word_embedding_dimension": 16, "pooling_mode_cls_token": True},
        {"embedding_dimension": 16, "pooling_mode": "cls", "include_prompt": True},
        {"embedding_dimension": 16, "pooling_mode": ["cls"]},
    ],
)
def test_every_layout_of_the_pooling_file(pooling: dict[str, Any], bert: Path) -> None:
    write_modules(bert, "Pooling", "Normalize", **pooling)
    assert how(bert) == ("cls", True, 1.0)
    # The config has the last word.
    assert how(bert, pooling="mean", scale=0.3) == ("mean", True, 0.3)
    assert how(bert, normalise=False) == ("cls", False, 0.1)


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (("Pooling",), {"pooling_mode_max_tokens": True}, "1_Pooling/config.json"),
        (("Pooling",), {"pooling_mode": ["mean", "cls"]}, "1_Pooling/config.json"),
        (("Pooling",), {"include_prompt": False}, "prompt"),
        (("Pooling", "LSTM"), {}, "LSTM"),
        (("Pooling", "Dense", "Normalize"), {}, "Dense"),
    ],
)
def test_what_is_not_computed_is_refused(
    modules: tuple[str, ...], pooling: dict[str, Any], named: str, bert: Path
) -> None:
    write_modules(bert, *modules, **pooling)
    with pytest.raises(InputError) as caught:
        load_encoder(bert)
    for name in (named, "config.encoder.pooling", "config.encoder.normalise"):
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert how(bert, pooling="mean", normalise=True) == ("mean", True, 1.0)  # as it advises
    (bert / "modules.json").write_text('["a"]')
    with pytest.raises(InputError, match=r"modules\.json"):
        load_encoder(bert)
