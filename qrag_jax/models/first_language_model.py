"""The language model that a run starts from, and the adapters on it that are trained.

A given model stays where it is: the run's folder keeps what is learnt, not a copy of the base. A
tiny model that is made for the run is written into the run's folder.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

from qrag_jax.errors import InputError, Natural, Positive, one_of
from qrag_jax.models.adapters import ALL_LINEAR, LoraConfig, new_adapters
from qrag_jax.models.files.model_folder import resolve_folder
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, load_language_model, table_of
from qrag_jax.models.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.runtime import hosts
from qrag_jax.runtime.platform import Platform

SMOLLM2 = "smollm2"  # in config.model.path: SmolLM2-135M-Instruct
SMOLLM2_FOLDER = "QRAG_SMOLLM2"  # the variable that names its folder
SMOLLM2_CACHE = Path("~/.cache/qrag_jax/models/SmolLM2-135M-Instruct")
FOLDER = "model"  # of a tiny model, in the run's folder
_SECTION = "model"


@dataclasses.dataclass(frozen=True)
class ModelAdaptersConfig:
    """Section `model.lora`: low-rank adapters, trained instead of the model."""

    rank: Natural = 0  # r; 0: train the model itself
    alpha: Positive = 32.0  # an adapter's product is scaled by alpha / r
    # Maps that get an adapter: "all-linear", or names as in the model's files: ("q_proj", "v_proj")
    targets: str | tuple[str, ...] = ALL_LINEAR

    @property
    def sizes(self) -> LoraConfig | None:
        """Sizes of the adapters; None if there are none."""
        if not self.rank:
            return None
        return LoraConfig(self.rank, self.alpha, self.targets, section=_SECTION)


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig:
    """Section `model`."""

    # Folder or hub name of a chat model; "smollm2": see `make llm`; "": the tiny one below
    path: str = ""
    dtype: str = "auto"  # of the computation: float32, bfloat16; auto: the faster one here
    activations: str = "auto"  # float32, bfloat16; auto: as dtype, but float32 on CPU
    remat: str = "none"  # recomputed for gradients: none, layers, dots (all but dot products)
    block_tokens: Natural = 0  # tokens computed at a time; 0: 2048 on CPU, else 16384
    # Turns of thinking, by the chat template's option enable_thinking: on, off; "": as it has it
    thinking: Annotated[str, one_of(("", "on", "off"))] = ""
    lora: ModelAdaptersConfig = dataclasses.field(default_factory=ModelAdaptersConfig)
    tiny: TinyLMConfig = dataclasses.field(default_factory=TinyLMConfig)

    def tokens(self, platform: Platform) -> int:
        """Tokens that are computed at a time."""
        return self.block_tokens or (2048 if platform.on_cpu else 16384)


def named_folder(path: str) -> Path:
    """The folder of a model that a config names."""
    if path != SMOLLM2:
        return resolve_folder(path)
    folder = Path(os.environ.get(SMOLLM2_FOLDER) or SMOLLM2_CACHE).expanduser()
    if not (folder / "config.json").exists():
        raise InputError(
            f"config.model.path is {SMOLLM2!r}, and {folder} holds no model; get it by make llm "
            f"(or python examples/smollm2.py), or set {SMOLLM2_FOLDER} to its folder."
        )
    return folder


def prepare_language_model(
    config: LanguageModelConfig,
    workdir: Path,
    texts: Callable[[], Iterable[str]],
    seed: int,
    *,
    platform: Platform | None = None,
) -> LoadedLanguageModel:
    """The model of the run in `workdir`, and its first adapters, which change no output yet.

    Args:
        texts: the tokenizer of a tiny model is trained on them.
        seed: of random weights and adapters.
    """
    if config.path:
        folder = named_folder(config.path)
    else:
        folder = workdir / FOLDER
        if not (folder / "config.json").exists():
            hosts.first_does(lambda: write_tiny_lm(folder, texts(), config.tiny, seed=seed))
    settings: dict[str, Any] = {"activations": config.activations, "platform": platform}
    loaded = load_language_model(folder, config.dtype, config.remat, **settings)
    if (sizes := config.lora.sizes) is not None:
        table = table_of(loaded.model_config["model_type"])
        adapters = new_adapters(table, loaded.model.trunk, sizes, seed)
        model = dataclasses.replace(loaded.model, lora_scale=sizes.scale)
        loaded = dataclasses.replace(loaded, model=model, adapters=adapters)
    if not loaded.tokenizer.chat_template:
        raise InputError(
            f"{folder}: the tokenizer has no chat template; use the folder of a chat model, or add "
            "a chat_template.jinja."
        )
    return loaded
