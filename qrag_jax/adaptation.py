"""What a config says of low-rank adapters: their sizes, and those that training starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_collections

from qrag_jax.errors import InputError
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.pretrained import (
    LoadedEncoder,
    with_adapters,
    with_lora,
    with_new_adapters,
)


def lora_config(config: ml_collections.ConfigDict) -> LoraConfig | None:
    """The sizes of new adapters; None where none are to be made.

    Raises:
        InputError: a size makes no sense, or dropout has no adapters to act on.
    """
    lora = config.encoder.get("lora")  # which the config of an older run may lack
    if lora is None:
        return None
    if not 0 <= lora.dropout < 1:
        raise InputError(
            f"config.encoder.lora.dropout is {lora.dropout}; it is the share of an adapter's "
            "inputs dropped in training, so give a number from 0 to below 1."
        )
    if lora.dropout and not lora.rank and not lora.path:
        raise InputError(
            f"config.encoder.lora.dropout is {lora.dropout}, but there are no adapters for it to "
            "act on; set config.encoder.lora.rank, too."
        )
    if lora.rank < 0 or not lora.alpha > 0:
        raise InputError(
            f"config.encoder.lora.rank is {lora.rank} and alpha {lora.alpha}; rank must be at "
            "least 0 (no adapters), alpha above 0."
        )
    if not lora.rank:
        return None
    return LoraConfig(lora.rank, lora.alpha, lora.targets, lora.dropout)


def with_first_adapters(config: ml_collections.ConfigDict, loaded: LoadedEncoder) -> LoadedEncoder:
    """The encoder with the adapters that training starts from, if the config asks for any.

    Those of a folder have its rank, alpha and targets, but the config's dropout.

    Raises:
        InputError: see `lora_config`; there are no linear maps of the names given; or the folder
            `encoder.lora.path` cannot be used, or has another rank.
    """
    new, path = lora_config(config), config.encoder.get("lora", {}).get("path", "")
    if not path:
        return with_new_adapters(loaded, new, config.seed) if new else loaded
    loaded = with_adapters(loaded, Path(path).expanduser())
    assert loaded.lora is not None  # for mypy: there are adapters now
    if new and new.rank != loaded.lora.rank:
        raise InputError(
            f"config.encoder.lora.rank is {new.rank}, but the adapters of {path} have rank "
            f"{loaded.lora.rank}; leave it 0 to start from them."
        )
    dropout = config.encoder.lora.dropout
    return with_lora(loaded, dataclasses.replace(loaded.lora, dropout=dropout))
