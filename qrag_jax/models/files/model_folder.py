"""Finds (by a folder or a hub name), reads and writes the files of a pretrained encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.files.known_files import (
    MODULES,
    VOCABULARY_FILES,
    copy_files,
    inside,
    kept_files,
    read_json,
    trunk_folder,
)
from qrag_jax.models.files.shards import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    WHOLE_FILE,
    Size,
    write_shards,
)
from qrag_jax.models.files.stored_tensors import Tensor, open_safetensors
from qrag_jax.models.files.torch_checkpoint import read_torch_file
from qrag_jax.runtime.bounded_json import shown
from qrag_jax.runtime.file_names import is_plain
from qrag_jax.runtime.whole_files import write_whole

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TIMEOUT = 10.0  # seconds until the hub counts as unreachable
DESCRIPTION_FILES = [
    *("*.json", "*.txt", "*.jinja", "*.model"),
    *("model.safetensors", "model-*.safetensors", "*_Dense/model.safetensors"),
    "*_Transformer/model.safetensors",
]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*.bin", "*_Transformer/pytorch_model.bin"]
OTHER_FORMATS = ["onnx/*", "openvino/*"]
WEIGHT_FILES = (
    WHOLE_FILE,
    INDEX_FILE,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def resolve_folder(path: str) -> Path:
    """Returns the folder that holds a model's files.

    A local folder takes precedence. Otherwise `path` is a hub name, "org/name": the model's JSON,
    text and safetensors files are fetched into the hub's cache (or found there).
    `pytorch_model.bin` is fetched only if there are no safetensors.
    """
    folder = Path(path).expanduser()
    if path and folder.is_dir():  # Path("") would be the current folder
        return folder
    if path and folder.exists():
        raise InputError(f"{path}: is a file; give the model's folder.")
    if not HUB_NAME.fullmatch(path):
        raise InputError(
            f"{path!r}: no such folder, and not a hub name of the form org/name either."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise InputError(
            f"{path}: no such folder, and names are fetched from the hub by huggingface_hub, which "
            f"is not installed; pip install qrag_jax[hub]."
        ) from error

    def fetch(patterns: list[str]) -> Path:
        got = snapshot_download(
            path, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS, etag_timeout=TIMEOUT
        )
        return Path(got)

    try:
        folder = fetch(DESCRIPTION_FILES)
        if not any(trunk_folder(folder).glob("model*.safetensors")):
            folder = fetch(TORCH_FILES)
    except Exception as error:  # the client's many errors share no base class
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{path}: no such folder, and the hub cannot give a model of that name "
            f"({type(error).__name__}: {reason})."
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Parses the folder's `config.json`."""
    return read_json(inside(folder, "config.json"))


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, by the names and in the dtypes they are stored in.

    The first of `WEIGHT_FILES` that exists is used; an index file names its shards. Tensors of
    safetensors files stay in the files; tensors of PyTorch files are read.
    """
    for name in WEIGHT_FILES:
        path = inside(folder, name)
        if path.exists():
            return _open_shards(path) if name.endswith(".index.json") else _open_weights(path)
    raise InputError(f"{folder}: no weights found; looked for {', '.join(WEIGHT_FILES)}.")


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """As `open_tensors`, but all tensors are read into memory."""
    return {name: np.asarray(tensor) for name, tensor in open_tensors(folder).items()}


def write_folder(
    sizes: Mapping[str, Size],
    arrays: Iterable[tuple[str, np.ndarray]],
    config: Mapping[str, Any],
    *,
    tokenizer_files_from: Path,
    out: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights, `config.json` and the files that go with them.

    Args:
        sizes: see `write_shards`.
        arrays: see `write_shards`.
        config: the content of `config.json`.
        tokenizer_files_from: folder from which only the tokenizer's files, and those of
            sentence-transformers if there are any, are copied (see `kept_files`).
        out: folder to write, created if it does not exist; files of the same names are replaced.
        max_shard_bytes: see `write_shards`.
    """
    files = kept_files(tokenizer_files_from)
    if files.keys().isdisjoint(VOCABULARY_FILES):
        raise InputError(f"{tokenizer_files_from}: has none of {', '.join(VOCABULARY_FILES)}.")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder to write.")
    out.mkdir(parents=True, exist_ok=True)
    write_shards(out, sizes, arrays, max_shard_bytes)
    write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
    copy_files(files, out)
    if trunk_folder(tokenizer_files_from) != tokenizer_files_from:  # here it is the folder itself
        modules = read_json(tokenizer_files_from / MODULES, list)
        modules[0]["path"] = ""
        write_whole(out / MODULES, json.dumps(modules, indent=2) + "\n")


def _open_weights(path: Path) -> dict[str, Tensor]:
    return {**(read_torch_file(path) if path.suffix == ".bin" else open_safetensors(path))}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Reads every tensor of one file; raises the errors of `open_safetensors`."""
    return {name: np.asarray(tensor) for name, tensor in open_safetensors(path).items()}


def _open_shards(index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: the field weight_map, tensor name to file name, is missing.")
    suffix = index.name.removesuffix(".index.json").rpartition(".")[2]
    for tensor, shard in weight_map.items():
        if not is_plain(shard) or not shard.endswith(f".{suffix}"):
            raise InputError(
                f"{index}: the shard {shown(shard)} in weight_map (of {shown(tensor)}) is not a "
                f"plain file name that ends in .{suffix}; download the model again."
            )
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not inside(index.parent, shard).is_file()]
    if missing:
        them = f"shard {missing[0]} is" if len(missing) == 1 else f"shards {', '.join(missing)} are"
        raise InputError(f"{index}: the {them} missing from the folder; download the model again.")
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        path = index.parent / shard
        found = _open_weights(path)
        absent = [n for n, file in weight_map.items() if file == shard and n not in found]
        if absent:
            raise InputError(f"{path}: lacks the tensors {', '.join(absent)} of {index.name}.")
        tensors |= found
    return tensors
