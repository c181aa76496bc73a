"""Which encoder is trained, and how it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

from qrag_jax.errors import InputError, check_least
from qrag_jax.models.adapters import ALL_LINEAR, LoraConfig
from qrag_jax.models.heads.embedding import MEAN
from qrag_jax.models.pretrained import UNNORMALISED_SCALE
from qrag_jax.models.scratch import ScratchConfig
from qrag_jax.runtime.minilm import MINILM, MINILM_OR_SCRATCH

# What a config leaves to the model's folder. It is settled when a run begins, and the run's saved
# config holds what it came to: a run never asks the folder again.
LEFT_OPEN: dict[str, Any] = {"pooling": "", "normalise": None, "scale": None}
# MiniLM was published with normalised vectors; here it is used as Q-RAG uses BERTs.
OF_MINILM: dict[str, Any] = {"pooling": MEAN, "normalise": False, "scale": UNNORMALISED_SCALE}


@dataclasses.dataclass(frozen=True)
class AdaptersConfig:
    """Section `encoder.lora`: low-rank adapters, trained instead of the encoder.

    Raises:
        InputError: a size makes no sense, or dropout has no adapters to act on.
    """

    rank: int = 0  # r, 0: the encoder itself is trained
    alpha: float = 16.0  # an adapter's product is scaled by alpha / r
    dropout: float = 0.0  # share of an adapter's inputs dropped, in training alone
    # Linear maps that get one: "all-linear", or names as in the model's files: ("query", "value")
    targets: str | tuple[str, ...] = ALL_LINEAR
    path: str = ""  # PEFT folder to start from, whose rank, alpha, targets hold

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InputError(
                f"config.encoder.lora.dropout is {self.dropout}; it is the share of an adapter's "
                "inputs dropped in training, so give a number from 0 to below 1."
            )
        if self.dropout and not self.are_trained:
            raise InputError(
                f"config.encoder.lora.dropout is {self.dropout}, but there are no adapters for it "
                "to act on; set config.encoder.lora.rank, too."
            )
        if self.rank < 0 or not self.alpha > 0:
            raise InputError(
                f"config.encoder.lora.rank is {self.rank} and alpha {self.alpha}; rank must be at "
                "least 0 (no adapters), alpha above 0."
            )

    @property
    def are_trained(self) -> bool:
        """Whether there are adapters."""
        return bool(self.rank or self.path)

    @property
    def sizes(self) -> LoraConfig | None:
        """Those of new adapters; None where none are to be made."""
        if not self.rank:
            return None
        return LoraConfig(self.rank, self.alpha, self.targets, self.dropout)


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Section `encoder`.

    Raises:
        InputError: a field cannot be used.
    """

    path: str = "facebook/contriever"  # folder, hub name, "minilm", or "": from scratch
    dtype: str = "auto"  # of the computation: float32, bfloat16; auto: as the device is
    remat: str = "none"  # computed again for gradients: none, dots (all but), layers
    # How a row's hidden states become its vector. "" and None: as the model's folder says; "minilm"
    # and folders that say nothing: as Q-RAG does (the mean, times 0.1; the last one of Qwen3).
    pooling: str = ""  # mean, last, cls
    normalise: bool | None = None  # the pooled vector to length 1
    scale: float | None = None  # factor on it; None: 1 if normalised, else 0.1
    state_prefix: str = ""  # text that states begin with, such as "query: "
    chunk_prefix: str = ""  # text that chunks begin with, such as "passage: "
    # Shares that the trunk drops in training, in the online and the target towers (Q-RAG: 0.1).
    dropout: float = 0.0  # of hidden states: embeddings, and what blocks add to them
    attention_dropout: float | None = None  # of attention's weights; None: the same
    length_buckets: int = 3  # row lengths that attention is compiled for
    block_tokens: int = 0  # tokens computed at a time; 0: 512 on CPU, else 8192
    block_sizes: int = 2  # block sizes compiled, each half of the next
    lora: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    scratch: ScratchConfig | None = None  # sizes of an encoder from scratch

    def __post_init__(self) -> None:
        check_least("encoder", self, length_buckets=1, block_tokens=0, block_sizes=1)
        for name, share in self.trunk_dropout.items():
            if not 0 <= share < 1:
                raise InputError(
                    f"config.encoder.{name} is {share}; it is the share that the encoder drops in "
                    "training, so give a number from 0 to below 1."
                )
        if any(self.trunk_dropout.values()) and self.lora.are_trained:
            raise InputError(
                f"config.encoder.dropout is {self.dropout} and attention_dropout "
                f"{self.trunk_dropout['attention_dropout']}, but adapters are trained, whose "
                "frozen encoder drops nothing; set config.encoder.lora.dropout instead."
            )

    @property
    def trunk_dropout(self) -> dict[str, float]:
        """The shares that the trunk drops in training, by their names in `TextEncoder`."""
        attention = self.attention_dropout
        return {
            "dropout": self.dropout,
            "attention_dropout": self.dropout if attention is None else attention,
        }

    @property
    def load_settings(self) -> dict[str, Any]:
        """How `load_encoder` is to read the model's folder."""
        names = ("dtype", "scale", "remat", "pooling", "normalise", "state_prefix", "chunk_prefix")
        settings = {name: getattr(self, name) for name in names} | self.trunk_dropout
        if self.path in (MINILM, MINILM_OR_SCRATCH):
            settings |= {
                name: value
                for name, value in OF_MINILM.items()
                if getattr(self, name) == LEFT_OPEN[name]
            }
        return settings
