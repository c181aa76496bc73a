"""Qwen3 and its kin: decoders, as language models and as the trunk of Qwen3-Embedding.

In Qwen3 (Yang et al., arXiv 2505.09388; Qwen3-Embedding: arXiv 2506.05176) there are no biases by
default, queries and keys are normalised head by head, and a few query heads share one key head.
Llama 3 (Grattafiori et al., arXiv 2407.21783) and its kin, such as SmolLM2, and Qwen2.5 have the
same layers without norms of heads; Qwen2.5 (arXiv 2412.15115) has biases. Llama 3.1 and later turn
slow pairs slower, for longer contexts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError, Positive
from qrag_jax.models.compute.precision import exact
from qrag_jax.models.files.weight_names import name_table
from qrag_jax.models.trunks.transformer import (
    HEAD,
    QKV,
    WORDS,
    Params,
    Size,
    Sizes,
    Transformer,
    frequencies,
    rotation_fields,
)
from qrag_jax.runtime.config_fields import check_value

QWEN3, QWEN2, LLAMA = KINDS = ("qwen3", "qwen2", "llama")  # by the model_type of config.json


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """How slow pairs are slowed down, named as in Hugging Face's `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a rotation."""
        rope, names = f"{where}: rope_parameters", [f.name for f in dataclasses.fields(cls)]
        read = cls(*(check_value(Positive, given.get(n), f"{rope}.{n}") for n in names))
        if read.high_freq_factor <= read.low_freq_factor:
            raise InputError(f"{rope}.high_freq_factor is not above low_freq_factor.")
        return read

    def slowed(self, frequency: np.ndarray) -> np.ndarray:
        """Pairs with few turns in the original context get 1/factor of their frequency.

        Those with many keep it, and in between it goes from the one to the other.
        """
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Sizes):
    """Sizes of a decoder, named and defined as in Hugging Face's `config.json`."""

    CAUSAL: ClassVar[bool] = True
    PRE_NORM: ClassVar[bool] = True
    ROTATES: ClassVar[bool] = True
    GATED_MAP: ClassVar[str] = "gate_up"
    DROPS: ClassVar[tuple[int, ...]] = ()
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        QKV: ("query", "key", "value"),
        "gate_up": ("gate", "up"),
    }
    COLUMNS: ClassVar[tuple[str, ...]] = ("query", "key", "value", "gate", "up")
    ROWS: ClassVar[tuple[str, ...]] = ("attention_output", "down")
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),  # windowed attention
        "mlp_bias": (False, None),
    }
    SPELLINGS: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "layer_norm_eps"}

    num_key_value_heads: Size = dataclasses.field(kw_only=True)
    head_dim: Size = 128
    max_position_embeddings: Size = 32768
    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 1e4
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    model_type: str = QWEN3
    scaling: Llama3Rope | None = None

    @property
    def key_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def norms_heads(self) -> bool:
        return self.model_type == QWEN3

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        if self.model_type == QWEN2:
            return True, False, False
        return self.attention_bias, self.attention_bias, False

    @property
    def norm(self) -> Callable[..., nn.Module]:
        """x / √mean(x²) · scale over the last axis (Zhang & Sennrich, 2019)."""
        return nn.RMSNorm

    @property
    def frequency(self) -> np.ndarray:
        """Radians a position by which each pair of a head's numbers is turned, `[head_dim / 2]`."""
        plain = frequencies(self.rope_theta, self.head_dim)
        return plain if self.scaling is None else self.scaling.slowed(plain)

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        return (self.frequency,)

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Adds the width of a head of Qwen2 or Llama: where it is missing, all heads are H wide."""
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        sized = config.get("head_dim") is not None or config.get("model_type", QWEN3) == QWEN3
        if sized or not isinstance(hidden, int) or not isinstance(heads, int):
            return {**config}
        return {**config, "head_dim": hidden // max(heads, 1)}

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        kinds = config.get("layer_types") or ()
        if not {*kinds} <= {"full_attention"}:
            raise InputError(
                f"{where}: layer_types {kinds!r:.60} ask for windowed attention, which is not "
                "computed here; use a model whose layers all have full attention."
            )
        scaled = "llama3" if config.get("model_type") == LLAMA else ""
        found, scaling = rotation_fields(config, where, scaled)
        return found if scaling is None else found | {"scaling": Llama3Rope.read(scaling, where)}


# A language-model head ("lm_head.weight", of models whose head is not tied to the word table)
# lies outside the trunk and is ignored: an encoder does not need it.
TABLE = name_table(
    {WORDS: "embed_tokens", "final_norm": "norm"},
    "layers.{}.",
    "attention_norm input_layernorm, query self_attn.q_proj, key self_attn.k_proj, "
    "value self_attn.v_proj, query_norm self_attn.q_norm, key_norm self_attn.k_norm, "
    "attention_output self_attn.o_proj, feed_forward_norm post_attention_layernorm, "
    "gate mlp.gate_proj, up mlp.up_proj, down mlp.down_proj",
    trunk=("embed_tokens.", "layers.", "norm."),
    ignored=re.compile(r"rotary_emb\.inv_freq"),  # a buffer, not a weight
    model_type="qwen3",
    architecture="Qwen3Model",
)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Maps rows of tokens to logits of their next tokens.

    Training and sampling never make all logits of a batch: see `policies.tokens`.
    """

    trunk: Transformer  # maps word vectors to hidden states
    stop_ids: tuple[int, ...]  # tokens that end a turn
    max_positions: int  # longest row that the model was made for
    lora_scale: float = 1.0  # factor on the product of an adapter's two matrices, if there are any

    def head(self, params: Params) -> jax.Array:
        """The head `[V, H]`, stored or prepared parameters alike."""
        return params[HEAD] if self.trunk.own_head else params[WORDS]

    def logits(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → float32 `[B, L, V]`.

        `params` are stacked. At positions ≥ length the values are finite but meaningless.
        """
        hidden = self.trunk.hidden_states(params, tokens, lengths)
        return self.logits_of(hidden, self.head(params))

    def logits_of(self, hidden: jax.Array, head: jax.Array) -> jax.Array:
        """Hidden states `[..., H]` → float32 `[..., V]`."""
        products = self.trunk.precision.products
        return jax.lax.dot_general(
            hidden.astype(products),
            head.astype(products),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=exact(products),
            preferred_element_type=jnp.float32,
        )
