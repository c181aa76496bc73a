"""Weights under Hugging Face's names ↔ a trunk's parameter tree at rest, by a table per model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.encoders.model_files import write_folder
from qrag_jax.encoders.trunk import LAYERS, WORDS, Params, Trunk
from qrag_jax.errors import InputError

LeafPath = tuple[str, ...]  # of a leaf in the parameter tree

# Leaves of a module → Hugging Face's. Kernels are (in, out) here and (out, in) there.
DENSE_LEAVES = {"kernel": "weight", "bias": "bias"}
NORM_LEAVES = {"scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class NameTable:
    """How one architecture's weights are called in Hugging Face's files.

    Attributes:
        names: leaf of the parameter tree → name there, with `{}` for the layer's number; leaves
            that a config does without (such as biases) have a name too.
        prefixes: what all names of a file may begin with.
        trunk: beginnings (after the prefix) of names that must have a place; others are ignored,
            such as heads and poolers.
        ignored: names in the trunk that are no weights.
        old_endings: ending of a name → the same in older files.
        model_type, architecture: what a written `config.json` says.
    """

    names: Mapping[LeafPath, str]
    prefixes: tuple[str, ...]
    trunk: tuple[str, ...]
    ignored: re.Pattern[str]
    model_type: str
    architecture: str
    old_endings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def find(self, tensors: Mapping[str, Any], name: str) -> str | None:
        """The name, or its older spelling, under which `tensors` has it."""
        if name in tensors:
            return name
        for new, old in self.old_endings.items():
            if name.endswith(new) and name.removesuffix(new) + old in tensors:
                return name.removesuffix(new) + old
        return None


def module_names(
    ours: LeafPath, there: str, modules: Mapping[str, str], leaves: Mapping[str, str]
) -> dict[LeafPath, str]:
    """Entries of `NameTable.names` for modules under one node of the tree, `there` in the files."""
    return {
        (*ours, module, leaf): f"{there}{name}.{leaf_name}"
        for module, name in modules.items()
        for leaf, leaf_name in leaves.items()
    }


def params_from_tensors(
    table: NameTable, module: Trunk, tensors: Mapping[str, np.ndarray], where: str
) -> dict[str, Any]:
    """Builds the parameters of `module`, as they rest, from tensors under Hugging Face's names.

    Args:
        tensors: name → array of any float dtype; linear weights `[out, in]`.
        where: names the file or folder in errors.

    Returns:
        The tree of `module.init_params(key)`, leaves float32 numpy arrays.

    Raises:
        InputError: lists every tensor that is missing, of another shape, not of a float dtype, or
            of the trunk but without a place in this config (for instance, of a further layer).
    """
    prefix, found = _match(table, module, tensors, where)

    def leaf(path: LeafPath, count: int) -> np.ndarray:
        name = prefix + table.names[path]
        arrays = [np.asarray(tensors[found[name.format(i)]], np.float32) for i in range(count)]
        if path[-1] == "kernel":
            arrays = [array.T for array in arrays]
        return np.stack(arrays) if path[0] == LAYERS else np.array(arrays[0], order="C")

    return _tree({path: leaf(path, count) for path, count, _ in _leaves(module)})


def tensors_from_params(table: NameTable, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors`: name (without prefix) → row-major array, dtype kept."""
    tensors: dict[str, np.ndarray] = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = tuple(key.key for key in keys)
        stack = np.asarray(leaf) if path[0] == LAYERS else np.asarray(leaf)[None]
        if path[-1] == "kernel":
            stack = stack.swapaxes(1, 2)
        for i, array in enumerate(stack):
            # save_file ignores strides
            tensors[table.names[path].format(i)] = np.ascontiguousarray(array)
    return tensors


def save_folder(
    table: NameTable,
    params: Params,
    config_dict: Mapping[str, Any],
    tokenizer_files_from: Path,
    out: Path,
) -> None:
    """Writes a folder that Hugging Face's model and sentence-transformers read.

    Args:
        params: as they rest, numpy or fully addressable jax arrays.
        config_dict: the parsed `config.json` the encoder was made from.
        tokenizer_files_from, out: see `write_folder`.

    Raises:
        InputError: there is no tokenizer in `tokenizer_files_from`, or `out` is a file.
    """
    tensors = tensors_from_params(table, params)
    config = {k: v for k, v in config_dict.items() if k not in ("dtype", "torch_dtype")}
    config |= {
        "model_type": table.model_type,
        "architectures": [table.architecture],
        "torch_dtype": tensors[table.names[(WORDS,)]].dtype.name,
    }
    write_folder(tensors, config, tokenizer_files_from, out)


def expected_shapes(table: NameTable, module: Trunk) -> dict[str, tuple[int, ...]]:
    """Name without prefix → shape in the files, of every tensor that `module` needs."""
    shapes = {}
    for path, count, shape in _leaves(module):
        if path[-1] == "kernel":
            shape = shape[::-1]
        for i in range(count):
            shapes[table.names[path].format(i)] = shape
    return shapes


def _leaves(module: Trunk) -> Iterator[tuple[LeafPath, int, tuple[int, ...]]]:
    """Every leaf at rest: its path, how many tensors it stacks, and the shape of one."""
    tree = jax.eval_shape(module.init_params, jax.random.key(0))
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = tuple(key.key for key in keys)
        if path[0] == LAYERS:
            yield path, leaf.shape[0], leaf.shape[1:]
        else:
            yield path, 1, leaf.shape


def _match(
    table: NameTable, module: Trunk, tensors: Mapping[str, np.ndarray], where: str
) -> tuple[str, dict[str, str]]:
    """The prefix of all names, and expected name (with it) → name in `tensors`."""
    shapes = expected_shapes(table, module)
    prefix = max(
        table.prefixes,
        key=lambda p: sum(table.find(tensors, p + name) is not None for name in shapes),
    )
    problems, found = [], {}
    for name, shape in shapes.items():
        there = table.find(tensors, prefix + name)
        if there is None:
            problems.append(f"{prefix}{name} {shape} is missing")
            continue
        found[prefix + name] = there
        array = tensors[there]
        if array.shape != shape:
            problems.append(f"{there} has shape {array.shape}, expected {shape}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"{there} is {array.dtype}, expected a float dtype")
    trunk, used = tuple(prefix + beginning for beginning in table.trunk), set(found.values())
    for name in tensors:
        if name.startswith(trunk) and name not in used and not table.ignored.search(name):
            problems.append(f"{name} {tensors[name].shape} has no place in this config")
    if problems:
        raise InputError(f"{where}: the weights do not fit config.json: {'; '.join(problems)}.")
    return prefix, found


def _tree(leaves: Mapping[LeafPath, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree
