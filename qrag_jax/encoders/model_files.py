"""A pretrained encoder's files: where they are (a folder or a hub name), read and written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.encoders.shard_files import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    WHOLE_FILE,
    Size,
    write_shards,
)
from qrag_jax.encoders.stored_tensors import Tensor, open_safetensors
from qrag_jax.encoders.torch_files import read_torch_file
from qrag_jax.errors import InputError
from qrag_jax.files import write_whole

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TIMEOUT = 10.0  # seconds until the hub counts as unreachable
DESCRIPTION_FILES = [
    *("*.json", "*.txt", "*.jinja", "*.model"),
    *("model.safetensors", "model-*.safetensors", "*_Dense/model.safetensors"),
]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*.bin"]
OTHER_FORMATS = ["onnx/*", "openvino/*"]
WEIGHT_FILES = (
    WHOLE_FILE,
    INDEX_FILE,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
VOCABULARY_FILES = (  # one of them makes a tokenizer
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
)
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)
SENTENCE_TRANSFORMERS_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def resolve_folder(path: str) -> Path:
    """Returns the folder that holds a model's files.

    A folder of this machine comes first. Otherwise `path` is read as a hub name, "org/name": its
    JSON, text and safetensors files are fetched into the hub's cache (or found there), and
    `pytorch_model.bin` only if there are no safetensors.

    Raises:
        InputError: `path` is neither, or the hub cannot give it.
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
        if not any(folder.glob("model*.safetensors")):
            folder = fetch(TORCH_FILES)
    except Exception as error:  # the client's many errors share no base class
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{path}: no such folder, and the hub cannot give a model of that name "
            f"({type(error).__name__}: {reason})."
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Parses the folder's `config.json`.

    Raises:
        InputError: the file is missing, no JSON, or no JSON object.
    """
    return read_json(folder / "config.json")


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """All weights of a folder, by the names and in the dtypes they are stored in.

    The first of `WEIGHT_FILES` that exists is looked into; an index file names its shards. Tensors
    of safetensors files stay there, those of PyTorch's are read.

    Raises:
        InputError: there are no weights, a shard or tensor of the index is missing, or a file is
            broken or refused (see `read_torch_file`).
    """
    for name in WEIGHT_FILES:
        path = folder / name
        if path.exists():
            return _open_shards(path) if name.endswith(".index.json") else _open_weights(path)
    raise InputError(f"{folder}: no weights found; looked for {', '.join(WEIGHT_FILES)}.")


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """As `open_tensors`, all of them read."""
    return {name: np.asarray(tensor) for name, tensor in open_tensors(folder).items()}


def write_folder(
    sizes: Mapping[str, Size],
    arrays: Iterable[tuple[str, np.ndarray]],
    config: Mapping[str, Any],
    tokenizer_files_from: Path,
    out: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights, `config.json` and the files that go with them.

    Args:
        sizes, arrays, max_shard_bytes: see `write_shards`.
        tokenizer_files_from: folder whose tokenizer files, and sentence-transformers files if it
            has them, are copied.
        out: folder to write, made if need be; files of the same names are replaced.

    Raises:
        InputError: there is no tokenizer in `tokenizer_files_from`, or `out` is a file.
    """
    files = [tokenizer_files_from / n for n in (*TOKENIZER_FILES, *SENTENCE_TRANSFORMERS_FILES)]
    files += _module_files(tokenizer_files_from)
    files = [file for file in files if file.is_file()]
    if not any(file.name in VOCABULARY_FILES for file in files):
        raise InputError(f"{tokenizer_files_from}: has none of {', '.join(VOCABULARY_FILES)}.")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder to write.")
    out.mkdir(parents=True, exist_ok=True)
    write_shards(out, sizes, arrays, max_shard_bytes)
    write_whole(out / "config.json", json.dumps(config, indent=2) + "\n")
    for file in files:
        target = out / file.relative_to(tokenizer_files_from)
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)


def _module_files(folder: Path) -> list[Path]:
    """Files of the sentence-transformers modules that `modules.json` names, such as 1_Pooling."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return []
    try:
        names = [entry["path"] for entry in json.loads(modules.read_text(encoding="utf-8"))]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{modules}: not a list of objects with a path ({error}).") from error
    plain = [name for name in names if name and Path(name).name == name]
    return [file for name in plain for file in sorted((folder / name).glob("*"))]


def _open_weights(path: Path) -> dict[str, Tensor]:
    return {**(read_torch_file(path) if path.suffix == ".bin" else open_safetensors(path))}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of one file; raises as `open_safetensors`."""
    return {name: np.asarray(tensor) for name, tensor in open_safetensors(path).items()}


def _open_shards(index: Path) -> dict[str, Tensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: the field weight_map, tensor name to file name, is missing.")
    shards = sorted({str(name) for name in weight_map.values()})
    for shard in shards:
        if (index.parent / shard).name != shard:
            raise InputError(f"{index}: the shard {shard!r} is not a plain file name.")
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
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


def read_json(path: Path, kind: type = dict) -> Any:
    """Parses a file that holds an object (or, with `kind` list, an array).

    Raises:
        InputError: the file is missing, no JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: missing; give the folder of a Hugging Face model.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}).") from error
    if not isinstance(value, kind):
        wanted = "an object" if kind is dict else "an array"
        raise InputError(f"{path}: holds a {type(value).__name__} where {wanted} is expected.")
    return value
