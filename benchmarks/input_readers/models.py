"""Readers of model folders: configs, weights in all formats, tokenizers, adapters, modules."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.tried_inputs import FileReader
from qrag_jax.llm.server import model_digest
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.files.model_folder import open_tensors, read_tensors
from qrag_jax.models.files.sentence_transformers import write_modules
from qrag_jax.models.files.shards import Size, write_shards
from qrag_jax.models.files.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.models.files.torch_checkpoint import read_torch_file
from qrag_jax.models.pretrained import (
    load_encoder,
    save_adapters,
    with_adapters,
    with_new_adapters,
)
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder

_TEXTS = ["Oslo is the capital of Norway.", "Ada Berg was born in Oslo.", "The fjord is long."]
_WEIGHTS = "model.safetensors"


@functools.cache
def _made(kind: str) -> tuple[Any, Path]:
    """A model folder, made once: an initialisation is compiled; its owner, who removes it."""
    owner = tempfile.TemporaryDirectory()
    folder = Path(owner.name) / kind
    if kind == "language model":
        write_tiny_lm(
            folder,
            _TEXTS,
            TinyLMConfig(
                vocab=300,
                hidden=16,
                layers=1,
                heads=2,
                key_heads=1,
                intermediate=16,
                head_dim=8,
                positions=64,
                copies=False,
            ),
            seed=0,
        )
    else:
        make_scratch_folder(folder, _TEXTS, ScratchConfig(1, 8, 2, 80, 32), 0)
        write_modules(
            folder, pooling="mean", normalise=True, scale=0.5, width=8, max_tokens=32, pooler=False
        )
    return owner, folder


def _copied(kind: str, *names: str) -> Callable[[Path], Sequence[Path]]:
    """Writes a folder; the files of these names are damaged."""

    def write(folder: Path) -> Sequence[Path]:
        shutil.copytree(_made(kind)[1], folder, dirs_exist_ok=True)
        return [path for path in sorted(folder.rglob("*")) if path.name in names]

    return write


def _load_language_model(folder: Path) -> Any:
    loaded = load_language_model(folder)
    loaded.tokenizer("Where is Oslo?")
    return [np.asarray(leaf).shape for leaf in jax.tree.leaves(loaded.params)]


def _load_encoder(folder: Path) -> Any:
    loaded = load_encoder(folder)
    return [np.asarray(leaf).shape for leaf in jax.tree.leaves(loaded.params)]


def _adapters(folder: Path) -> Sequence[Path]:
    shutil.copytree(_made("encoder")[1], folder / "base")
    loaded = with_new_adapters(load_encoder(folder / "base"), LoraConfig(2, 4.0), 0)
    save_adapters(loaded, loaded.adapters, folder / "adapter")
    return [*sorted((folder / "adapter").iterdir())]


def _load_adapters(folder: Path) -> Any:
    return with_adapters(load_encoder(folder / "base"), folder / "adapter").adapters


def _shards(folder: Path) -> Sequence[Path]:
    arrays = {name: np.ones((4, 4), np.float32) for name in ("a", "b", "c")}
    sizes = {name: Size(array.shape, array.dtype) for name, array in arrays.items()}
    write_shards(folder, sizes, arrays.items(), 100)
    return [*sorted(folder.iterdir())]


def _torch(folder: Path, *, as_zip: bool) -> Sequence[Path]:
    import torch

    tensors = {"a.weight": torch.ones(3, 2), "b.bias": torch.arange(4, dtype=torch.float16)}
    path = folder / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=as_zip)
    return [path]


def readers() -> list[FileReader]:
    """The readers of this module."""
    described = ("config.json", "generation_config.json", _WEIGHTS)
    modules = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json")
    tokenizers = ("tokenizer.json", "tokenizer_config.json")
    return [
        FileReader("a language model", _copied("language model", *described), _load_language_model),
        FileReader("a tokenizer", _copied("language model", *tokenizers), _load_language_model),
        FileReader(
            "an encoder and its modules",
            _copied("encoder", *described, *modules),
            _load_encoder,
            mapped=True,
        ),
        FileReader("adapters", _adapters, _load_adapters, mapped=True),
        FileReader("weights in shards", _shards, read_tensors, mapped=True),
        FileReader(
            "weights of PyTorch, a zip",
            functools.partial(_torch, as_zip=True),
            lambda folder: read_torch_file(folder / "pytorch_model.bin"),
        ),
        FileReader(
            "weights of PyTorch, the older format",
            functools.partial(_torch, as_zip=False),
            open_tensors,
        ),
        FileReader(
            "files of a model that is served",
            _copied("language model", "config.json"),
            lambda folder: model_digest.model_digest(folder),
            whole=False,  # files of any size are hashed
        ),
    ]
