"""Reads and writes adapters in the format of the library PEFT.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, whose tensors are called
`base_model.model.` + the module's name in Hugging Face's model + `.lora_A.weight` (r, in) or
`.lora_B.weight` (out, r).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from qrag_jax.errors import InputError
from qrag_jax.models.adapters import ALL_LINEAR, LoraConfig, kernel_shapes, target_modules
from qrag_jax.models.compute.linear import LORA_A, LORA_B
from qrag_jax.models.files.model_folder import inside, read_json
from qrag_jax.models.files.stored_tensors import read_safetensors
from qrag_jax.models.files.weight_names import LeafPath, NameTable
from qrag_jax.models.trunks.trunk import Params, Trunk
from qrag_jax.runtime.whole_files import write_whole

EMBEDDINGS, CAUSAL_LM = "FEATURE_EXTRACTION", "CAUSAL_LM"  # names of PEFT
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDINGS = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
POOLER = "pooler."  # outside the trunk, so ignored, as in the weights

# Fields of adapter_config.json that ask for an unsupported computation, unless empty or false.
UNSUPPORTED = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "layers_to_transform",
    "kasa_config",
    "monteclora_config",
)
EMPTY: tuple[Any, ...] = (None, "", {}, [])
# Initialisations that change the kernels of the base, so that its folder is no longer the base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
LIBRARY = "transformers.models."  # prefix of the Python module with the base's class


def read_adapters(folder: Path, table: NameTable, module: Trunk) -> tuple[LoraConfig, Params]:
    """Reads the adapters of one tower for the encoder `module`, whose names are in `table`.

    Returns:
        The sizes of the adapters, and their tree (see `lora`) of float32 NumPy arrays.
    """
    config_path, path = inside(folder, CONFIG_NAME), inside(folder, WEIGHTS_NAME)
    config = _read_config(config_path, table.model_type)
    if not path.is_file():
        raise InputError(f"{path}: missing; save the adapters as safetensors, PEFT's default.")
    tensors = {name.removeprefix(PREFIX): array for name, array in read_safetensors(path).items()}
    leaves = _leaves(table, module, config.rank)
    expected = {name: shape for stack in leaves.values() for name, shape in stack}
    prefix = max(table.prefixes, key=lambda p: sum(p + name in tensors for name in expected))
    found = {
        name.removeprefix(prefix): array
        for name, array in tensors.items()
        if not name.removeprefix(prefix).startswith(POOLER)
    }
    # Maps that have adapters; they must have both parts, in all layers.
    maps = {p[:-1] for p, stack in leaves.items() if any(name in found for name, _ in stack)}
    leaves = {p: stack for p, stack in leaves.items() if p[:-1] in maps}
    _check_fit(path, found, expected, [name for stack in leaves.values() for name, _ in stack])
    targets = tuple(sorted(_within_layer(table, place) for place in maps))
    return dataclasses.replace(config, targets=targets), unflatten_dict(
        {
            p: np.stack([np.asarray(found[name], np.float32).T for name, _ in stack])
            for p, stack in leaves.items()
        }
    )


def write_adapters(
    folder: Path, table: NameTable, config: LoraConfig, adapters: Params, *, task: str = EMBEDDINGS
) -> None:
    """Writes the adapters of one tower, as `PeftModel.from_pretrained(base, folder)` reads them.

    Args:
        config: sizes of the adapters; its targets are not used.
        adapters: as `read_adapters` returns them.
        task: PEFT's name of what the model is for, `EMBEDDINGS` or `CAUSAL_LM`.
    """
    tensors: dict[str, np.ndarray] = {}
    linear = target_modules(table, ALL_LINEAR)
    leaves = flatten_dict(adapters)
    for path, stack in leaves.items():
        for i, array in enumerate(np.asarray(stack)):
            name = PREFIX + linear[path[:-1]].format(i) + ENDINGS[path[-1]]
            tensors[name] = np.ascontiguousarray(array.T)  # save_file ignores strides
    names = sorted({_within_layer(table, path[:-1]) for path in leaves})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": task,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": names,
        "bias": "none",
        "auto_mapping": _class_of(table),
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    write_whole(folder / CONFIG_NAME, json.dumps(settings, indent=2) + "\n")


def _class_of(table: NameTable) -> dict[str, str]:
    """The base's class and its Python module, as PEFT names them."""
    name = table.model_type.replace("-", "_")
    library = f"{LIBRARY}{name}.modeling_{name}"
    return {"base_model_class": table.architecture, "parent_library": library}


def _read_config(path: Path, model_type: str) -> LoraConfig:
    """Reads the sizes, without targets; refuses unsupported computations and other base types."""
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"{path}: peft_type is {config.get('peft_type')!r:.60}; give LORA adapters."
        )
    asked = [n for n in UNSUPPORTED if config.get(n) not in EMPTY and config[n] is not False]
    if config.get("bias", "none") != "none":
        asked.append("bias")
    if str(config.get("init_lora_weights")).startswith(CHANGES_BASE):
        asked.append("init_lora_weights")
    if asked:
        raise InputError(
            f"{path}: {asked[0]} is {config[asked[0]]!r:.60}, which is not supported; give "
            "adapters trained without."
        )
    mapping = config.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    library = library if isinstance(library, str) else ""
    of_type = library.removeprefix(LIBRARY).partition(".")[0].replace("_", "-")
    if library.startswith(LIBRARY) and of_type != model_type:
        raise InputError(
            f"{path}: made for another base, since it names {of_type!r:.60} and this encoder's "
            f"model_type is {model_type!r}; give adapters of this encoder."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise InputError(
            f"{path}: r {rank!r:.60} or lora_alpha {alpha!r:.60} is no number above 0."
        )
    dropout = config.get("lora_dropout") or 0.0
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"{path}: lora_dropout {dropout!r:.60} is no number from 0 to below 1.")
    return LoraConfig(rank, float(alpha), dropout=float(dropout))


def _leaves(
    table: NameTable, module: Trunk, rank: int
) -> dict[LeafPath, list[tuple[str, tuple[int, ...]]]]:
    """Leaves of adapters on all linear maps → name without prefixes, and shape, in each layer."""
    leaves: dict[LeafPath, list[tuple[str, tuple[int, ...]]]] = {}
    shapes = kernel_shapes(module)
    for place, name in target_modules(table, ALL_LINEAR).items():
        layers, width_in, width_out = shapes[place]
        for leaf, size in ((LORA_A, (rank, width_in)), (LORA_B, (width_out, rank))):
            leaves[*place, leaf] = [(name.format(i) + ENDINGS[leaf], size) for i in range(layers)]
    return leaves


def _check_fit(
    path: Path,
    found: Mapping[str, Any],
    expected: Mapping[str, tuple[int, ...]],
    needed: list[str],
) -> None:
    """Refuses tensors that do not fit the model's linear maps."""
    misfits = []
    for name, array in found.items():
        if name not in expected:
            misfits.append(f"{name} has no place in the model")
        elif array.shape != expected[name]:
            misfits.append(f"{name} has shape {array.shape}, expected {expected[name]}")
        elif array.dtype.kind not in "fV":  # V: bfloat16
            misfits.append(f"{name} is {array.dtype}, expected a float dtype")
    misfits += [f"{name} is missing" for name in needed if name not in found]
    if misfits:
        raise InputError(
            f"{path}: made for another base or of another r, since {misfits[0]} ({len(misfits)} of "
            f"{len({*found, *needed})} tensors do not fit); give adapters of whole modules of this "
            "encoder."
        )
    if not needed:
        raise InputError(f"{path}: holds no adapters of the model's layers.")


def _within_layer(table: NameTable, place: LeafPath) -> str:
    """Hugging Face's name of a module, relative to its layer."""
    return table.names[*place, "kernel"].removesuffix(".weight").partition("{}.")[2]
