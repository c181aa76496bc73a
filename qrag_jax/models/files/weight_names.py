"""Converts Hugging Face's named weights to a trunk's stacked parameters and back, by tables."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from qrag_jax.errors import InputError
from qrag_jax.models.files import model_folder
from qrag_jax.models.trunks.transformer import HEAD, LAYERS, WORDS, Params, Sizes, Transformer
from qrag_jax.runtime.whole_files import write_json

LeafPath = tuple[str, ...]  # path of a leaf in the parameter tree
MOST_PROBLEMS = 50  # listed in one error
# A file may begin all its names with one of these: classes with a head call the trunk so.
PREFIXES = (
    *("", "bert.", "roberta.", "mpnet.", "new.", "nomic_bert.", "model."),
    "0.auto_model.",  # sentence-transformers
)
# Buffers among the weights of a file.
_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)|rotary_emb\.")
# Ending of a name → its ending in older files.
_OLD_ENDINGS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


@dataclasses.dataclass(frozen=True)
class NameTable:
    """One family: its sizes, and how its weights are called in Hugging Face's files."""

    config: type[Sizes]  # `from_dict` reads a parsed `config.json`
    # Leaf of the parameter tree → Hugging Face's name, with `{}` for the layer's number; leaves
    # that some configs do not have (such as biases) have a name too
    names: Mapping[LeafPath, str]
    model_type: str  # written to `config.json`, as the next one
    architecture: str
    # Names of single layers that no file has, because the model never uses them. Their places in
    # the tree hold ones
    absent: tuple[str, ...] = ()

    @property
    def trunk(self) -> set[str]:
        """Beginnings, after the prefix, of the names that must have a place in the tree.

        Other names, such as those of heads and poolers, are ignored.
        """
        return {
            f"{name.partition('.')[0]}." for path, name in self.names.items() if path != (HEAD,)
        }


def _find(tensors: Mapping[str, Any], name: str) -> str | None:
    """The spelling of `name`, new or old, that `tensors` has; None if it has neither."""
    if name in tensors:
        return name
    for new, old in _OLD_ENDINGS.items():
        if name.endswith(new) and name.removesuffix(new) + old in tensors:
            return name.removesuffix(new) + old
    return None


def name_table(
    config: type[Sizes], outside: Mapping[str, str], layer: str, modules: str, **further: Any
) -> NameTable:
    """The table of an architecture, from names of its modules here → in the files.

    Kernels are (in, out) here and (out, in) there.

    Args:
        outside: tables, and norms, whose names end with "norm".
        layer: what names of a layer begin with, with `{}` for its number.
        modules: linear maps and norms of a layer: "query attn.q, key attn.k".
    """
    names: dict[LeafPath, str] = {}
    for path, there in [
        *(((name,), there) for name, there in outside.items()),
        *(((LAYERS, name), layer + there) for name, there in map(str.split, modules.split(","))),
    ]:
        if path[0] == LAYERS or path[-1].endswith("norm"):
            weight = "scale" if path[-1].endswith("norm") else "kernel"
            names |= {(*path, weight): f"{there}.weight", (*path, "bias"): f"{there}.bias"}
        else:
            names[path] = f"{there}.weight"
    return NameTable(config=config, names=names, **further)


def stored_params(
    table: NameTable, module: Transformer, tensors: Mapping[str, model_folder.Tensor], where: str
) -> dict[str, Any]:
    """The stacked parameters of `module`, from tensors with Hugging Face's names.

    They are the tree of `module.init_params(key)`, with `StoredLeaf`s as leaves. Names and shapes
    are checked immediately; a tensor is read only when its leaf is read.

    Args:
        tensors: name → tensor of any float dtype; linear weights `[out, in]`.
        where: names the file or folder in errors.
    """
    shapes = expected_shapes(table, module)
    prefix = max(
        PREFIXES, key=lambda p: sum(_find(tensors, p + name) is not None for name in shapes)
    )
    problems, used, renamed = [], set(), dict[str, model_folder.Tensor]()
    for name, shape in shapes.items():
        there = _find(tensors, prefix + name)
        if there is None:
            problems.append(f"{prefix}{name} {shape} is missing")
            continue
        used.add(there)
        tensor = renamed[name] = tensors[there]
        if tensor.shape != shape:
            problems.append(f"{there} has shape {tensor.shape}, expected {shape}")
        elif not jnp.issubdtype(tensor.dtype, jnp.floating):
            problems.append(f"{there} is {tensor.dtype}, expected a float dtype")
    trunk = tuple(prefix + beginning for beginning in table.trunk)
    for name, tensor in tensors.items():
        if name.startswith(trunk) and name not in used and not _BUFFERS.search(name):
            problems.append(f"{name} {tensor.shape} has no place in this config")
    if problems:
        listed, rest = problems[:MOST_PROBLEMS], len(problems) - MOST_PROBLEMS
        listed += [f"and {rest} more"] if rest > 0 else []
        raise InputError(f"{where}: the weights do not fit config.json: {'; '.join(listed)}.")

    def leaf(path: LeafPath, count: int, shape: tuple[int, ...]) -> model_folder.StoredLeaf:
        names = [table.names[path].format(i) for i in range(count)]
        dtype = next((renamed[name].dtype for name in names if name in renamed), np.float32)
        # A view of one number: of this shape, a table of words may have gigabytes.
        ones = np.broadcast_to(np.ones((), dtype), shape)
        tensors_of_leaf = [renamed.get(name, ones) for name in names]
        return model_folder.StoredLeaf(tensors_of_leaf, path[0] == LAYERS, path[-1] == "kernel")

    return unflatten_dict(
        {path: leaf(path, count, shape) for path, count, shape in leaves_of(module)}
    )


def tensors_from_params(table: NameTable, params: Params) -> dict[str, np.ndarray]:
    """The inverse of `stored_params`: name (without prefix) → row-major array, dtype kept."""
    return {name: np.asarray(part, order="C") for name, part in _parts(table, params).items()}


def _parts(table: NameTable, params: Params) -> dict[str, model_folder.Tensor]:
    """The tensors of a tree, layer by layer; those in files are as they are there."""
    parts: list[tuple[int, str, model_folder.Tensor]] = []
    for path, leaf in flatten_dict(params).items():
        stacked = path[0] == LAYERS
        tensors: Any
        if isinstance(leaf, model_folder.StoredLeaf):
            tensors = leaf.tensors
        else:
            array = np.asarray(leaf) if stacked else np.asarray(leaf)[None]
            tensors = array.swapaxes(-1, -2) if path[-1] == "kernel" else array
        for i, tensor in enumerate(tensors):
            name = table.names[path].format(i)
            if name not in table.absent:
                parts.append((i if stacked else -1, name, tensor))
    return {name: tensor for _, name, tensor in sorted(parts, key=lambda entry: entry[0])}


def save_folder(
    table: NameTable,
    params: Params,
    config_dict: Mapping[str, Any],
    tokenizer_files_from: Path,
    out: Path,
) -> None:
    """Writes a folder that Hugging Face's model class and sentence-transformers can read.

    Args:
        params: stacked; leaves are `StoredLeaf`s, which keep the bytes of their files, NumPy arrays
            or fully addressable JAX arrays.
        tokenizer_files_from: folder from which `kept_files` are copied.
        out: not the folder that the weights are in; files of the same names are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = _parts(table, params)
    model_folder.write_shards(out, tensors)
    config = {k: v for k, v in config_dict.items() if k not in ("dtype", "torch_dtype")}
    config |= {
        "model_type": table.model_type,
        "architectures": [table.architecture],
        "torch_dtype": tensors[table.names[(WORDS,)]].dtype.name,
    }
    write_json(out / "config.json", config)
    model_folder.copy_files(model_folder.kept_files(tokenizer_files_from), out)
    # Here the trunk's folder is the model's own.
    if model_folder.trunk_folder(tokenizer_files_from) != tokenizer_files_from:
        modules = model_folder.read_json(tokenizer_files_from / model_folder.MODULES, list)
        modules[0]["path"] = ""
        write_json(out / model_folder.MODULES, modules)


def expected_shapes(table: NameTable, module: Transformer) -> dict[str, tuple[int, ...]]:
    """Every tensor that `module` needs: name without prefix → shape in the files."""
    shapes = {}
    for path, count, shape in leaves_of(module):
        if path[-1] == "kernel":
            shape = shape[::-1]
        for i in range(count):
            shapes[table.names[path].format(i)] = shape
    return {name: shape for name, shape in shapes.items() if name not in table.absent}


def leaves_of(module: Transformer) -> Iterator[tuple[LeafPath, int, tuple[int, ...]]]:
    """Every stacked leaf: its path, how many tensors it stacks, and the shape of one."""
    tree = jax.eval_shape(module.init_params, jax.random.key(0))
    for path, leaf in flatten_dict(tree).items():
        if path[0] == LAYERS:
            yield path, leaf.shape[0], leaf.shape[1:]
        else:
            yield path, 1, leaf.shape
