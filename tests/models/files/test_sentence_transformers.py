"""Pooling, normalisation and scale as a model's folder states them, with the library as judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import prompts, read_published
from qrag_jax.models.pretrained import load_encoder, save_encoder
from tests.models.conftest import (
    torch_bert,
    torch_qwen3,
    write_bpe_tokenizer,
    write_tokenizer,
)

sentence_transformers = pytest.importorskip("sentence_transformers")

TEXTS = ["a b", "b", "a a b a"]
MODELS = "sentence_transformers.models"
LAYOUTS = {  # of one pooling in the files of older and newer releases
    "flags": {"word_embedding_dimension": 16, "pooling_mode_cls_token": True},
    "name": {"embedding_dimension": 16, "pooling_mode": "cls", "include_prompt": True},
    "list": {"embedding_dimension": 16, "pooling_mode": ["cls"]},
}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    folder = tmp_path / "bert"
    torch_bert().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


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


def our_vectors(folder: Path, **settings: Any) -> np.ndarray:
    loaded = load_encoder(folder, **settings)
    encoder = loaded.encoder
    rows = [
        [*encoder.chunk_opening, *ids, encoder.sep_id] for ids in loaded.tokenizer.encode(TEXTS)
    ]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths)), encoder.pad_id, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return np.asarray(encoder.embed(loaded.params, tokens, lengths))


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_folders_that_the_library_saved(mode: str, normalised: bool, tmp_path: Path) -> None:
    qwen3 = mode == "lasttoken"
    plain = tmp_path / "plain"
    (torch_qwen3(vocab_size=264).model if qwen3 else torch_bert()).save_pretrained(plain)
    if qwen3:
        write_bpe_tokenizer(plain)
    else:
        write_tokenizer(plain)
        end_rows(plain)
    modules = sentence_transformers.sentence_transformer.modules
    transformer = modules.Transformer(str(plain))
    parts = [transformer, modules.Pooling(transformer.get_embedding_dimension(), mode)]
    parts += [modules.Normalize()] if normalised else []
    library = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    library.save(str(tmp_path / "saved"))
    expected = library.encode(TEXTS)
    found = our_vectors(tmp_path / "saved", scale=1.0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # Without a word about scale: as Q-RAG has it, or cosines.
    scale = load_encoder(tmp_path / "saved").encoder.scale
    assert scale == (1.0 if normalised else 0.1)
    # The folder that a run keeps says the same.
    save_encoder(load_encoder(tmp_path / "saved"), tmp_path / "saved", tmp_path / "kept")
    assert read_published(tmp_path / "kept") == read_published(tmp_path / "saved")
    np.testing.assert_array_equal(our_vectors(tmp_path / "kept", scale=1.0), found)


def end_rows(folder: Path) -> None:
    """Lets the tokenizer itself write the special tokens of a row."""
    path = str(folder / "tokenizer.json")
    backend = Tokenizer.from_file(path)
    names = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=names)
    backend.save(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_pooling_file(layout: str, bert: Path) -> None:
    write_modules(bert, "Pooling", "Normalize", **LAYOUTS[layout])
    encoder = load_encoder(bert).encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("cls", True, 1.0)
    # The config has the last word.
    encoder = load_encoder(bert, pooling="mean", scale=0.3).encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", True, 0.3)
    encoder = load_encoder(bert, normalise=False).encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("cls", False, 0.1)


def test_folder_that_says_nothing_or_little(bert: Path) -> None:
    assert read_published(bert) is None
    encoder = load_encoder(bert).encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", False, 0.1)
    write_modules(bert, "Normalize", types="sentence_transformers.base.modules.x")
    encoder = load_encoder(bert).encoder
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", True, 1.0)


@pytest.mark.parametrize(
    ("modules", "pooling", "told"),
    [
        (("Pooling",), {"pooling_mode_max_tokens": True}, "1_Pooling/config.json: the pooling max"),
        (
            ("Pooling",),
            {"pooling_mode": ["mean", "cls"]},
            "1_Pooling/config.json: the pooling mean + cls",
        ),
        (("Pooling",), {"include_prompt": False}, "leaves the prompt out"),
        (("Pooling", "LSTM"), {}, "modules.json: the module LSTM"),
        (("Pooling", "Dense", "Normalize"), {}, "the module Dense before the last"),
        (("Pooling", "Dense"), {}, "a Dense layer that does more than multiply by a number"),
    ],
)
def test_what_is_not_computed_is_refused(
    modules: tuple[str, ...], pooling: dict[str, Any], told: str, bert: Path
) -> None:
    write_modules(bert, *modules, **pooling)
    if "Dense" in modules:
        weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
        save_file({"linear.weight": weight}, bert / "2_Dense" / "model.safetensors")
    with pytest.raises(InputError) as caught:
        load_encoder(bert)
    text = str(caught.value)
    assert told in text
    assert "is not computed here" in text
    assert "set both config.encoder.pooling and config.encoder.normalise" in text
    assert "\n" not in text
    encoder = load_encoder(bert, pooling="mean", normalise=True).encoder  # as the sentence says
    assert (encoder.pooling, encoder.normalise, encoder.scale) == ("mean", True, 1.0)


def test_broken_modules_file(bert: Path) -> None:
    (bert / "modules.json").write_text('["a"]')
    with pytest.raises(InputError, match=r"modules\.json: not a list of objects with type"):
        load_encoder(bert)


def test_prompts(bert: Path) -> None:
    assert prompts(bert) == {}
    path = bert / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": {"query": "Q: ", "document": ""}}))
    assert prompts(bert) == {"query": "Q: "}
    path.write_text(json.dumps({"prompts": None}))
    assert prompts(bert) == {}
