"""Qwen3 in Flax (Yang et al., arXiv 2505.09388): the trunk of Qwen3-Embedding (arXiv 2506.05176).

It is a decoder: each token sees itself and earlier tokens, so a row's last hidden state is the
row's vector. There are no biases by default, queries and keys are normalised head by head, and a
few query heads share one key head. Qwen2.5 and Llama 3 are the same but for what their configs say
(`llama`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError
from qrag_jax.models.compute.dropout import TokenDropout
from qrag_jax.models.compute.group import Group
from qrag_jax.models.compute.linear import Linear, side_by_side
from qrag_jax.models.compute.packing import Layout, padded_layout
from qrag_jax.models.compute.parts import SplitMaps
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.compute.sharing import shared_attention
from qrag_jax.models.files.weight_names import DENSE_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.trunk import (
    LAYERS,
    WORDS,
    LayeredTrunk,
    Params,
    given_fields,
)
from qrag_jax.runtime.sharding import split_rules

# Maps that are stored separately, as in every Qwen3 folder, but computed as one.
FUSED = {"query_key_value": ("query", "key", "value"), "gate_up": ("gate", "up")}
QKV, GATE_UP = FUSED
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


class Qwen3Layer(nn.Module):
    """Causal self-attention and a SwiGLU feed-forward, each after a norm, with a residual sum."""

    config: Qwen3Config
    precision: Precision
    group: Group = Group()

    def setup(self) -> None:
        c, parts = self.config, self.group.tensor
        bias, output_bias = c.biases
        self.heads = c.num_attention_heads // parts
        self.groups = c.num_key_value_heads // parts
        self.query_key_value = self._linear((self.heads + 2 * self.groups) * c.head_dim, bias)
        self.attention_output = self._linear(c.hidden_size, output_bias, closes=True)
        self.gate_up = self._linear(2 * c.intermediate_size // parts)
        self.down = self._linear(c.hidden_size, closes=True)
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

    def _linear(self, features: int, bias: bool = False, *, closes: bool = False) -> Linear:
        return Linear(features, self.precision.products, bias, self.group, closes)

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


class Qwen3(LayeredTrunk):
    """Qwen3: packed word vectors to normed last hidden states, as a language-model head takes.

    Attributes:
        own_head: whether the parameters hold a head beside the word table (`HEAD`).
    """

    SPLIT: ClassVar[SplitMaps] = SplitMaps(
        columns=sum(FUSED.values(), ()),
        rows=("attention_output", "down"),
        norms=("query_norm", "key_norm"),
        tables=(WORDS, HEAD),
    )

    config: Qwen3Config
    own_head: bool = False

    def layer(self) -> Qwen3Layer:
        """The module of every layer, without a parent."""
        return Qwen3Layer(self.config, self.precision, self.group, parent=None)

    def shared_sizes(self) -> dict[str, int]:
        """Sizes that a tensor axis must divide, by their name in `config.json`."""
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        return {name: getattr(self.config, name) for name in names}

    def setup(self) -> None:
        c = self.config
        self.make_words()
        if self.own_head and self.is_initializing():
            sizes = c.vocab_size, c.hidden_size
            self.param(HEAD, nn.initializers.normal(0.02), sizes)
        self.layers = self.layers_params()
        self.final_norm = rms_norm(c, self.precision)

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states of `words` `[T, H]`: rows of the word table, placed as in `layout`.

        Returns:
            Hidden states `[T, H]`; at unused places they are finite but meaningless.
        """
        c = self.config
        last = layout.place.shape[1] - 1
        cos, sin = angles_at(layout.position, c.frequency, last)
        x = words.astype(self.precision.activations)
        return self.normed(self.through_layers(self.layers, x, layout, (cos, sin)))

    def normed(self, x: jax.Array) -> jax.Array:
        """What the last layer gives `[T, H]` → hidden states `[T, H]`."""
        return self.final_norm(x)

    def join(self, layer: Params) -> Params:
        """Joins the maps that are stored separately into the `FUSED` maps."""
        for fused, names in FUSED.items():
            layer[fused] = side_by_side([layer.pop(name) for name in names])
        return layer

    def split(self, layer: Params) -> Params:
        """The inverse of `join`."""
        c = self.config
        heads, groups, inner = (
            size // self.group.tensor
            for size in (
                c.num_attention_heads * c.head_dim,
                c.num_key_value_heads * c.head_dim,
                c.intermediate_size,
            )
        )
        ends = {QKV: (heads, heads + groups), GATE_UP: (inner,)}
        for fused, names in FUSED.items():
            leaves = layer.pop(fused).items()
            parts = {leaf: jnp.split(array, ends[fused], -1) for leaf, array in leaves}
            for j, name in enumerate(names):
                layer[name] = {leaf: part[j] for leaf, part in parts.items()}
        return layer


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

# How parameters are split over a mesh (see `runtime.sharding`).
PARTITION_RULES = split_rules(Qwen3.SPLIT.columns, Qwen3.SPLIT.rows)
