"""Fixtures of the encoder tests: the genuine MiniLM, the data folder, small random models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.models.pretrained import LoadedEncoder, load_encoder
from qrag_jax.runtime.minilm import find_minilm
from tests.support.small_models import (
    FAMILIES,
    QWEN_END,
    numpy_tensors,
    torch_bert,
    torch_gte,
    torch_qwen3,
    torch_xlm_roberta,
    write_bpe_tokenizer,
    write_tokenizer,
    write_unigram_tokenizer,
)

__all__ = [
    "QWEN_END",
    "numpy_tensors",
    "torch_bert",
    "torch_gte",
    "torch_qwen3",
    "torch_xlm_roberta",
    "write_bpe_tokenizer",
    "write_tokenizer",
    "write_unigram_tokenizer",
]


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    folder = find_minilm()  # a download may work: this environment came from a package index
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


def torch_family(family: str, **sizes: Any) -> Any:
    """The small random trunk of a name of `FAMILIES`, the same at every call."""
    if family == "qwen3":
        return torch_qwen3(vocab_size=264, **sizes).model
    return FAMILIES[family][0](**sizes)


@pytest.fixture(scope="session")
def family_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedEncoder]:
    """The trunks of `torch_family`, written as complete folders and loaded."""
    found = {}
    for family, (_, write, _) in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        torch_family(family).save_pretrained(folder)
        write(folder)
        found[family] = load_encoder(folder)
    return found
