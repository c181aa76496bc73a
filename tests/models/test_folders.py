"""Models' folders, in and out: names and dtypes of weights, tokenizers, what does not fit.

That every family's folder goes in and out unchanged: `tests.conformance`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_tensors
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from qrag_jax.errors import InputError
from qrag_jax.models.files.sentence_transformers import read_published, write_modules
from qrag_jax.models.first_encoder import (
    EncoderConfig,
    ScratchConfig,
    load_encoder,
    make_scratch_folder,
    save_encoder,
)
from qrag_jax.models.first_language_model import load_language_model, save_language_model
from qrag_jax.runtime.pretrained_files import find_minilm
from tests.machine import real
from tests.models.test_configs import NOMIC
from tests.reference import embed
from tests.support.parity import hugging_face, vectors_of
from tests.support.small_models import (
    LLAMA3,
    small_model,
    torch_decoder,
    write_bpe_tokenizer,
    write_small_model,
    write_unigram_tokenizer,
)

PLAIN = EncoderConfig(dtype="float32", scale=1.0)
TEXTS = ["the moth", "a moth is a thing of the night", "x", ""]


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def check_refused(load: Callable[[], Any], *named: str) -> None:
    with pytest.raises(InputError) as caught:
        load()
    assert all(words in str(caught.value) for words in named)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- folders as published


# Family, tokenizer, pooling and normalisation of the published folder, first, last and padding id.
# Only the first folder has files of sentence-transformers.
PUBLISHED: dict[str, tuple[str, Callable[[Path], Any], str, bool, tuple]] = {
    "bge-m3": ("xlm-roberta", write_unigram_tokenizer, "cls", True, (0, 2, 1)),
    "gte-multilingual, bare": ("new", write_unigram_tokenizer, "mean", False, (0, 2, 1)),
    # Its rows end with the text's end, not the chat turn's.
    "qwen3-embedding, bare": ("qwen3", write_bpe_tokenizer, "last", True, (None, 258, 258)),
}


def write_published(name: str, folder: Path) -> None:
    """bge-m3 has its weights in pytorch_model.bin."""
    family, write, pooling, normalise, _ = PUBLISHED[name]
    small_model(family, max_position_embeddings=66).save_pretrained(folder)
    write(folder)
    if "bare" not in name:
        encoder: Any = SimpleNamespace(pooling=pooling, normalise=normalise, width=16)
        write_modules(folder, encoder, scale=1.0, max_tokens=60, pooler=False)
    if name == "bge-m3":
        tensors = torch_tensors(folder / "model.safetensors")
        tensors["pooler.dense.weight"] = torch.ones(16, 16)
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        for head in ("colbert_linear.pt", "sparse_linear.pt"):  # next to the dense vectors
            torch.save({"weight": torch.ones(16, 1)}, folder / head)
    if "gte-multi" in name:  # the weights of a model with a head, whose trunk is called "new"
        tensors = {f"new.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
        tensors["classifier.weight"] = np.ones((1, 16), np.float32)
        save_file(tensors, folder / "model.safetensors")


def their_vectors(folder: Path, pooling: str, normalise: bool, texts: list[str]) -> np.ndarray:
    """By Hugging Face's tokenizer and model, each text alone."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), hugging_face(folder)
    vectors = []
    for text in texts:
        batch = tokenizer(text, return_tensors="pt")
        given = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            hidden = model(**given).last_hidden_state[0]
        vector = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]
        vectors.append(torch.nn.functional.normalize(vector, dim=-1) if normalise else vector)
    return torch.stack(vectors).numpy()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_folder_gives_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    _, _, pooling, normalise, ids = PUBLISHED[name]
    folder, out, texts = tmp_path / "model", tmp_path / "out", TEXTS[: 3 if "qwen" in name else 4]
    write_published(name, folder)
    loaded = load_encoder(folder, PLAIN)
    encoder = loaded.encoder
    assert (encoder.pooling, encoder.normalise) == (pooling, normalise)
    opening = encoder.state_opening[0] if encoder.state_opening else None
    assert (opening, encoder.sep_id, encoder.pad_id) == ids
    assert load_encoder(folder).encoder.scale == (1.0 if normalise else 0.1)
    found = vectors_of(loaded, texts)
    if "gte-multilingual" not in name:  # transformers reads no other name of its trunk
        expected = their_vectors(folder, pooling, normalise, texts)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    save_encoder(loaded, folder, out)
    np.testing.assert_allclose(their_vectors(out, pooling, normalise, texts), found, atol=1e-5)
    if "bare" in name:
        prefix = "Instruct: find it\nQuery: " if "qwen" in name else "query: "
        how = dataclasses.replace(PLAIN, state_prefix=prefix.rstrip(), chunk_prefix="the")
        asked = load_encoder(folder, how)
        assert len(asked.encoder.chunk_opening) == 1 + len(encoder.chunk_opening)
        rows = [f"{prefix}the moth", f"{prefix}x"]
        expected = their_vectors(out, pooling, normalise, rows)
        np.testing.assert_allclose(vectors_of(asked, [" the moth", " x"]), expected, atol=1e-5)


def test_the_published_spelling_of_nomic_is_written_so_that_transformers_reads_it(
    tmp_path: Path,
) -> None:
    """transformers' own class reads no field of the published spelling, only the weights."""
    folder = write_small_model("nomic_bert", tmp_path / "model")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 64}
    published = NOMIC | sizes | {"vocab_size": 60, "rotary_emb_base": 500}
    (folder / "config.json").write_text(json.dumps(published))
    loaded = load_encoder(folder)
    save_encoder(loaded, folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert published.items() <= written.items()  # for the published code
    expected = their_vectors(tmp_path / "out", "mean", False, TEXTS)
    np.testing.assert_allclose(10 * vectors_of(loaded, TEXTS), expected, atol=1e-5)


def test_genuine_minilm_gives_the_recorded_embeddings() -> None:
    minilm_folder = find_minilm()  # a download may work: this environment came from an index
    if minilm_folder is None:
        pytest.skip("all-MiniLM-L6-v2 is neither on this machine nor to be downloaded")
    reference = np.load(real("minilm_ref.npz"))
    loaded, mask = (
        load_encoder(minilm_folder, EncoderConfig(dtype="float32", normalise=True)),
        reference["attention_mask"],
    )
    tokens = jnp.asarray(reference["input_ids"], jnp.int32)
    found = embed(loaded.encoder, loaded.params, tokens, jnp.asarray(mask.sum(1), jnp.int32))
    np.testing.assert_allclose(found, reference["normed"], atol=1e-5, rtol=0)


def test_older_names_and_tensors_of_heads_are_read_over(tmp_path: Path) -> None:
    path = write_small_model("bert", tmp_path) / "model.safetensors"
    expected = jax.tree.map(np.asarray, load_encoder(tmp_path).params)
    tensors = {"cls.predictions.bias": np.ones(60, np.float32)}
    for name, tensor in load_file(path).items():
        older = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
        tensors[f"bert.{older}"] = tensor
    save_file(tensors | {"bert.embeddings.position_ids": np.arange(24)[None]}, path)
    jax.tree.map(np.testing.assert_array_equal, load_encoder(tmp_path).params, expected)


# ---------------------------------------------------------------------- pooling of the library

LETTERS, LIBRARY = ["a b", "b", "a a b a"], "sentence_transformers.models"


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_small_model("bert", tmp_path / "bert")


def write_pooling(folder: Path, *modules: str, types: str = LIBRARY, **pooling: Any) -> None:
    """The files of sentence-transformers for these modules behind the transformer, by hand."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{types}.Transformer"}]
    for i, module in enumerate(modules, start=1):
        path = f"{i}_{module}"
        entries.append({"idx": i, "name": str(i), "path": path, "type": f"{types}.{module}"})
        (folder / path).mkdir()
        settings = pooling if module == "Pooling" else {}
        (folder / path / "config.json").write_text(json.dumps(settings))
    (folder / "modules.json").write_text(json.dumps(entries))


def how(folder: Path, **settings: Any) -> tuple[str, bool, float]:
    encoder = load_encoder(folder, EncoderConfig(dtype="float32", **settings)).encoder
    return encoder.pooling, encoder.normalise, encoder.scale


@pytest.mark.parametrize(
    ("mode", "normalised"), [("mean", False), ("mean", True), ("cls", True), ("lasttoken", False)]
)
def test_folders_of_sentence_transformers(mode: str, normalised: bool, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
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
    found = vectors_of(load_encoder(saved, PLAIN), LETTERS)
    np.testing.assert_allclose(found, library.encode(LETTERS), atol=1e-5)
    # Without a word about scale: as Q-RAG has it, or cosines.
    assert how(saved)[2] == (1.0 if normalised else 0.1)
    # The folder that a run keeps says the same.
    save_encoder(load_encoder(saved), saved, kept)
    assert read_published(kept) == read_published(saved)
    back = sentence_transformers.SentenceTransformer(str(kept), device="cpu")
    np.testing.assert_allclose(back.encode(LETTERS), found, atol=1e-5)


@pytest.mark.parametrize(  # files of older and newer releases
    "pooling",
    [
        {"word_embedding_dimension": 16, "pooling_mode_cls_token": True},
        {"embedding_dimension": 16, "pooling_mode": ["cls"], "include_prompt": True},
    ],
)
def test_every_layout_of_the_pooling_file(pooling: dict[str, Any], bert: Path) -> None:
    write_pooling(bert, "Pooling", "Normalize", **pooling)
    assert how(bert) == ("cls", True, 1.0)
    # The config has the last word.
    assert how(bert, pooling="mean", scale=0.3) == ("mean", True, 0.3)
    assert how(bert, normalise=False) == ("cls", False, 0.1)


@pytest.mark.parametrize(
    ("modules", "pooling", "named"),
    [
        (("Pooling",), {"pooling_mode_max_tokens": True}, "1_Pooling/config.json"),
        (("Pooling",), {"include_prompt": False}, "prompt"),
        (("Pooling", "Dense", "Normalize"), {}, "Dense"),
    ],
)
def test_what_is_not_computed_is_refused(
    modules: tuple[str, ...], pooling: dict[str, Any], named: str, bert: Path
) -> None:
    write_pooling(bert, *modules, **pooling)
    with pytest.raises(InputError) as caught:
        load_encoder(bert)
    for name in (named, "config.encoder.pooling", "config.encoder.normalise"):
        assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert how(bert, pooling="mean", normalise=True) == ("mean", True, 1.0)  # as it advises
    (bert / "modules.json").write_text('["a"]')
    with pytest.raises(InputError, match=r"modules\.json"):
        load_encoder(bert)


# ---------------------------------------------------------------------- folders that do not fit


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = ScratchConfig(layers=2, hidden=8, heads=2, vocab=60, positions=24)
    make_scratch_folder(folder, ["the quick brown fox jumps over the lazy dog"] * 3, sizes, seed=0)
    return folder


def with_more_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab |= {f"new{i}": len(vocab) + i for i in range(5)}
    path.write_text(json.dumps(data))


def without_a_layer(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if "layer.1." not in n}, path)


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **fields)


# What is done to a folder, and what the message names; tests/test_mutated_inputs.py damages files.
UNFIT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "more tokens": (with_more_tokens, "vocab_size in config.json"),
    "weights": (without_a_layer, "layer.1."),
    "positions": (config(max_position_embeddings=20), "position_embeddings.weight"),
    "architecture": (config(model_type="mamba"), "'mamba'"),
    "scale": (config(qrag_jax_vector_scale=-1), "qrag_jax_vector_scale"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_does_not_fit_is_refused(what: str, original: Path, tmp_path: Path) -> None:
    change, named = UNFIT[what]
    folder = Path(shutil.copytree(original, tmp_path / "model"))
    change(folder)
    check_refused(partial(load_encoder, folder), str(folder), named)


# ---------------------------------------------------------------------- language models


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("qwen3", "llama", "llama3"):
        found[name] = tmp_path_factory.mktemp(name)
        torch_decoder(name).save_pretrained(found[name])
        write_bpe_tokenizer(found[name])
    return found


def test_a_file_may_repeat_a_tied_table(decoders: dict[str, Path], tmp_path: Path) -> None:
    loaded = load_language_model(decoders["llama"])
    save_language_model(loaded, loaded.stored, decoders["llama"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not load_language_model(tmp_path).model.trunk.own_head
    assert load_language_model(tmp_path).model.stop_ids == (5,)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama3", {"rope_parameters": LLAMA3 | {"factor": "eight"}}, "factor"),
        ("qwen3", {"vocab_size": 100}, "embed_tokens.weight"),
    ],
)
def test_language_models_that_are_refused(
    name: str, fields: dict[str, Any], named: str, decoders: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(decoders[name], tmp_path / "model"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    edit_json(folder / "config.json", **fields)
    check_refused(partial(load_language_model, folder), named)


def test_an_encoder_has_no_head(tmp_path: Path) -> None:
    check_refused(partial(load_language_model, write_small_model("bert", tmp_path)), "'bert'")
