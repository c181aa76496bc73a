"""Loads and saves the folder of a causal language model in Hugging Face's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.files.model_folder import (
    check_tokenizer_links,
    copy_files,
    inside,
    open_tensors,
    read_config,
    read_json,
)
from qrag_jax.models.files.weight_names import (
    Loaded,
    NameTable,
    check_vocabulary,
    save_folder,
    stored_params,
)
from qrag_jax.models.trunks import qwen3
from qrag_jax.models.trunks.qwen3 import (
    HEAD,
    LanguageModel,
    LlamaConfig,
    Qwen2Config,
    Qwen3,
    Qwen3Config,
)
from qrag_jax.models.trunks.trunk import REMAT_POLICIES, Params
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.mesh import Rules
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import read_fast_tokenizer

GENERATION = "generation_config.json"
_HEAD_NAME, _TRUNK = "lm_head.weight", "model."
# The families by the model_type of config.json.
FAMILIES: dict[str, type[Qwen3Config]] = {
    "qwen3": Qwen3Config,
    "qwen2": Qwen2Config,
    "llama": LlamaConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedLanguageModel(Loaded):
    """A language model, and the folder it is in.

    Its tokenizer is one of transformers, with the model's chat template if it has one.
    """

    model: LanguageModel
    folder: Path

    @property
    def partition_rules(self) -> Rules:
        """How the parameters are split over a mesh."""
        return Qwen3.partition_rules()


def table_of(model_type: str) -> NameTable:
    """The names of a language model's weights, those of its trunk and its head."""
    trunk = qwen3.TABLE
    return dataclasses.replace(
        trunk,
        names={path: _TRUNK + name for path, name in trunk.names.items()} | {(HEAD,): _HEAD_NAME},
        prefixes=("",),
        trunk=tuple(_TRUNK + name for name in trunk.trunk),
        model_type=model_type,
        architecture=FAMILIES[model_type].__name__.replace("Config", "ForCausalLM"),
    )


def load_language_model(
    folder: Path,
    dtype: str = "float32",
    remat: str = "none",
    *,
    activations: str = "auto",
    platform: Platform | None = None,
) -> LoadedLanguageModel:
    """Reads the folder of a causal language model; see `LanguageModelConfig` for the arguments."""
    platform = platform or Platform.of()
    computed_in = precision(dtype, platform, activations)
    if remat not in REMAT_POLICIES:
        raise InputError(
            f"config.model.remat is {remat!r}; use one of {', '.join(REMAT_POLICIES)}."
        )
    model_config = read_config(folder)
    where = str(folder / "config.json")
    model_type = model_config.get("model_type", "")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"{where}: a model of the type {model_type!r:.60} has no language-model head that is "
            f"computed here; use a folder whose model_type is one of {', '.join(FAMILIES)}."
        )
    with refusing_types(where, "copy the model's own"):
        config = FAMILIES[model_type].from_dict(model_config, where)
        stop_ids = _stop_ids(folder, model_config)
    tensors = open_tensors(folder)
    own_head = _has_own_head(model_config, tensors, folder)
    if not own_head:
        tensors = {name: tensor for name, tensor in tensors.items() if name != _HEAD_NAME}
    trunk = Qwen3(config, computed_in, remat, not platform.on_cpu, own_head=own_head)
    stored = stored_params(table_of(model_type), trunk, tensors, str(folder))
    check_tokenizer_links(folder)
    tokenizer = read_fast_tokenizer(folder)
    check_vocabulary(folder, len(tokenizer), config.vocab_size)
    model = LanguageModel(trunk, stop_ids, config.longest_row)
    return LoadedLanguageModel(
        model=model, folder=folder, stored=stored, tokenizer=tokenizer, model_config=model_config
    )


def save_language_model(
    loaded: LoadedLanguageModel, params: Params, tokenizer_files_from: Path, out: Path
) -> None:
    """Writes a folder that Hugging Face's model class opens; see `weight_names.save_folder`.

    `generation_config.json` is copied with the tokenizer's files.
    """
    table = table_of(loaded.model_config["model_type"])
    config = loaded.model_config | {"tie_word_embeddings": not loaded.model.trunk.own_head}
    save_folder(table, params, config, tokenizer_files_from, out)
    generation = inside(tokenizer_files_from, GENERATION)
    if generation.is_file():
        copy_files({generation.name: generation}, out)


def _has_own_head(config: Mapping[str, Any], tensors: Mapping[str, Any], folder: Path) -> bool:
    """Whether the head is not the word table; a file may repeat a tied table as the head."""
    tied = config.get("tie_word_embeddings")
    there = _HEAD_NAME in tensors
    if tied is False and not there:
        raise InputError(
            f"{folder}: the weights have no language-model head ({_HEAD_NAME}), and config.json "
            "has tie_word_embeddings false; use the folder of the language model, not of its "
            "encoder."
        )
    return there and not tied


def _stop_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a turn: those of generation_config.json, else of config.json."""
    path = inside(folder, GENERATION)
    found = (read_json(path) if path.is_file() else {}).get("eos_token_id")
    found = config.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise InputError(
            f"{folder}: eos_token_id is {found!r}; it must be a token's number, or a list of them."
        )
    return tuple(ids)
