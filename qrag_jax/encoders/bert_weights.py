"""BERT weights under Hugging Face's names ↔ the parameter tree of `bert.Bert`, both ways."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from qrag_jax.encoders.bert import Bert, BertConfig
from qrag_jax.errors import InputError

LeafPath = tuple[str, ...]  # of a leaf in the parameter tree

# Our module → Hugging Face's module. Kernels are (in, out) here and (out, in) there.
EMBEDDINGS = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
}
EMBEDDING_NORM = {"embedding_norm": "embeddings.LayerNorm"}
LAYER_DENSE = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}
LAYER_NORM = {
    "attention_norm": "attention.output.LayerNorm",
    "output_norm": "output.LayerNorm",
}
DENSE_LEAVES = {"kernel": "weight", "bias": "bias"}
NORM_LEAVES = {"scale": "weight", "bias": "bias"}
OLD_NORM_LEAVES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

PREFIXES = ("", "bert.", "model.", "0.auto_model.")
IGNORED = re.compile(r"embeddings\.(position_ids|token_type_ids)")  # buffers, not weights

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
)
SENTENCE_TRANSFORMERS_FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


def name_table() -> dict[LeafPath, str]:
    """Leaf of the parameter tree → Hugging Face name, with `{}` for the layer's number."""
    table: dict[LeafPath, str] = {
        (ours,): f"{theirs}.weight" for ours, theirs in EMBEDDINGS.items()
    }
    for root, there, modules, leaves in (
        ((), "", EMBEDDING_NORM, NORM_LEAVES),
        (("layers",), "encoder.layer.{}.", LAYER_DENSE, DENSE_LEAVES),
        (("layers",), "encoder.layer.{}.", LAYER_NORM, NORM_LEAVES),
    ):
        for ours, theirs in modules.items():
            for leaf, name in leaves.items():
                table[(*root, ours, leaf)] = f"{there}{theirs}.{name}"
    return table


def params_from_tensors(
    tensors: Mapping[str, np.ndarray], config: BertConfig, where: str
) -> dict[str, Any]:
    """Builds the parameters of `Bert(config)` from tensors under Hugging Face's names.

    Names may begin with one of `PREFIXES`, and LayerNorms may use the old gamma/beta. Poolers,
    heads and position ids are ignored.

    Args:
        tensors: name → array of any float dtype; linear weights `[out, in]`.
        where: names the file or folder in errors.

    Returns:
        The tree of `Bert(config).init_params(key)`, leaves float32 numpy arrays; those under
        "layers" have a leading axis `[num_hidden_layers]`.

    Raises:
        InputError: lists every tensor that is missing, of another shape, not of a float dtype, or
            of the trunk but without a place in this config (for instance, of a further layer).
    """
    shapes = _expected_shapes(config)
    prefix = max(
        PREFIXES, key=lambda p: sum(_find(tensors, p + name) is not None for name in shapes)
    )
    problems = []
    used = set()
    for name, shape in shapes.items():
        found = _find(tensors, prefix + name)
        if found is None:
            problems.append(f"{prefix}{name} {shape} is missing")
            continue
        used.add(found)
        array = tensors[found]
        if array.shape != shape:
            problems.append(f"{found} has shape {array.shape}, expected {shape}")
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems.append(f"{found} is {array.dtype}, expected a float dtype")
    trunk = (prefix + "embeddings.", prefix + "encoder.")
    for name in tensors:
        if name.startswith(trunk) and name not in used and not IGNORED.search(name):
            problems.append(f"{name} {tensors[name].shape} has no place in this config")
    if problems:
        raise InputError(f"{where}: the weights do not fit config.json: {'; '.join(problems)}.")

    def leaf(path: LeafPath, name: str) -> np.ndarray:
        count = config.num_hidden_layers if "{}" in name else 1
        keys = [_find(tensors, prefix + name.format(i)) for i in range(count)]
        arrays = [np.asarray(tensors[key], np.float32) for key in keys if key is not None]
        if path[-1] == "kernel":
            arrays = [array.T for array in arrays]
        return np.stack(arrays) if "{}" in name else np.array(arrays[0], order="C")

    return _tree({path: leaf(path, name) for path, name in name_table().items()})


def tensors_from_params(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `params_from_tensors`: name (without prefix) → row-major array, dtype kept."""
    tensors: dict[str, np.ndarray] = {}
    for path, name in name_table().items():
        leaf: Any = params
        for key in path:
            leaf = leaf[key]
        stack = np.asarray(leaf) if "{}" in name else np.asarray(leaf)[None]
        if path[-1] == "kernel":
            stack = stack.swapaxes(1, 2)
        for i, array in enumerate(stack):
            tensors[name.format(i)] = np.ascontiguousarray(array)  # save_file ignores strides
    return tensors


def save_folder(
    params: Mapping[str, Any], config_dict: Mapping[str, Any], tokenizer_files_from: Path, out: Path
) -> None:
    """Writes a folder that `BertModel.from_pretrained` and sentence-transformers read.

    Args:
        params: as in `Bert.init(...)["params"]`, numpy or fully addressable jax arrays.
        config_dict: the parsed `config.json` the encoder was made from.
        tokenizer_files_from: folder whose tokenizer files, and sentence-transformers files if it
            has them, are copied.
        out: folder to write, made if need be; files of the same names are replaced.

    Raises:
        InputError: there is no tokenizer in `tokenizer_files_from`, or `out` is a file.
    """
    files = [tokenizer_files_from / n for n in (*TOKENIZER_FILES, *SENTENCE_TRANSFORMERS_FILES)]
    files += _module_files(tokenizer_files_from)
    files = [file for file in files if file.is_file()]
    if not any(file.name in ("tokenizer.json", "vocab.txt") for file in files):
        raise InputError(f"{tokenizer_files_from}: has neither tokenizer.json nor vocab.txt.")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; give a folder to write.")
    out.mkdir(parents=True, exist_ok=True)
    tensors = tensors_from_params(params)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    dtype = tensors["embeddings.word_embeddings.weight"].dtype.name
    config = {k: v for k, v in config_dict.items() if k not in ("dtype", "torch_dtype")}
    config |= {"model_type": "bert", "architectures": ["BertModel"], "torch_dtype": dtype}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in files:
        target = out / file.relative_to(tokenizer_files_from)
        target.parent.mkdir(exist_ok=True)
        if not (target.exists() and target.samefile(file)):
            shutil.copyfile(file, target)


def _expected_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape there, from the module's own parameter shapes."""
    tree = jax.eval_shape(Bert(config).init_params, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    shapes = {}
    table = name_table()
    for keys, leaf in leaves:
        path = tuple(key.key for key in keys)
        name, shape = table[path], leaf.shape
        if path[0] == "layers":
            shape = shape[1:]
        if path[-1] == "kernel":
            shape = shape[::-1]
        for i in range(config.num_hidden_layers if path[0] == "layers" else 1):
            shapes[name.format(i)] = shape
    return shapes


def _find(tensors: Mapping[str, np.ndarray], name: str) -> str | None:
    """The name, or its old LayerNorm spelling, under which `tensors` has it."""
    if name in tensors:
        return name
    for new, old in OLD_NORM_LEAVES.items():
        if name.endswith(new) and name.removesuffix(new) + old in tensors:
            return name.removesuffix(new) + old
    return None


def _tree(leaves: Mapping[LeafPath, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


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
