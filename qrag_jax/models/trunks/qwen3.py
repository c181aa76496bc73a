"""Qwen3 in Flax (Yang et al., arXiv 2505.09388): the trunk of Qwen3-Embedding (arXiv 2506.05176).

It is a decoder: each token sees itself and earlier tokens, so a row's last hidden state is the
row's vector. There are no biases by default, queries and keys are normalised head by head, and a
few query heads share one key head.

Llama 3 (Grattafiori et al., arXiv 2407.21783) and its kin, such as SmolLM2, and Qwen2.5 have the
same layers without norms of heads; Qwen2.5 (arXiv 2412.15115) has biases. Llama 3.1 and later turn
slow pairs slower, for longer contexts.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.compute.dropout import TokenDropout
from qrag_jax.models.compute.linear import Linear
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.compute.precision import Precision, exact
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.compute.sharing import shared_attention
from qrag_jax.models.files.weight_names import DENSE_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.trunk import (
    LAYERS,
    WORDS,
    Params,
    Trunk,
    given_fields,
)

QKV, GATE_UP = "query_key_value", "gate_up"
ROPE = ("rope_parameters", "rope_scaling")  # where configs describe the rotation
ROPE_FIELDS = {"rope_theta", "rope_type", "type"}  # fields of a rotation without scaling
HEAD = "lm_head"  # leaf of a trunk's parameters: the head, [V, H], if it is not the word table


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3 model, named and defined as in Hugging Face's `config.json`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    head_dim: int = 128
    max_position_embeddings: int = 32768
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    NORMS_HEADS: ClassVar[bool] = True  # whether queries and keys are normalised head by head

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether attention's output has one."""
        return self.attention_bias, self.attention_bias

    @property
    def frequency(self) -> np.ndarray:
        """Radians a position by which each pair of a head's numbers is turned, `[head_dim / 2]`."""
        places = np.arange(0, self.head_dim, 2, dtype=np.float64)
        return self.rope_theta ** (-places / self.head_dim)

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row the model was made for."""
        return self.max_position_embeddings

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        result = cls(**given_fields(cls, config, where) | cls.rope_fields(config, where))
        if config.get("hidden_act", "silu") != "silu":
            raise InputError(f"{where}: hidden_act {config['hidden_act']!r} is not 'silu'.")
        windows = set(config.get("layer_types") or ()) - {"full_attention"}
        if config.get("use_sliding_window") or windows:
            raise InputError(
                f"{where}: use_sliding_window and layer_types ask for windowed attention, which is "
                "not supported; use a model whose layers all have full attention."
            )
        if result.num_attention_heads % result.num_key_value_heads:
            raise InputError(
                f"{where}: num_attention_heads {result.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {result.num_key_value_heads}."
            )
        if result.head_dim % 2:
            raise InputError(f"{where}: head_dim {result.head_dim} is odd; rotation takes pairs.")
        return result

    @classmethod
    def rope_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields that `rope_parameters` or `rope_scaling` holds; refuses scaled positions."""
        theta: dict[str, Any] = {}
        for name in ROPE:
            rope = config.get(name) or {}
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default" or not rope.keys() <= ROPE_FIELDS:
                raise InputError(
                    f"{where}: {name} of type {kind!r} is not supported; use the model without "
                    "scaled positions (rope_type 'default')."
                )
            theta |= {"rope_theta": float(rope["rope_theta"])} if "rope_theta" in rope else {}
        return theta


@dataclasses.dataclass(frozen=True)
class Qwen2Config(Qwen3Config):
    """Sizes of a Qwen2 or Qwen2.5 model, named as in Hugging Face's `config.json`."""

    NORMS_HEADS: ClassVar[bool] = False

    @property
    def biases(self) -> tuple[bool, bool]:
        """Queries, keys and values have biases; attention's output has none."""
        return True, False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """See `Qwen3Config.from_dict`; a head is a part of the hidden size."""
        return super().from_dict(with_head_dim(config), where)


def with_head_dim(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed `config.json` that says how wide a head is; where it does not, all heads are H."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int):
        return {**config, "head_dim": hidden // max(heads, 1)}
    return {**config}


LLAMA3 = "llama3"


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """How slow pairs are slowed down, named as in Hugging Face's `config.json`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def slowed(self, frequency: np.ndarray) -> np.ndarray:
        """Pairs with few turns in the original context get 1/factor of their frequency.

        Those with many keep it, and in between it goes from the one to the other.
        """
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Qwen3Config):
    """Sizes of a Llama model, named as in Hugging Face's `config.json`."""

    scaling: Llama3Rope | None = None

    NORMS_HEADS: ClassVar[bool] = False

    @property
    def frequency(self) -> np.ndarray:
        """See `Qwen3Config.frequency`."""
        plain = super().frequency
        return plain if self.scaling is None else self.scaling.slowed(plain)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """See `Qwen3Config.from_dict`; a head is a part of the hidden size."""
        if config.get("mlp_bias"):
            raise InputError(
                f"{where}: mlp_bias is set, but biases of the feed-forward are not supported; use "
                "a model without them."
            )
        return super().from_dict(with_head_dim(config), where)

    @classmethod
    def rope_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Also reads the scaling of Llama 3.1."""
        plain, found = dict(config), {}
        for name in ROPE:
            rope = dict(config.get(name) or {})
            if rope.get("rope_type", rope.get("type")) != LLAMA3:
                continue
            fields = [field.name for field in dataclasses.fields(Llama3Rope)]
            values = {field: rope.pop(field, None) for field in fields}
            fits = all(isinstance(value, int | float) and value > 0 for value in values.values())
            if not fits or values["high_freq_factor"] <= values["low_freq_factor"]:
                raise InputError(
                    f"{where}: {name} of type {LLAMA3!r} needs numbers above 0 for "
                    f"{', '.join(fields)}, the high factor above the low one; copy it from the "
                    "model's own config.json."
                )
            found["scaling"] = Llama3Rope(**values)
            plain[name] = rope | {"rope_type": "default"}
            plain[name].pop("type", None)
        return super().rope_fields(plain, where) | found


class Qwen3Layer(nn.Module):
    """Causal self-attention and a SwiGLU feed-forward, each after a norm, with a residual sum."""

    config: Qwen3Config
    precision: Precision

    def setup(self) -> None:
        c = self.config
        bias, output_bias = c.biases
        self.heads = c.num_attention_heads
        self.groups = c.num_key_value_heads
        self.query_key_value = self._linear((self.heads + 2 * self.groups) * c.head_dim, bias)
        self.attention_output = self._linear(c.hidden_size, output_bias)
        self.gate_up = self._linear(2 * c.intermediate_size)
        self.down = self._linear(c.hidden_size)
        self.attention_norm, self.feed_forward_norm = self._norm(), self._norm()
        if c.NORMS_HEADS:
            self.query_norm, self.key_norm = self._norm(), self._norm()

    def __call__(self, x: jax.Array, layout: Layout, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout`; cos, sin `[T, head_dim/2]` → `[T, H]`."""
        heads = self.projected(x, cos, sin, layout.dropout)
        attended = shared_attention(*heads, layout, self.precision)
        return self.after_attention(x, attended, layout.dropout)

    def projected(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, dropout: TokenDropout | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x `[T, H]` → queries `[T, heads, head_dim]`, keys and values `[T, groups, head_dim]`.

        Queries and keys are turned by the angles of their positions.
        """
        heads, groups = self.heads, self.groups
        projected = self.query_key_value(self.attention_norm(x), dropout)
        projected = projected.reshape(len(x), heads + 2 * groups, self.config.head_dim)
        query, key, value = jnp.split(projected, (heads, heads + groups), axis=1)
        if self.config.NORMS_HEADS:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate_halves(query, cos, sin), rotate_halves(key, cos, sin), value

    def after_attention(
        self, x: jax.Array, attended: jax.Array, dropout: TokenDropout | None = None
    ) -> jax.Array:
        """x `[T, H]` and what its heads attended to `[T, heads · head_dim]` → `[T, H]`."""
        x = x + self.attention_output(attended, dropout)
        both = self.gate_up(self.feed_forward_norm(x), dropout)
        gate, up = jnp.split(both, 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up, dropout)

    def _linear(self, features: int, bias: bool = False) -> Linear:
        return Linear(features, self.precision.products, bias)

    def _norm(self) -> nn.RMSNorm:
        return rms_norm(self.config, self.precision)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        x, angle = jnp.zeros((1, self.config.hidden_size)), jnp.zeros(self.config.head_dim // 2)
        layout = padded_layout(jnp.ones(1, jnp.int32), 1)
        return self.init(key, x, layout, angle[None], angle[None])["params"]


def rms_norm(config: Qwen3Config, precision: Precision) -> nn.RMSNorm:
    """x / √mean(x²) · scale over the last axis (Zhang & Sennrich, 2019).

    Flax computes it in float32 for every dtype.
    """
    return nn.RMSNorm(epsilon=config.rms_norm_eps, dtype=precision.activations)


class Qwen3(Trunk):
    """Qwen3: packed word vectors to normed last hidden states, as a language-model head takes.

    Attributes:
        own_head: whether the parameters hold a head beside the word table (`HEAD`).
    """

    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        QKV: ("query", "key", "value"),
        GATE_UP: ("gate", "up"),
    }
    COLUMNS: ClassVar[tuple[str, ...]] = ("query", "key", "value", "gate", "up")
    ROWS: ClassVar[tuple[str, ...]] = ("attention_output", "down")

    config: Qwen3Config
    own_head: bool = False

    def layer(self) -> Qwen3Layer:
        """The module of every layer, without a parent."""
        return Qwen3Layer(self.config, self.precision, parent=None)

    def setup(self) -> None:
        c = self.config
        self.make_words()
        if self.own_head and self.is_initializing():
            sizes = c.vocab_size, c.hidden_size
            self.param(HEAD, nn.initializers.normal(0.02), sizes)
        self.layers = self.layers_params()
        self.final_norm = rms_norm(c, self.precision)

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states `[T, H]` of `words` `[T, H]`, placed as in `layout`; see `Trunk`."""
        c = self.config
        last = layout.place.shape[1] - 1
        cos, sin = angles_at(layout.position, c.frequency, last)
        x = words.astype(self.precision.activations)
        return self.normed(self.through_layers(self.layers, x, layout, (cos, sin)))

    def normed(self, x: jax.Array) -> jax.Array:
        """What the last layer gives `[T, H]` → hidden states `[T, H]`."""
        return self.final_norm(x)

    def ends(self, fused: str) -> tuple[int, ...]:
        """Where a map of `FUSED` is cut."""
        c = self.config
        if fused == GATE_UP:
            return (c.intermediate_size,)
        heads, groups = c.num_attention_heads, c.num_key_value_heads
        return heads * c.head_dim, (heads + groups) * c.head_dim


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """Maps rows of tokens to logits of their next tokens.

    Training and sampling never make all logits of a batch: see `policies.tokens`.

    Attributes:
        trunk: maps word vectors to hidden states.
        stop_ids: tokens that end a turn.
        max_positions: longest row that the model was made for.
        lora_scale: factor on the product of an adapter's two matrices, if there are adapters.
    """

    trunk: Qwen3
    stop_ids: tuple[int, ...]
    max_positions: int
    lora_scale: float = 1.0

    def init(self, key: jax.Array) -> Params:
        """Random parameters, layers stacked."""
        return self.trunk.init_params(key)

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


# Our module → Hugging Face's module.
LAYER_DENSE = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
LAYER_NORM = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
LAYER = "layers.{}."
SCALE = {"scale": "weight"}

# A language-model head ("lm_head.weight", of models whose head is not tied to the word table)
# lies outside the trunk and is ignored: an encoder does not need it.
TABLE = NameTable(
    names={(WORDS,): "embed_tokens.weight"}
    | module_names((), "", {"final_norm": "norm"}, SCALE)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, DENSE_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_NORM, SCALE),
    prefixes=("", "model.", "0.auto_model."),
    trunk=("embed_tokens.", "layers.", "norm."),
    ignored=re.compile(r"rotary_emb\.inv_freq"),  # a buffer, not a weight
    model_type="qwen3",
    architecture="Qwen3Model",
)
