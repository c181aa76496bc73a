"""How a run reads its encoder's folder: what the config says, and what it leaves to the folder.

`pooling` "", `normalise` None and `scale` None are the folder's own. They are settled when a run
begins, and its saved config holds what they came to: it never asks the folder again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_collections

from qrag_jax.errors import InputError
from qrag_jax.models.files.model_folder import read_config
from qrag_jax.models.heads.embedding import MEAN, TextEncoder
from qrag_jax.models.pretrained import UNNORMALISED_SCALE, family_of
from qrag_jax.runtime.minilm import MINILM, MINILM_OR_SCRATCH

LEFT_OPEN: dict[str, Any] = {"pooling": "", "normalise": None, "scale": None}
# MiniLM was published with normalised vectors; here it is used as Q-RAG uses BERTs.
OF_MINILM: dict[str, Any] = {"pooling": MEAN, "normalise": False, "scale": UNNORMALISED_SCALE}


def encoder_settings(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """How `load_encoder` is to read the model's folder."""
    encoder = config.encoder
    settings = {
        "dtype": encoder.dtype,
        "scale": encoder.scale,
        "remat": encoder.remat,
        "pooling": encoder.pooling,
        "normalise": encoder.normalise,
        "state_prefix": encoder.state_prefix,
        "chunk_prefix": encoder.chunk_prefix,
        **trunk_dropout(config),
    }
    if encoder.path in (MINILM, MINILM_OR_SCRATCH):
        settings |= {name: value for name, value in OF_MINILM.items() if _is_open(encoder, name)}
    return settings


def trunk_dropout(config: ml_collections.ConfigDict) -> dict[str, float]:
    """The shares that the trunk drops in training, by their names in `TextEncoder`.

    Raises:
        InputError: one is no share, or adapters are trained, whose base drops nothing.
    """
    encoder = config.encoder
    hidden, attention = encoder.dropout, encoder.attention_dropout
    shares = {"dropout": hidden, "attention_dropout": hidden if attention is None else attention}
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise InputError(
                f"config.encoder.{name} is {share}; it is the share that the encoder drops in "
                "training, so give a number from 0 to below 1."
            )
    lora = encoder.get("lora", {})  # which the config of an older run may lack
    if any(shares.values()) and (lora.get("rank") or lora.get("path")):
        raise InputError(
            f"config.encoder.dropout is {hidden} and attention_dropout {attention}, but adapters "
            "are trained, whose frozen encoder drops nothing; set config.encoder.lora.dropout "
            "instead."
        )
    return shares


def settled(config: ml_collections.ConfigDict, encoder: TextEncoder) -> ml_collections.ConfigDict:
    """A copy of the config that says what `encoder` does where `config` leaves it open."""
    result = config.copy_and_resolve_references()
    for name in LEFT_OPEN:
        result.encoder[name] = getattr(encoder, name)
    return result


def fill_from_saved(config: ml_collections.ConfigDict, saved: ml_collections.ConfigDict) -> None:
    """Fills what `config` leaves open with what was settled when the run began."""
    for name in LEFT_OPEN:
        if _is_open(config.encoder, name):
            config.encoder[name] = saved.encoder[name]


def fill_older_run(saved: dict[str, Any], folder: Path) -> None:
    """Settles the parsed config of a run that began before folders were asked, by its family.

    Args:
        folder: the run's encoder; where there is none, nothing was trained and nothing is done.
    """
    if not (folder / "config.json").is_file():
        return
    family = family_of(read_config(folder), str(folder / "config.json"))
    own = {"pooling": family.pooling, "normalise": family.normalise, "scale": UNNORMALISED_SCALE}
    for name, value in own.items():
        if _is_open(saved["encoder"], name):
            saved["encoder"][name] = value


def _is_open(encoder: Any, name: str) -> bool:
    return encoder[name] == LEFT_OPEN[name]
