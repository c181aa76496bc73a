"""Writes model folders of the published encoders' real sizes, whose weights are zeros.

A program depends on shapes alone, so nothing is downloaded. The weights are a hole in the file:
they take no room on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.published import MODELS
from qrag_jax.errors import InputError
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.files.known_files import TOKENIZER_FILES, copy_files
from qrag_jax.models.files.shards import LENGTH_BYTES, WHOLE_FILE
from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.pretrained import FAMILIES
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.runtime.minilm import find_minilm
from qrag_jax.runtime.platform import Platform

WORDS = "Who wrote the book that the film of the same name was made from ?"  # of a small vocabulary


def write_zeros(name: str, folder: Path) -> Path:
    """Writes the folder of an encoder of the hub; returns it.

    Its tokenizer is MiniLM's, or without MiniLM a small one: fewer tokens than the model has.

    Raises:
        InputError: the encoder is none of the published runs'.
    """
    if name not in MODELS:
        raise InputError(f"the sizes of {name} are not known; give one of {', '.join(MODELS)}.")
    model: Mapping[str, Any] = MODELS[name]
    family = FAMILIES[model["model_type"]]
    trunk = family.trunk(
        family.read_config(model, name), precision("float32", Platform.here()), "none"
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model))
    tokenizer = find_minilm(download=False)
    if tokenizer is None:
        tokenizer = folder.parent / f".{folder.name}.tokenizer"
        make_scratch_folder(tokenizer, [WORDS], ScratchConfig(1, 32, 2, 8000, 512), 0)
    present = [tokenizer / file for file in TOKENIZER_FILES if (tokenizer / file).exists()]
    copy_files(present, tokenizer, folder)
    _write_hole(expected_shapes(family.table, trunk), folder / WHOLE_FILE)
    return folder


def _write_hole(shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """A safetensors file of zeros, in float32."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + end)
