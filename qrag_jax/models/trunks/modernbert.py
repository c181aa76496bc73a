"""ModernBERT in Flax (Warner et al., arXiv 2412.13663), also of modernbert-embed-base.

Norms come before attention and feed-forward and have no biases, nor have the linear maps. Queries
and keys are rotated. In most layers a token sees only its neighbours; these layers turn positions
faster than the others. The feed-forward is gated: the first half of its map is activated, the
second half multiplies. The first layer has no norm before attention, because the embeddings were
normed just before. Its place in the stacked parameters holds ones, which are neither used nor
written to files.
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
from qrag_jax.models.compute.attention import Window, padded_attention
from qrag_jax.models.compute.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    GATED,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.group import Group
from qrag_jax.models.compute.linear import Linear
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, to_rows
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.files.weight_names import NameTable, module_names
from qrag_jax.models.trunks.gte import ACTIVATIONS
from qrag_jax.models.trunks.trunk import LAYERS, WORDS, LayeredTrunk, Params, given_fields
from qrag_jax.runtime.sharding import ALL_SPLIT

QKV, GATE_UP = "query_key_value", "gate_up"
GLOBAL, LOCAL = LAYER_TYPES = ("full_attention", "sliding_attention")
# Kind of layer → the field of older files that holds its theta.
THETAS = {GLOBAL: "global_rope_theta", LOCAL: "local_rope_theta"}


@dataclasses.dataclass(frozen=True)
class ModernBertConfig:
    """Sizes of a ModernBERT encoder, named as in Hugging Face's `config.json`.

    Attributes:
        local_attention: in a local layer a token sees half as many tokens before and behind it.
        layer_types: a name of `LAYER_TYPES` for each layer.
    """

    model_types: ClassVar[tuple[str, ...]] = ("modernbert",)

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    hidden_activation: str = "gelu"
    local_attention: int = 128
    global_rope_theta: float = 160_000.0
    local_rope_theta: float = 10_000.0
    layer_types: tuple[str, ...] = ()

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row the model was made for."""
        return self.max_position_embeddings

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    def frequencies(self, theta: float) -> np.ndarray:
        """Radians per position of each pair of a head's numbers, float64 `[head_dim / 2]`."""
        return theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        given = given_fields(cls, config, where)
        for name, known in (
            ("model_type", cls.model_types),
            ("hidden_activation", tuple(ACTIVATIONS)),
            ("norm_bias", (False,)),
            ("attention_bias", (False,)),
            ("mlp_bias", (False,)),
        ):
            value = config.get(name, known[0])
            if value not in known:
                them = ", ".join(map(repr, known))
                raise InputError(f"{where}: {name} {value!r} is not computed here, only {them}.")
        given |= _thetas(config, where)
        result = cls(**given | {"layer_types": _layer_types(config, given, where)})
        if result.hidden_size % (2 * result.num_attention_heads):
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} does not split into "
                f"{result.num_attention_heads} heads of even width (num_attention_heads)."
            )
        if result.local_attention < 1:
            raise InputError(
                f"{where}: local_attention is {result.local_attention}; it must be at least 1, so "
                "copy it from the model's own config.json."
            )
        return result


def _layer_types(
    config: Mapping[str, Any], given: Mapping[str, Any], where: str
) -> tuple[str, ...]:
    """The kind of each layer, in either spelling: a list, or every how many layers one is global.

    By the second, the first layer is global.
    """
    count, kinds = given["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        every = config.get("global_attn_every_n_layers", 3)
        if type(every) is not int or every < 1:
            raise InputError(
                f"{where}: global_attn_every_n_layers is {every!r:.60}; it must be a whole number "
                "of at least 1."
            )
        return tuple(LOCAL if number % every else GLOBAL for number in range(count))
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {*LAYER_TYPES}:
        raise InputError(
            f"{where}: layer_types is {kinds!r:.60}; it must name {' or '.join(LAYER_TYPES)} for "
            f"each of the {count} layers (num_hidden_layers)."
        )
    return tuple(kinds)


def _thetas(config: Mapping[str, Any], where: str) -> dict[str, float]:
    """The theta of each kind of layer, in either spelling; refuses scaled positions."""
    if config.get("rope_scaling"):
        raise InputError(
            f"{where}: rope_scaling is set, but scaled positions are not computed here; use the "
            "model without it."
        )
    found = {}
    kinds = config.get("rope_parameters") or {}
    for kind, field in THETAS.items():
        rope = kinds.get(kind) or {}
        if rope.get("rope_type", "default") != "default":
            raise InputError(
                f"{where}: rope_parameters of {kind} have the rope_type {rope['rope_type']!r}, "
                "which is not computed here, only 'default'."
            )
        theta = rope.get("rope_theta", config.get(field, getattr(ModernBertConfig, field)))
        if isinstance(theta, bool) or not isinstance(theta, int | float) or not theta > 0:
            raise InputError(
                f"{where}: the rope_theta of {kind} ({field}) is {theta!r:.60}; it must be a "
                "number above 0."
            )
        found[field] = float(theta)
    return found


class ModernBertLayer(nn.Module):
    """Self-attention and a gated feed-forward, each after a norm, with a residual sum."""

    config: ModernBertConfig
    precision: Precision
    group: Group = Group()

    @nn.compact
    def __call__(self, x: jax.Array, layout: Layout, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout`; cos, sin `[2, T, head_dim/2]` → `[T, H]`.

        The angles are those of global and of local layers. The layout is that of this depth.
        """
        assert layout.depth is not None  # for mypy: `through_layers` gives it
        c, width, number = self.config, x.shape[-1], layout.depth - 1
        is_local = jnp.asarray([kind == LOCAL for kind in c.layer_types])[number]
        cos, sin = (jnp.where(is_local, both[1], both[0]) for both in (cos, sin))
        normed = jnp.where(number == 0, x, self._norm("attention_norm")(x))
        projected = self._linear(3 * width, QKV)(normed, layout.dropout)
        heads = projected.reshape(len(x), 3, c.num_attention_heads, c.head_dim)
        turned = (rotate_halves(heads[:, i], cos, sin) for i in (0, 1))
        rows, length = layout.place.shape
        query, key, value = (
            to_rows(part.reshape(len(x), width), layout).reshape(rows, length, -1, c.head_dim)
            for part in (*turned, heads[:, 2])
        )
        attended = padded_attention(
            query,
            key,
            value,
            jnp.maximum(layout.lengths, 1),
            precision=self.precision,
            kept=kept_weights(layout.dropout, layout.place, c.num_attention_heads),
            window=Window(c.local_attention // 2, is_local),
        )
        attended = from_rows(attended.reshape(rows, length, width), layout)
        attended = self._linear(width, "attention_output")(attended, layout.dropout)
        x = x + drop_hidden(attended, layout.dropout, ATTENTION_OUTPUT)
        normed = self._norm("feed_forward_norm")(x)
        both = self._linear(2 * c.intermediate_size, GATE_UP)(normed, layout.dropout)
        gate, up = jnp.split(both, 2, axis=-1)
        hidden = ACTIVATIONS[c.hidden_activation](gate) * up
        hidden = drop_hidden(hidden, layout.dropout, GATED)
        return x + self._linear(width, "down")(hidden, layout.dropout)

    def _linear(self, features: int, name: str) -> Linear:
        return Linear(features, self.precision.products, False, self.group, name=name)

    def _norm(self, name: str) -> nn.LayerNorm:
        return _norm(self.config, self.precision, name)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        x, angle = jnp.zeros((1, self.config.hidden_size)), jnp.zeros(self.config.head_dim // 2)
        angles = jnp.stack([angle, angle])[:, None]
        layout = padded_layout(jnp.ones(1, jnp.int32), 1).at_depth(1)
        return self.init(key, x, layout, angles, angles)["params"]


def _norm(config: ModernBertConfig, precision: Precision, name: str | None = None) -> nn.LayerNorm:
    # Flax computes mean and variance in float32 for every dtype.
    dtype = precision.activations
    return nn.LayerNorm(epsilon=config.norm_eps, use_bias=False, dtype=dtype, name=name)


class ModernBert(LayeredTrunk):
    """ModernBERT: packed word vectors to normed last hidden states."""

    config: ModernBertConfig

    def layer(self) -> ModernBertLayer:
        """The module of every layer, without a parent."""
        return ModernBertLayer(self.config, self.precision, self.group, parent=None)

    def setup(self) -> None:
        self.make_words()
        self.embedding_norm = _norm(self.config, self.precision)
        self.layers = self.layers_params()
        self.final_norm = _norm(self.config, self.precision)

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states of `words` `[T, H]`: rows of the word table, placed as in `layout`.

        Returns:
            Hidden states `[T, H]`; at unused places they are finite but meaningless.
        """
        c, last = self.config, layout.place.shape[1] - 1
        x = drop_hidden(self.embedding_norm(words), layout.at_depth(0).dropout, EMBEDDINGS)
        cos, sin = zip(
            *(
                angles_at(layout.position, c.frequencies(theta), last)
                for theta in (c.global_rope_theta, c.local_rope_theta)
            ),
            strict=True,
        )
        constants = jnp.stack(cos), jnp.stack(sin)
        return self.final_norm(self.through_layers(self.layers, x, layout, constants))


# Our module → Hugging Face's module. No map and no norm has a bias.
LAYER_DENSE = {
    QKV: "attn.Wqkv",
    "attention_output": "attn.Wo",
    GATE_UP: "mlp.Wi",  # first what is activated, then what multiplies
    "down": "mlp.Wo",
}
LAYER_NORM = {"attention_norm": "attn_norm", "feed_forward_norm": "mlp_norm"}
NORMS = {"embedding_norm": "embeddings.norm", "final_norm": "final_norm"}
LAYER = "layers.{}."
KERNEL, SCALE = {"kernel": "weight"}, {"scale": "weight"}

# Published folders with a head ("head.", "decoder.", "classifier.") call the trunk "model".
TABLE = NameTable(
    names={(WORDS,): "embeddings.tok_embeddings.weight"}
    | module_names((), "", NORMS, SCALE)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, KERNEL)
    | module_names((LAYERS,), LAYER, LAYER_NORM, SCALE),
    prefixes=("", "model.", "0.auto_model."),
    trunk=("embeddings.", "layers.", "final_norm."),
    ignored=re.compile(r"rotary_emb\."),  # buffers, not weights
    model_type="modernbert",
    architecture="ModernBertModel",
    absent=("layers.0.attn_norm.weight",),
)

# How parameters are split over a mesh (see `runtime.sharding`): over `fsdp` alone.
PARTITION_RULES = ALL_SPLIT
