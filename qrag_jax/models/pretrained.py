"""What folders of encoders and language models have in common, in Hugging Face's layout; adapters.

Architecture, weights and tokenizer must fit together. Weights are read lazily, from the folder.

Adapters are written as the library PEFT has them: `adapter_config.json`, and
`adapter_model.safetensors`, whose tensors are called `base_model.model.` + the module's name in
Hugging Face's model + `.lora_A.weight` (r, in) or `.lora_B.weight` (out, r).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError, Natural, Positive, Rule
from qrag_jax.models.compute.lora import LORA_A, LORA_B
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.embedding import LanguageModel, TextEncoder
from qrag_jax.models.files.model_folder import TOKENIZER_FILES, open_tensors, read_config
from qrag_jax.models.files.weight_names import LeafPath, NameTable, leaves_of, stored_params
from qrag_jax.models.trunks.families import DECODERS, HEAD_NAME, family_of
from qrag_jax.models.trunks.transformer import LAYERS, Params, Transformer
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.whole_files import inside, write_json

# ---------------------------------------------------------------------- adapters

Dropped = Annotated[float, Rule(lambda share: 0 <= share < 1, "give a share from 0 to below 1")]
ALL_LINEAR = "all-linear"
EMBEDDINGS, CAUSAL_LM = "FEATURE_EXTRACTION", "CAUSAL_LM"  # names of PEFT
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDINGS = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}
LIBRARY = "transformers.models."  # prefix of the Python module with the base's class


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters, trained instead of the model."""

    rank: Natural = 0  # r; 0: train the model itself
    alpha: Positive = 16.0  # an adapter's product is scaled by alpha / r
    # Maps that get an adapter: "all-linear", or names as in the model's files, whole or their end
    # after a dot: ("query", "attention.output.dense"); a text is split at commas
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: Dropped = 0.0  # share of an adapter's inputs that training drops

    @property
    def sizes(self) -> Self | None:
        """Sizes of new adapters; None if there are none."""
        return self if self.rank else None

    @property
    def scale(self) -> float:
        """s, the factor on A·B."""
        return self.alpha / self.rank


def target_modules(table: NameTable, targets: str | tuple[str, ...]) -> dict[LeafPath, str]:
    """The linear maps that `targets` name: path in the tree → name in files, `{}` for the layer."""
    linear = {
        path[:-1]: name.removesuffix(".weight")
        for path, name in table.names.items()
        if path[0] == LAYERS and path[-1] == "kernel"
    }
    if targets == ALL_LINEAR:
        return linear
    names = tuple(filter(None, targets.split(","))) if isinstance(targets, str) else targets

    def has(module: str, name: str) -> bool:
        return f".{module}".endswith(f".{name}")

    known = sorted({module.rpartition(".")[2] for module in linear.values()})
    unknown = [name for name in names if not any(has(m, name) for m in linear.values())]
    if unknown or not names:
        raise InputError(
            f"config field lora.targets names {', '.join(map(repr, unknown)) or 'nothing'}; use "
            f"{ALL_LINEAR!r} or names of this model's linear maps, {', '.join(known)}."
        )
    return {path: m for path, m in linear.items() if any(has(m, name) for name in names)}


def new_adapters(table: NameTable, module: Transformer, config: LoraConfig, seed: int) -> Params:
    """New adapters, which change no output yet: A is uniform in ±1/√in as in PEFT, B is zero."""
    rng = np.random.default_rng(seed)
    shapes = {at[:-1]: (n, *shape) for at, n, shape in leaves_of(module) if at[-1] == "kernel"}
    leaves: dict[LeafPath, np.ndarray] = {}
    for path in sorted(target_modules(table, config.targets)):
        layers, width_in, width_out = shapes[path]
        a = rng.uniform(-1, 1, (layers, width_in, config.rank)) / np.sqrt(width_in)
        leaves[*path, LORA_A] = a.astype(np.float32)
        leaves[*path, LORA_B] = np.zeros((layers, config.rank, width_out), np.float32)
    return unflatten_dict(leaves)


def write_adapters(
    folder: Path, table: NameTable, config: LoraConfig, adapters: Params, *, task: str = EMBEDDINGS
) -> None:
    """Writes the adapters of one tower, as `PeftModel.from_pretrained(base, folder)` reads them.

    The targets of `config` are not used; `task` is PEFT's name of what the model is for.
    """
    linear, leaves = target_modules(table, ALL_LINEAR), flatten_dict(adapters)
    tensors = {
        # save_file ignores strides
        PREFIX + linear[path[:-1]].format(i) + ENDINGS[path[-1]]: np.ascontiguousarray(array.T)
        for path, stack in leaves.items()
        for i, array in enumerate(np.asarray(stack))
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    kind = table.model_type.replace("-", "_")
    settings = {
        "peft_type": "LORA",
        "task_type": task,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted({linear[path[:-1]].partition("{}.")[2] for path in leaves}),
        "bias": "none",
        "auto_mapping": {  # the base's class and its Python module
            "base_model_class": table.architecture,
            "parent_library": f"{LIBRARY}{kind}.modeling_{kind}",
        },
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    write_json(folder / CONFIG_NAME, settings)


# ---------------------------------------------------------------------- models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model's parameters, its tokenizer and its parsed `config.json`."""

    trunk: Transformer  # computes hidden states
    table: NameTable
    stored: Params  # stacked, float32; they stay in files until they are placed
    tokenizer: Any
    model_config: dict[str, Any]
    adapters: Params | None = None  # the first ones, of one tower; None: the model is trained

    @property
    def params(self) -> Params:
        """The parameters as NumPy arrays; each access reads all of them."""
        return jax.tree.map(np.asarray, self.stored)

    @property
    def trained(self) -> Params:
        """What training changes: the adapters if there are any, else all parameters."""
        return self.stored if self.adapters is None else self.adapters

    @property
    def base(self) -> Params | None:
        """What the adapters are on; None if the model itself is trained."""
        return None if self.adapters is None else self.stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder with the parameters of one tower."""

    encoder: TextEncoder
    tokenizer: TextTokenizer
    # As `stored`, of the tower of chunks; None if it starts from the same parameters
    second: Params | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedLanguageModel(Loaded):
    """A language model, its tokenizer of transformers, and the folder it is in."""

    model: LanguageModel
    folder: Path


def load_fields(
    folder: Path, families: Mapping[str, NameTable], config: Any, platform: Platform | None
) -> dict[str, Any]:
    """The fields of `Loaded`, but the tokenizer.

    Args:
        config: has dtype, activations and remat.
        platform: the devices that compute; None: those of this process.
    """
    platform = platform or Platform.of()
    computed_in = precision(config.dtype, platform, config.activations)
    model_config, where = read_config(folder), str(folder / "config.json")
    family = family_of(model_config, where, families)
    with refusing_types(where, "copy the model's own"):
        sizes = family.config.from_dict(model_config, where)
    for name in TOKENIZER_FILES:
        inside(folder, name)  # libraries follow links
    tensors = open_tensors(folder)
    own_head = families is DECODERS and _has_own_head(model_config, tensors, folder)
    scanned = not platform.on_cpu
    trunk = Transformer(sizes, computed_in, config.remat, scanned, own_head=own_head)
    return {
        "trunk": trunk,
        "table": family,
        "stored": stored_params(family, trunk, tensors, str(folder)),
        "model_config": family.config.completed(model_config),
    }


def check_vocabulary(folder: Path, tokenizer: int, weights: int) -> None:
    if tokenizer > weights:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer} tokens but the weights hold {weights} "
            "(vocab_size in config.json); put the model's own tokenizer there."
        )


def _has_own_head(config: Mapping[str, Any], tensors: Mapping[str, Any], folder: Path) -> bool:
    """Whether the head is not the word table; a file may repeat a tied table as the head."""
    tied = config.get("tie_word_embeddings")
    there = HEAD_NAME in tensors
    if tied is False and not there:
        raise InputError(
            f"{folder}: the weights have no head ({HEAD_NAME}), and config.json has "
            "tie_word_embeddings false; use the language model's folder, not its encoder's."
        )
    return there and not tied
