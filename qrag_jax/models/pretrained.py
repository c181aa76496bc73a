"""Loads and saves an encoder's folder: architecture, weights and tokenizer that fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.data.tokens import TextTokenizer
from qrag_jax.errors import InputError
from qrag_jax.models.adapters import LoraConfig, new_adapters, read_adapters, write_adapters
from qrag_jax.models.compute.precision import precision
from qrag_jax.models.files.model_folder import (
    check_tokenizer_links,
    open_tensors,
    read_config,
    trunk_folder,
)
from qrag_jax.models.files.sentence_transformers import Published, read_inputs, read_published
from qrag_jax.models.files.weight_names import Loaded, check_vocabulary, save_folder, stored_params
from qrag_jax.models.heads.embedding import POOLINGS, TextEncoder
from qrag_jax.models.trunks.families import Family, family_of
from qrag_jax.models.trunks.trunk import REMAT_POLICIES, Params
from qrag_jax.runtime.config_fields import refusing_types
from qrag_jax.runtime.mesh import Rules
from qrag_jax.runtime.platform import Platform

UNNORMALISED_SCALE = 0.1  # Q-RAG divides the mean of BERT's hidden states by 10
# A field of `config.json`: the factor on pooled vectors that is not in the weights. An exported
# tower has it, and transformers keeps it when it saves the model again.
VECTOR_SCALE = "qrag_jax_vector_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder with the parameters of one tower.

    Attributes:
        lora: sizes of the adapters; None if the encoder itself is trained.
        second: as `stored`, of the tower of chunks; None if it starts from the same parameters.
    """

    encoder: TextEncoder
    tokenizer: TextTokenizer
    lora: LoraConfig | None = None
    second: Params | None = None

    @property
    def partition_rules(self) -> Rules:
        """How the model's parameters are split over a mesh, unless the config has its own rules."""
        return family_of(self.model_config, "config.json").trunk.partition_rules()


def own_pooling(folder: Path, family: Family) -> Published:
    """How a model makes its vectors, by its sentence-transformers files, else by its family."""
    published = read_published(folder) or Published(None, family.normalise)
    return dataclasses.replace(published, pooling=published.pooling or family.pooling)


def _stated_scale(model_config: Mapping[str, Any], where: str) -> float | None:
    """The factor on vectors that a parsed `config.json` states; None if it states none."""
    value = model_config.get(VECTOR_SCALE)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(
            f"{where}: {VECTOR_SCALE} is {value!r}; it must be a number above 0, so export the "
            "model again or set config.encoder.scale and delete the field."
        )
    return float(value)


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
    """Reads the folder of an encoder in Hugging Face's layout.

    Args:
        dtype, activations, remat, prefixes, dropout: see `EncoderConfig`.
        scale: factor on the pooled vector; None: what config.json says (`VECTOR_SCALE`, as in
            exported towers), else the model's own factor, or if it has none 1 for normalised
            vectors and 0.1 (as in Q-RAG) for others.
        pooling, normalise: "" and None: as the model does. If both are given, the folder's own are
            not read.
        platform: the devices that compute; None: those of this process.
    """
    platform = platform or Platform.of()
    computed_in = precision(dtype, platform, activations)
    for name, value, known in (
        ("remat", remat, REMAT_POLICIES),
        ("pooling", pooling, ("", *POOLINGS)),
    ):
        if value not in known:
            names = ", ".join(known) if name == "remat" else ", ".join(POOLINGS)
            raise InputError(f"config.encoder.{name} is {value!r}; use one of {names}.")
    root, folder = folder, trunk_folder(folder)
    model_config = read_config(folder)
    where = str(folder / "config.json")
    family = family_of(model_config, where)
    if (dropout or attention_dropout) and not family.drops:
        raise InputError(
            f"config.encoder.dropout is {dropout} and attention_dropout {attention_dropout}, but "
            f"models of the type {family.table.model_type!r} have no dropout; set both to 0."
        )
    with refusing_types(where, "copy the model's own"):
        config = family.config.from_dict(model_config, where)
    if config.hidden_size % 2:
        raise InputError(
            f"{folder / 'config.json'}: hidden_size {config.hidden_size} is odd, but an embedding "
            "is read as two halves; use an encoder of even width."
        )
    trunk = family.trunk(config, computed_in, remat, not platform.on_cpu)
    params = stored_params(family.table, trunk, open_tensors(folder), str(folder))
    check_tokenizer_links(folder)
    lowers = read_inputs(root).lowers
    tokenizer = TextTokenizer.load(folder, opens_rows=family.opens_rows, lowers=lowers)
    check_vocabulary(folder, tokenizer.vocab_size, config.vocab_size)
    own = Published(pooling, bool(normalise))
    if not pooling or normalise is None:
        own = own_pooling(root, family)
    normalise = own.normalise if normalise is None else normalise
    if scale is None:
        otherwise = own.scale or (1.0 if normalise else UNNORMALISED_SCALE)
        scale = _stated_scale(model_config, where) or otherwise
    state_ids, chunk_ids = tokenizer.encode([state_prefix, chunk_prefix])
    encoder = TextEncoder(
        module=trunk,
        width=config.hidden_size,
        max_positions=config.longest_row,
        opening_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        pad_id=tokenizer.pad_id,
        scale=scale,
        pooling=pooling or own.pooling or family.pooling,
        normalise=normalise,
        state_prefix=tuple(state_ids),
        chunk_prefix=tuple(chunk_ids),
        dropout=dropout,
        attention_dropout=attention_dropout,
    )
    return LoadedEncoder(
        encoder=encoder,
        stored=params,
        tokenizer=tokenizer,
        model_config=family.complete(model_config),
    )


def with_new_adapters(loaded: LoadedEncoder, config: LoraConfig, seed: int) -> LoadedEncoder:
    """The encoder, frozen, with new adapters that change no output yet."""
    table = family_of(loaded.model_config, "config.json").table
    adapters = new_adapters(table, loaded.encoder.module, config, seed)
    return with_lora(dataclasses.replace(loaded, adapters=adapters), config)


def with_adapters(loaded: LoadedEncoder, folder: Path) -> LoadedEncoder:
    """The encoder, frozen, with the adapters of a folder in PEFT's format."""
    table = family_of(loaded.model_config, "config.json").table
    config, adapters = read_adapters(folder, table, loaded.encoder.module)
    return with_lora(dataclasses.replace(loaded, adapters=adapters), config)


def with_lora(loaded: LoadedEncoder, config: LoraConfig) -> LoadedEncoder:
    """The encoder with `config` as the sizes, scale and dropout of its adapters."""
    encoder = dataclasses.replace(
        loaded.encoder, lora_scale=config.scale, lora_dropout=config.dropout
    )
    return dataclasses.replace(loaded, encoder=encoder, lora=config)


def save_adapters(loaded: LoadedEncoder, adapters: Params, out: Path) -> None:
    """Writes the adapters of one tower of this encoder in PEFT's format."""
    assert loaded.lora is not None, "the encoder has no adapters"
    write_adapters(out, family_of(loaded.model_config, str(out)).table, loaded.lora, adapters)


def save_encoder(loaded: LoadedEncoder, tokenizer_files_from: Path, out: Path) -> None:
    """Writes the folder of an encoder, with its family's names (see `weight_names.save_folder`).

    Weights keep the bytes that they have in their files.
    """
    table, config = family_of(loaded.model_config, str(out)).table, loaded.model_config
    save_folder(table, loaded.stored, config, tokenizer_files_from, out)
