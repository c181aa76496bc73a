"""Finds (by a folder or a hub name), reads and writes the files of a model's folder.

A folder may come from anyone, and a run keeps a copy of it. So only files with known names are
copied, names read from a file (of modules, shards) must be plain, and no link may leave the folder.
The exception is the hub's cache: its links into the `blobs` of the same model are followed.
Weights stay in their safetensors files until a part is read.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from qrag_jax.errors import InputError, Rule
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.config_fields import check_value
from qrag_jax.runtime.whole_files import inside, is_plain, reading, write_json

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.jinja", GENERATION),
)
MODULES, MODEL_CONFIG = "modules.json", "config_sentence_transformers.json"
# Of the first module; older releases of sentence-transformers named it after the architecture.
TRANSFORMER_CONFIGS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
MODULE_FILES = ("config.json", "model.safetensors")  # of a sub-folder such as 1_Pooling
MODULE_FOLDER = re.compile(r"[0-9]{1,3}_[A-Za-z][A-Za-z0-9_]{0,63}")  # as the library names them
MAX_JSON_BYTES = 256 * 2**20
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TIMEOUT = 10.0  # seconds until the hub counts as unreachable
DESCRIPTION_FILES = [
    *("*.json", "*.txt", "*.jinja", "*.model"),
    *("model.safetensors", "model-*.safetensors", "*_Dense/model.safetensors"),
    "*_Transformer/model.safetensors",
]
TORCH_FILES = ["pytorch_model.bin", "pytorch_model-*.bin", "*_Transformer/pytorch_model.bin"]
OTHER_FORMATS = ["onnx/*", "openvino/*"]
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = (WHOLE_FILE, INDEX_FILE, "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_modules(folder: Path) -> list[tuple[str, str]]:
    """The modules of sentence-transformers that `modules.json` names; none if there is no file.

    Of each the last part of its class, and its sub-folder ("": the root).
    """
    path = inside(folder, MODULES)
    if not path.exists():
        return []
    modules = []
    for number, entry in enumerate(read_json(path, list)):
        if not isinstance(entry, dict) or not {"type", "path"} <= entry.keys():
            raise InputError(f"{path}: not a list of objects with type and path.")
        name = entry["path"]
        plain = isinstance(name, str) and MODULE_FOLDER.fullmatch(name)
        if not plain and not (name == "" and number == 0):
            raise InputError(
                f"{path}: the path {bounded_json.shown(name)} of entry {number} is not the name of "
                'a sub-folder such as "1_Pooling"; a model of sentence-transformers has no other.'
            )
        modules.append((str(entry["type"]).rpartition(".")[2], name))
    return modules


def trunk_folder(folder: Path) -> Path:
    """Where config.json, weights and tokenizer are: the folder, or its `0_Transformer`."""
    (kind, name), *_ = read_modules(folder) or [("", "")]
    return folder / name if kind == "Transformer" else folder


def kept_files(folder: Path) -> dict[str, Path]:
    """The files of tokenizer and sentence-transformers: path next to the weights → file."""
    trunk = trunk_folder(folder)
    names = (*TOKENIZER_FILES, *TRANSFORMER_CONFIGS)
    paths = {name: inside(trunk, name) for name in names}
    paths |= {name: inside(folder, name) for name in (MODULES, MODEL_CONFIG)}
    for _, name in read_modules(folder):
        if name and folder / name != trunk:
            paths |= {f"{name}/{file}": inside(folder, name, file) for file in MODULE_FILES}
    return {name: path for name, path in paths.items() if path.is_file()}


def copy_files(files: Mapping[str, Path], out: Path) -> None:
    """Copies files to these paths in `out`; a file is not copied onto itself."""
    for name, file in files.items():
        target = out / name
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)


def read_json(path: Path, kind: Any = dict) -> Any:
    """What a JSON file of a kind, such as an object, holds."""
    if not path.is_file():  # nor a pipe, which would be waited for
        raise InputError(f"{path}: missing; give the folder of a Hugging Face model.")
    with reading(path, "download the model again"):
        return bounded_json.typed(kind, bounded_json.content(path, MAX_JSON_BYTES))


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
        raise InputError(f"{path!r}: no such folder, and not a hub name of the form org/name.")
    from huggingface_hub import snapshot_download

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
            f"{path}: no folder, nor on the hub ({type(error).__name__}: {reason}); give one."
        ) from error
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Parses the folder's `config.json`."""
    return read_json(inside(folder, "config.json"))


# ---------------------------------------------------------------------- weights

# The format's dtype names (github.com/huggingface/safetensors) → NumPy's dtypes.
DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}")
    for kind, sizes in (("F", (2, 4, 8)), ("I", (1, 2, 4, 8)), ("U", (1, 2, 4, 8)))
    for size in sizes
} | {"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(np.bool_)}
MAX_SHARD_BYTES = 5 * 10**9  # as in Hugging Face's libraries


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file; each access maps the bytes and unmaps them afterwards."""

    path: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> np.ndarray:
        """A copy of the part that `index` selects: one slice per dimension, or () for all."""
        with safe_open(self.path, framework="numpy") as file:
            if index == () or 0 in self.shape:
                return np.asarray(file.get_tensor(self.name)[index], self.dtype)
            return file.get_slice(self.name)[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[()].astype(dtype or self.dtype, copy=False)


Tensor = FileTensor | np.ndarray


def open_safetensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file; reads only the header."""
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:  # refuses broken or truncated files
            for name in file.keys():  # noqa: SIM118  (no dictionary)
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise InputError(
                        f"{path}: {name} is {part.get_dtype()}; use {', '.join(DTYPES)}."
                    )
                shape = tuple(part.get_shape())
                tensors[name] = FileTensor(path, name, DTYPES[part.get_dtype()], shape)
        return tensors
    except (SafetensorError, OSError, MemoryError) as error:  # the last: it cannot be mapped
        raise InputError(f"{path}: not a safetensors file ({error}); download it again.") from error


def open_tensors(folder: Path) -> Mapping[str, Tensor]:
    """All weights of a folder, by the names and in the dtypes they are stored in.

    The first of `WEIGHT_FILES` that exists is used; an index file names its shards. Tensors of
    safetensors files stay in the files; tensors of PyTorch files are read.
    """
    for name in WEIGHT_FILES:
        path = inside(folder, name)
        if path.exists():
            return _open_shards(path) if name.endswith(".index.json") else _open_weights(path)
    raise InputError(f"{folder}: no weights found; looked for {', '.join(WEIGHT_FILES)}.")


def _open_weights(path: Path) -> Mapping[str, Tensor]:
    if path.suffix != ".bin":
        return open_safetensors(path)
    from qrag_jax.models.files.torch_checkpoint import read_torch_file

    return read_torch_file(path)


def _open_shards(index: Path) -> dict[str, Tensor]:
    suffix = index.name.removesuffix(".index.json").rpartition(".")[2]
    wanted = f"it must be a plain file name that ends in .{suffix}; download the model again"
    rule = Rule(lambda shard: is_plain(shard) and shard.endswith(f".{suffix}"), wanted)
    kind = dict[str, Annotated[str, rule]]
    weight_map = check_value(kind, read_json(index).get("weight_map"), f"{index}: weight_map")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = inside(index.parent, shard)
        if not path.is_file():
            raise InputError(f"{index}: {shard} is missing; download the model again.")
        tensors |= _open_weights(path)
    absent = [name for name in weight_map if name not in tensors]
    if absent:
        raise InputError(f"{index}: the shards lack the tensors {', '.join(absent):.300}.")
    return tensors


def write_shards(
    folder: Path, tensors: Mapping[str, Any], max_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes weights as Hugging Face's libraries do: `model.safetensors`, or shards and an index.

    A tensor has a shape and a dtype, and is read by `np.asarray`; those of one shard are in memory
    at a time. The folder must not be the one that the tensors are in.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.dtype.itemsize * int(np.prod(tensor.shape)),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {name: np.asarray(tensors[name], order="C") for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        del shard  # before the next one is read
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_json(folder / INDEX_FILE, index)


@dataclasses.dataclass(frozen=True, eq=False)
class StoredLeaf:
    """A float32 leaf in a tree of stacked parameters that is read only when needed."""

    tensors: Sequence[Tensor]  # one a layer if `stacked`, else a single one, of any float dtype
    stacked: bool  # whether the leaf has a leading axis of layers
    transposed: bool  # whether it is a kernel: (out, in) in the file, (in, out) in memory

    dtype: ClassVar[np.dtype] = np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensors[0].shape[:: -1 if self.transposed else 1]
        return (len(self.tensors), *shape) if self.stacked else shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads the part that `index`, one slice per dimension, selects, or all; a new array."""
        if not self.stacked:
            is_copy = isinstance(self.tensors[0], FileTensor)  # a copy already
            part = self._part(self.tensors[0], index or ())
            return part.astype(self.dtype, order="C", copy=not is_copy)
        index = index or (slice(None),) * self.ndim
        layers = self.tensors[index[0]]
        sizes = (len(range(*s.indices(n))) for s, n in zip(index[1:], self.shape[1:], strict=True))
        stack = np.empty((len(layers), *sizes), self.dtype)
        for place, tensor in zip(stack, layers, strict=True):  # one in memory at a time
            place[...] = self._part(tensor, index[1:])
        return stack

    def _part(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        return tensor[index[::-1]].T if self.transposed else tensor[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read().astype(dtype or self.dtype, copy=False)
