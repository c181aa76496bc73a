"""Which encoder is trained, and how it computes."""

from __future__ import annotations

import dataclasses
from typing import Any

from qrag_jax.errors import Count, InputError, Natural, Positive
from qrag_jax.models.adapters import ALL_LINEAR, LoraConfig
from qrag_jax.models.heads.embedding import MEAN
from qrag_jax.models.pretrained import UNNORMALISED_SCALE
from qrag_jax.models.scratch import ScratchConfig
from qrag_jax.runtime.pretrained_files import MINILM, MINILM_OR_SCRATCH

# Fields that a config may leave to the model's folder, with the values that mean so. When a run
# begins, the folder's settings are saved in the run's config. The run never asks the folder again.
LEFT_OPEN: dict[str, Any] = {"pooling": "", "normalise": None, "scale": None}
# MiniLM was published with normalised vectors. Here its vectors are made as in Q-RAG's BERT towers.
OF_MINILM: dict[str, Any] = {"pooling": MEAN, "normalise": False, "scale": UNNORMALISED_SCALE}


@dataclasses.dataclass(frozen=True)
class AdaptersConfig:
    """Section `encoder.lora`: low-rank adapters, trained instead of the encoder."""

    rank: Natural = 0  # r; 0: train the encoder itself
    alpha: Positive = 16.0  # an adapter's product is scaled by alpha / r
    dropout: float = 0.0  # share of an adapter's inputs that training drops
    # Maps that get an adapter: "all-linear", or names as in the model's files: ("query", "value")
    targets: str | tuple[str, ...] = ALL_LINEAR
    path: str = ""  # PEFT folder to start from; its rank, alpha and targets are used

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

    @property
    def are_trained(self) -> bool:
        """Whether there are adapters."""
        return bool(self.rank or self.path)

    @property
    def sizes(self) -> LoraConfig | None:
        """Sizes of new adapters; None if no new adapters are made."""
        if not self.rank:
            return None
        return LoraConfig(self.rank, self.alpha, self.targets, self.dropout)


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Section `encoder`."""

    path: str = "facebook/contriever"  # folder, hub name, "minilm", or "": from scratch
    dtype: str = "auto"  # of the computation: float32, bfloat16; auto: the faster one here
    activations: str = "auto"  # float32, bfloat16; auto: as dtype, but float32 on CPU
    remat: str = "none"  # recomputed for gradients: none, layers, dots (all but dot products)
    # How a row's hidden states become a vector. "" and None: as the model's folder says; "minilm"
    # and folders that say nothing: the mean times 0.1 as in Q-RAG (Qwen3: last, normalised).
    pooling: str = ""  # mean, last, cls
    normalise: bool | None = None  # scale the pooled vector to length 1
    scale: float | None = None  # factor on the vector; None: 1 if normalised, else 0.1
    state_prefix: str = ""  # text that states begin with, such as "query: "
    chunk_prefix: str = ""  # text that chunks begin with, such as "passage: "
    # Shares that the trunk drops in training, in online and target towers (Q-RAG: 0.1).
    dropout: float = 0.0  # of hidden states: embeddings, outputs of attention and feed-forward
    attention_dropout: float | None = None  # of attention weights; None: the same as dropout
    length_buckets: Count = 3  # number of row lengths that attention is compiled for
    block_tokens: Natural = 0  # tokens computed at a time; 0: 512 on CPU, else 8192
    block_sizes: Count = 2  # number of block sizes compiled, each half of the next
    lora: AdaptersConfig = dataclasses.field(default_factory=AdaptersConfig)
    scratch: ScratchConfig = dataclasses.field(default_factory=ScratchConfig)  # if path is ""

    def __post_init__(self) -> None:
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
        """The settings with which `load_encoder` reads the model's folder."""
        names = ("dtype", "activations", "remat", *LEFT_OPEN, "state_prefix", "chunk_prefix")
        settings = {name: getattr(self, name) for name in names} | self.trunk_dropout
        if self.path in (MINILM, MINILM_OR_SCRATCH):
            settings |= {
                name: value
                for name, value in OF_MINILM.items()
                if getattr(self, name) == LEFT_OPEN[name]
            }
        return settings
