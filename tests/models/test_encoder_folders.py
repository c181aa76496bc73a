"""Folders as they are published: tokenizer, pooling and weights give transformers' vectors.

The tokenizers are of the kinds that the models have, with the special tokens under their ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_tensors
from transformers import AutoModel, AutoTokenizer, BertTokenizer, MPNetTokenizer

from qrag_jax.models.files.sentence_transformers import write_modules
from qrag_jax.models.pretrained import load_encoder, save_encoder
from tests.support.small_models import (
    torch_modernbert,
    torch_mpnet,
    torch_nomic_bert,
    torch_xlm_roberta,
    write_modernbert_tokenizer,
    write_unigram_tokenizer,
)
from tests.support.torch_encoder import model_options

TEXTS = ["the moth", "a moth is a thing of the night", "x", ""]
PIECES = ["the", "a", "moth", "is", "##th", "mo", "of", "thing", "night", "x"]


def write_mpnet_tokenizer(folder: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"]
    vocab = {piece: number for number, piece in enumerate([*special, *PIECES])}
    MPNetTokenizer(vocab=vocab).save_pretrained(folder)


def write_bert_tokenizer(folder: Path) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {piece: number for number, piece in enumerate([*special, *PIECES])}
    BertTokenizer(vocab=vocab).save_pretrained(folder)


# Model, tokenizer, pooling and normalisation of the published folder, first, last and padding id.
CASES: dict[str, tuple[Callable[..., Any], Callable[[Path], Any], str, bool, tuple]] = {
    "gte-modernbert-base": (
        *(torch_modernbert, write_modernbert_tokenizer, "cls", False),
        (258, 259, 260),
    ),
    "all-mpnet-base-v2": (torch_mpnet, write_mpnet_tokenizer, "mean", True, (0, 2, 1)),
    "nomic-embed-text-v1.5": (torch_nomic_bert, write_bert_tokenizer, "mean", False, (2, 3, 0)),
    "bge-m3": (
        *(partial(torch_xlm_roberta, max_position_embeddings=66), write_unigram_tokenizer),
        *("cls", True, (0, 2, 1)),
    ),
}


def write_published(name: str, folder: Path) -> str:
    """Writes the folder; returns the model_type. bge-m3 has its weights in pytorch_model.bin."""
    make, write, pooling, normalise, _ = CASES[name]
    model = make()
    model.save_pretrained(folder)
    write(folder)
    write_modules(
        folder,
        pooling=pooling,
        normalise=normalise,
        scale=1.0,
        width=16,
        max_tokens=60,
        pooler=False,
    )
    if name == "bge-m3":
        tensors = torch_tensors(folder / "model.safetensors")
        tensors["pooler.dense.weight"] = torch.ones(16, 16)
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        for head in ("colbert_linear.pt", "sparse_linear.pt"):  # beside the dense vectors
            torch.save({"weight": torch.ones(16, 1)}, folder / head)
    return str(model.config.model_type)


def their_vectors(folder: Path, model_type: str, pooling: str, normalise: bool) -> np.ndarray:
    batch = AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder, **model_options(model_type)).eval()
    names = ("input_ids", "attention_mask")
    with torch.no_grad():
        hidden = model(**{name: batch[name] for name in names}).last_hidden_state
    inside = batch["attention_mask"][..., None].float()
    mean = (hidden * inside).sum(1) / inside.sum(1)
    found = hidden[:, 0] if pooling == "cls" else mean
    return (torch.nn.functional.normalize(found, dim=-1) if normalise else found).numpy()


def our_vectors(folder: Path) -> np.ndarray:
    loaded = load_encoder(folder, scale=1.0)
    encoder = loaded.encoder
    rows = [
        [*encoder.state_opening, *ids, encoder.sep_id] for ids in loaded.tokenizer.encode(TEXTS)
    ]
    lengths = np.array([len(row) for row in rows], np.int32)
    longest = max(lengths)
    tokens = [row + [encoder.pad_id] * (longest - len(row)) for row in rows]
    return np.asarray(encoder.embed(loaded.params, np.array(tokens, np.int32), lengths))


@pytest.mark.parametrize("name", CASES)
def test_a_published_folder_gives_the_vectors_of_transformers(name: str, tmp_path: Path) -> None:
    _, _, pooling, normalise, ids = CASES[name]
    folder, out = tmp_path / "model", tmp_path / "out"
    how = write_published(name, folder), pooling, normalise
    loaded = load_encoder(folder)
    encoder = loaded.encoder
    assert (encoder.pooling, encoder.normalise) == (pooling, normalise)
    assert (encoder.opening_id, encoder.sep_id, encoder.pad_id) == ids
    expected = their_vectors(folder, *how)
    np.testing.assert_allclose(our_vectors(folder), expected, atol=1e-5)
    save_encoder(loaded, folder, out)
    np.testing.assert_allclose(their_vectors(out, *how), expected, atol=1e-6)
    if name != "bge-m3":
        one, two = (load_file(path / "model.safetensors") for path in (folder, out))
        assert one.keys() == two.keys()
        for tensor in one:
            np.testing.assert_array_equal(two[tensor], one[tensor], err_msg=tensor)
