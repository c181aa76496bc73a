"""Writes model folders of the published encoders' real sizes, whose weights are zeros or drawn.

A program depends on shapes alone, so nothing is downloaded. Zeros are a hole in the file: they take
no room on the disk. What is run needs drawn ones: zeros may compute faster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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

_DRAWN = 1_000_003  # numbers; a prime, so that no two rows of a matrix are alike
WORDS = "Who wrote the book that the film of the same name was made from ?"  # of a small vocabulary


def write_zeros(name: str, folder: Path) -> Path:
    """Writes the folder of an encoder of the hub, with zeros; returns it. Else as `write_drawn`."""
    shapes = _write_rest(name, folder)
    _write_hole(shapes, folder / WHOLE_FILE)
    return folder


def write_drawn(name: str, folder: Path) -> Path:
    """Writes the folder of an encoder of the hub, with drawn weights; returns it.

    Its tokenizer is MiniLM's, or without MiniLM a small one: fewer tokens than the model has.

    Raises:
        InputError: the encoder is none of the published runs'.
    """
    shapes = _write_rest(name, folder)
    rng = np.random.default_rng(0)
    # The same numbers again and again: so many take minutes to draw.
    drawn = 0.02 * rng.standard_normal(_DRAWN, np.float32)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.lower().endswith("norm.weight")
        else np.resize(drawn, shape)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / WHOLE_FILE)
    return folder


def _write_rest(name: str, folder: Path) -> Mapping[str, tuple[int, ...]]:
    """All but the weights, whose shapes are returned."""
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
    copy_files({file.name: file for file in present}, folder)
    return expected_shapes(family.table, trunk)


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
