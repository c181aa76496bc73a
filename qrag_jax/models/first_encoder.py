"""The encoder that a run starts from, kept in the run's folder so that a run is self-contained."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.files.model_folder import open_tensors, read_config, resolve_folder
from qrag_jax.models.files.sentence_transformers import prompts
from qrag_jax.models.pretrained import (
    LoadedEncoder,
    load_encoder,
    save_adapters,
    save_encoder,
    with_adapters,
    with_lora,
    with_new_adapters,
)
from qrag_jax.models.scratch import make_scratch_folder
from qrag_jax.runtime import hosts, retriever_config
from qrag_jax.runtime.platform import Platform
from qrag_jax.runtime.pretrained_files import HUB_NAME, MINILM, MINILM_OR_SCRATCH, find_minilm
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.whole_files import BUILDING_ENCODER, new_folder

FOLDER = "encoder"  # in the run's folder
SECOND = "chunk"  # folder of the tower of chunks, in the encoder's, if it starts from another
ADAPTERS = "adapter"  # folder of the first adapters, in the encoder's folder
# A tensor that only all-MiniLM-L6-v2 has, which its file and a run's copy of it hold alike.
_NORM_OF_MINILM = "encoder.layer.5.output.LayerNorm.weight"
_DIGEST_OF_NORM = "159a9df41d15b7022d136f86a2a2631c4635f9816e957472217077b522bcf52a"


def check_origin(config: EncoderConfig) -> None:
    """Refuses a pretrained encoder that cannot be found, before the data are read."""
    if config.path not in ("", MINILM, MINILM_OR_SCRATCH):
        for folder in _towers(resolve_folder(config.path), config):
            read_config(folder)


def prepare_encoder(
    config: EncoderConfig,
    workdir: Path,
    texts: Iterable[str],
    seed: int,
    *,
    is_kept: bool,
    platform: Platform | None = None,
) -> LoadedEncoder:
    """The encoder that the run in `workdir` starts from; it is kept in the run's folder.

    `config.path` is a folder, a hub name, "minilm" (see `find_minilm`), "minilm-or-scratch", or
    "" for a small encoder from scratch, whose tokenizer is trained on `texts`. The folder may be an
    export, from whose two towers the two of the run start. With LoRA the
    first adapters are kept in the encoder's folder.

    Args:
        seed: of random weights and new adapters.
        is_kept: whether the run has begun; an encoder in its folder is then used as it is.
        platform: the devices that compute; None: those of this process.
    """
    folder, settings = workdir / FOLDER, config.load_settings | {"platform": platform}

    def build() -> None:
        if not is_kept or not folder.exists():
            _build(config, folder, texts, seed, settings)

    hosts.first_does(build)
    return _kept_encoder(folder, settings)  # weights are read lazily, from this path


def _build(
    config: EncoderConfig,
    folder: Path,
    texts: Iterable[str],
    seed: int,
    settings: Mapping[str, Any],
) -> None:
    workdir = folder.parent
    shutil.rmtree(folder, ignore_errors=True)  # left by a start that was refused: never trained
    workdir.mkdir(parents=True, exist_ok=True)
    building = new_folder(workdir, BUILDING_ENCODER)
    try:
        origin = _pretrained_folder(config.path)
        if origin is None:
            make_scratch_folder(building, texts, config.scratch, seed)
        else:
            state, *chunk = _towers(origin, config)
            save_encoder(load_encoder(state, **settings), state, building)
            for second in chunk:
                save_encoder(load_encoder(second, **settings), second, building / SECOND)
            _tell_prompts(origin, config)
        loaded = with_first_adapters(config, load_encoder(building, **settings), seed)
        if loaded.adapters is not None:
            save_adapters(loaded, loaded.adapters, building / ADAPTERS)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _towers(folder: Path, config: EncoderConfig) -> list[Path]:
    """The folder of an encoder; of an export, those of its two towers."""
    if not (folder / retriever_config.NAME).is_file():
        return [folder]
    exported = RetrieverConfig.read(folder)
    for name in ("state", "chunk"):
        prefix, trained = getattr(config, f"{name}_prefix"), getattr(exported, name).prefix
        if prefix != trained:
            raise InputError(
                f"config.encoder.{name}_prefix is {prefix!r}, but {folder} was trained with "
                f"{trained!r}; set it so."
            )
    return [folder / exported.state.folder, folder / exported.chunk.folder]


def origin(path: str, workdir: Path) -> str:
    """What the encoder of the run in `workdir` was made from: a folder or hub name; "": nothing.

    Args:
        path: `config.encoder.path`. "minilm-or-scratch" leaves open which of both it was, which
            the weights tell.
    """
    if path not in (MINILM, MINILM_OR_SCRATCH):
        return path
    norm = open_tensors(workdir / FOLDER).get(_NORM_OF_MINILM)
    own = norm is not None and hashlib.sha256(np.asarray(norm).tobytes()).hexdigest()
    return HUB_NAME if own == _DIGEST_OF_NORM else ""


def with_first_adapters(config: EncoderConfig, loaded: LoadedEncoder, seed: int) -> LoadedEncoder:
    """The encoder with the adapters that training starts from, if the config asks for any.

    Adapters from a folder keep the folder's rank, alpha and targets, but use the config's dropout.
    """
    new, path = config.lora.sizes, config.lora.path
    if not path:
        return with_new_adapters(loaded, new, seed) if new else loaded
    loaded = with_adapters(loaded, Path(path).expanduser())
    assert loaded.lora is not None  # for mypy: there are adapters now
    if new and new.rank != loaded.lora.rank:
        raise InputError(
            f"config.encoder.lora.rank is {new.rank}, but the adapters of {path} have rank "
            f"{loaded.lora.rank}; leave it 0 to start from them."
        )
    dropout = config.lora.dropout
    return with_lora(loaded, dataclasses.replace(loaded.lora, dropout=dropout))


def _kept_encoder(folder: Path, settings: Mapping[str, Any]) -> LoadedEncoder:
    loaded, adapters = load_encoder(folder, **settings), folder / ADAPTERS
    if (folder / SECOND).exists():
        second = load_encoder(folder / SECOND, **settings).stored
        loaded = dataclasses.replace(loaded, second=second)
    return with_adapters(loaded, adapters) if adapters.exists() else loaded


def _tell_prompts(folder: Path, config: EncoderConfig) -> None:
    """Prints the model's prompts (texts that precede inputs) if the config sets no prefix."""
    found = prompts(folder)
    if found and not config.state_prefix and not config.chunk_prefix:
        texts = ", ".join(f"{name} {text!r}" for name, text in found.items())
        print(
            f"The model's prompts are not used ({texts}); config.encoder.state_prefix and "
            "config.encoder.chunk_prefix begin texts with one."
        )


def _pretrained_folder(path: str) -> Path | None:
    if not path:
        return None
    if path not in (MINILM, MINILM_OR_SCRATCH):
        return resolve_folder(path)
    folder = find_minilm()
    if folder is None and path == MINILM:
        raise InputError(
            f"config.encoder.path is {MINILM!r}, but the model was found nowhere; give the folder "
            f"of another encoder, or the hub name {HUB_NAME}."
        )
    if folder is None:
        print("Training a small encoder from scratch instead.")
    return folder
