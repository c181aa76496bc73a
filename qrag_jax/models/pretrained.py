"""Loads and saves folders of encoders and language models in Hugging Face's layout.

Architecture, weights and tokenizer must fit together. Weights are read lazily, from the folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError, Positive
from qrag_jax.models.adapters import LoraConfig, new_adapters
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.files.model_folder import (
    check_tokenizer_links,
    copy_files,
    open_tensors,
    read_config,
    read_json,
    trunk_folder,
)
from qrag_jax.models.files.sentence_transformers import read_inputs, read_published
from qrag_jax.models.files.weight_names import NameTable, save_folder, stored_params
from qrag_jax.models.heads.embedding import LAST, MEAN, TextEncoder
from qrag_jax.models.trunks.families import FAMILIES, Family, family_of
from qrag_jax.models.trunks.qwen3 import HEAD, KINDS, TABLE, LanguageModel, Qwen3, Qwen3Config
from qrag_jax.models.trunks.transformer import Transformer
from qrag_jax.models.trunks.trunk import Params
from qrag_jax.runtime.config_fields import check_value, refusing_types
from qrag_jax.runtime.mesh import Rules
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import read_fast_tokenizer
from qrag_jax.runtime.whole_files import inside

UNNORMALISED_SCALE = 0.1  # Q-RAG divides the mean of BERT's hidden states by 10
# A field of `config.json`: the factor on pooled vectors that is not in the weights. An exported
# tower has it, and transformers keeps it when it saves the model again.
VECTOR_SCALE = "qrag_jax_vector_scale"
GENERATION = "generation_config.json"
_HEAD_NAME, _TRUNK = "lm_head.weight", "model."
# Language models by the model_type of config.json, with the names of trunk and head.
DECODERS = {
    kind: Family(
        Qwen3Config,
        Qwen3,
        dataclasses.replace(
            TABLE,
            names={at: _TRUNK + name for at, name in TABLE.names.items()} | {(HEAD,): _HEAD_NAME},
            prefixes=("",),
            trunk=tuple(_TRUNK + name for name in TABLE.trunk),
            model_type=kind,
            architecture=f"{kind.capitalize()}ForCausalLM",
        ),
    )
    for kind in KINDS
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model's parameters, its tokenizer and its parsed `config.json`."""

    trunk: Transformer  # computes hidden states
    table: NameTable
    stored: Params  # stacked, float32; they stay in files until `placement` reads them
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

    @property
    def partition_rules(self) -> Rules:
        """How the parameters are split over a mesh."""
        return self.trunk.partition_rules()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder with the parameters of one tower."""

    encoder: TextEncoder
    tokenizer: TextTokenizer
    # As `stored`, of the tower of chunks; None if it starts from the same parameters
    second: Params | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedLanguageModel(Loaded):
    """A language model, and the folder it is in.

    Its tokenizer is one of transformers, with the model's chat template if it has one.
    """

    model: LanguageModel
    folder: Path


def _load(
    folder: Path,
    families: Mapping[str, Family],
    how: tuple[str, str, str],
    platform: Platform | None,
) -> dict[str, Any]:
    """The fields of `Loaded`, but the tokenizer; `how`: dtype, activations and remat."""
    platform = platform or Platform.of()
    dtype, activations, remat = how
    computed_in = precision(dtype, platform, activations)
    model_config, where = read_config(folder), str(folder / "config.json")
    family = family_of(model_config, where, families)
    with refusing_types(where, "copy the model's own"):
        config = family.config.from_dict(model_config, where)
    check_tokenizer_links(folder)
    tensors = open_tensors(folder)
    own_head = families is DECODERS and _has_own_head(model_config, tensors, folder)
    trunk = family.trunk(config, computed_in, remat, not platform.on_cpu, own_head=own_head)
    return {
        "trunk": trunk,
        "table": family.table,
        "stored": stored_params(family.table, trunk, tensors, str(folder)),
        "model_config": family.config.completed(model_config),
    }


def _check_vocabulary(folder: Path, tokenizer: int, weights: int) -> None:
    if tokenizer > weights:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer} tokens but the weights hold {weights} "
            "(vocab_size in config.json); put the model's own tokenizer there."
        )


# ---------------------------------------------------------------------- encoders


def load_encoder(
    folder: Path,
    dtype: str = "float32",
    scale: float | None = None,
    remat: str = "none",
    *,
    activations: str = "auto",
    pooling: str = "",
    normalise: bool | None = None,
    state_prefix: str = "",
    chunk_prefix: str = "",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    platform: Platform | None = None,
) -> LoadedEncoder:
    """Reads the folder of an encoder.

    Args:
        dtype, activations, remat, prefixes, dropout: see `EncoderConfig`.
        scale: factor on the pooled vector; None: what config.json says (`VECTOR_SCALE`, as in
            exported towers), else the model's own factor, or if it has none 1 for normalised
            vectors and 0.1 (as in Q-RAG) for others.
        pooling, normalise: "" and None: as the model does, by its sentence-transformers files, else
            by its family. If both are given, the folder's own are not read.
        platform: the devices that compute; None: those of this process.
    """
    root, folder = folder, trunk_folder(folder)
    fields = _load(folder, FAMILIES, (dtype, activations, remat), platform)
    trunk, where = fields["trunk"], str(folder / "config.json")
    config, is_causal = trunk.config, trunk.config.CAUSAL
    if (dropout or attention_dropout) and is_causal:
        raise InputError(
            f"config.encoder.dropout is {dropout} and attention_dropout {attention_dropout}, but "
            f"models of the type {fields['table'].model_type!r} have no dropout; set both to 0."
        )
    if config.hidden_size % 2:
        raise InputError(
            f"{where}: hidden_size {config.hidden_size} is odd, but an embedding is read as two "
            "halves; use an encoder of even width."
        )
    lowers, _ = read_inputs(root)
    tokenizer = TextTokenizer.load(folder, opens_rows=not is_causal, lowers=lowers)
    _check_vocabulary(folder, tokenizer.vocab_size, config.vocab_size)
    own_pooling, own_scale = None, None
    if not pooling or normalise is None:
        own_pooling, own, own_scale = read_published(root) or (None, is_causal, None)
        normalise = own if normalise is None else normalise
    if scale is None:
        scale = fields["model_config"].get(VECTOR_SCALE)
        if scale is not None:
            check_value(Positive, scale, f"{where}: {VECTOR_SCALE}")
        scale = float(scale or own_scale or (1.0 if normalise else UNNORMALISED_SCALE))
    state_ids, chunk_ids = tokenizer.encode([state_prefix, chunk_prefix])
    encoder = TextEncoder(
        module=trunk,
        width=config.hidden_size,
        max_positions=config.longest_row,
        opening_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        scale=scale,
        pooling=pooling or own_pooling or (LAST if is_causal else MEAN),
        normalise=normalise,
        state_prefix=tuple(state_ids),
        chunk_prefix=tuple(chunk_ids),
        dropout=dropout,
        attention_dropout=attention_dropout,
    )
    return LoadedEncoder(encoder=encoder, tokenizer=tokenizer, **fields)


def save_encoder(loaded: LoadedEncoder, tokenizer_files_from: Path, out: Path) -> None:
    """Writes the folder of an encoder; weights keep the bytes that they have in their files."""
    save_folder(loaded.table, loaded.stored, loaded.model_config, tokenizer_files_from, out)


def with_new_adapters(loaded: LoadedEncoder, config: LoraConfig, seed: int) -> LoadedEncoder:
    """The encoder, frozen, with new adapters that change no output yet."""
    adapters = new_adapters(loaded.table, loaded.trunk, config, seed)
    how: Any = {"lora_scale": config.scale, "lora_dropout": config.dropout}
    encoder = dataclasses.replace(loaded.encoder, **how)
    return dataclasses.replace(loaded, encoder=encoder, adapters=adapters)


# ---------------------------------------------------------------------- language models


def load_language_model(
    folder: Path,
    dtype: str = "float32",
    remat: str = "none",
    *,
    activations: str = "auto",
    platform: Platform | None = None,
) -> LoadedLanguageModel:
    """Reads the folder of a causal language model; see `LanguageModelConfig` for the arguments."""
    fields = _load(folder, DECODERS, (dtype, activations, remat), platform)
    config = fields["trunk"].config
    tokenizer = read_fast_tokenizer(folder)
    _check_vocabulary(folder, len(tokenizer), config.vocab_size)
    stop_ids = _stop_ids(folder, fields["model_config"])
    model = LanguageModel(fields["trunk"], stop_ids, config.longest_row)
    return LoadedLanguageModel(model=model, folder=folder, tokenizer=tokenizer, **fields)


def save_language_model(
    loaded: LoadedLanguageModel, params: Params, tokenizer_files_from: Path, out: Path
) -> None:
    """Writes a folder that Hugging Face's model class opens; see `weight_names.save_folder`.

    `generation_config.json` is copied with the tokenizer's files.
    """
    config = loaded.model_config | {"tie_word_embeddings": not loaded.trunk.own_head}
    save_folder(loaded.table, params, config, tokenizer_files_from, out)
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
