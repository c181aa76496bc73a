"""Encoders in Flax: one layer of attention and feed-forward for all `families`.

Norms come after the residual sums, as in BERT (Devlin et al., 2019), or before attention and
feed-forward. Positions come from a table or by rotation, and the feed-forward may be gated. Segment
ids are all 0, as in retrievers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
    OUTPUT,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.linear import Linear
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, to_rows
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.trunks.trunk import Params, Trunk, given_fields


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), exact. Its gradient stores only x, a third of what autodiff stores."""
    return jax.nn.gelu(x, approximate=False)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * jnp.pi) ** -0.5
    return (gradient * (cdf + x * density),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)

PROJECTIONS = ("query", "key", "value")
QKV = "query_key_value"  # the three computed as one
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of an encoder, named and defined as in Hugging Face's `config.json`: those of BERT.

    Other families change what is computed by the class attributes.

    Attributes:
        PRE_NORM: norms come before attention and feed-forward, and at the end; they have no biases.
            The first layer has none before attention, because the embeddings were normed just
            before. Its place in the stacked parameters holds ones, which are neither used nor
            written to files.
        ROTATES: queries and keys are rotated by their positions; else there is a position table.
        BIASES: linear maps have biases, but for the gated one.
        GATED_MAP: the map of a gated feed-forward, named after its halves in their order; "": it
            is not gated.
        DROPS: places of the feed-forward where training drops.
        CHOICES: fields that choose a computation, and the values that are computed here. The first
            of them holds where `config.json` lacks the field.
    """

    PRE_NORM: ClassVar[bool] = False
    ROTATES: ClassVar[bool] = False
    BIASES: ClassVar[bool] = True
    GATED_MAP: ClassVar[str] = ""
    DROPS: ClassVar[tuple[int, ...]] = (OUTPUT,)
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "model_type": ("bert",),
        "hidden_act": tuple(ACTIVATIONS),
        "position_embedding_type": ("absolute",),
    }

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"

    @property
    def first_position(self) -> int:
        """The index in the position table at which a row begins."""
        return 0

    @property
    def longest_row(self) -> int:
        """The most tokens of a row that there are positions for."""
        return self.max_position_embeddings - self.first_position

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def layers_norm(self) -> type[nn.Module]:
        """The kind of the layers' norms."""
        return nn.LayerNorm

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        """Radians per position of a head's pairs, float64 `[head_dim / 2]`; then local layers'."""
        return ()

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer is local; none if all are global."""
        return ()

    @property
    def reach(self) -> int:
        """In a local layer a token sees so many tokens before and behind it."""
        return 0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        for name, known in cls.CHOICES.items():
            value = config.get(name, known[0])
            if value not in known:
                them = ", ".join(map(repr, known))
                raise InputError(
                    f"{where}: {name} {value!r:.60} is not computed here, only {them}."
                )
        config = cls.respelled(config)
        result = cls(**given_fields(cls, config, where) | cls.further_fields(config, where))
        if result.hidden_size % (result.num_attention_heads * (1 + cls.ROTATES)):
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} does not split into "
                f"{result.num_attention_heads} heads{' of even width' if cls.ROTATES else ''} "
                "(num_attention_heads)."
            )
        if not 0 <= result.first_position < result.max_position_embeddings:
            raise InputError(
                f"{where}: the first {result.first_position} positions are unused (pad_token_id), "
                f"but max_position_embeddings is {result.max_position_embeddings}; copy both from "
                "the model's own config.json."
            )
        return result

    @staticmethod
    def respelled(config: Mapping[str, Any]) -> dict[str, Any]:
        """A parsed `config.json` with fields that are named as here."""
        return {**config}

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields that are not read as they stand in `config.json`."""
        return {}


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward, each with a residual sum and a norm."""

    config: BertConfig
    precision: Precision

    @nn.compact
    def __call__(self, x: jax.Array, layout: Layout, *constants: jax.Array) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout` → `[T, H]`.

        Args:
            layout: that of this depth.
            constants: cos and sin `[T, head_dim/2]`, those of local layers behind them; or a bias
                as in `padded_attention`; or nothing.
        """
        if not self.config.PRE_NORM:
            x = self._norm("attention_norm")(x + self._attention(x, layout, *constants))
            return self._norm("output_norm")(x + self._feed_forward(x, layout))
        normed = jnp.where(layout.depth == 1, x, self._norm("attention_norm")(x))
        x = x + self._attention(normed, layout, *constants)
        return x + self._feed_forward(self._norm("feed_forward_norm")(x), layout)

    def _attention(self, x: jax.Array, layout: Layout, *constants: jax.Array) -> jax.Array:
        c, (rows, length) = self.config, layout.place.shape
        heads = c.num_attention_heads
        by_head = (rows, length, heads, c.head_dim)
        projected = self._linear(3 * heads * c.head_dim, QKV, c.BIASES)(x, layout.dropout)
        window, bias = None, None
        if c.ROTATES:
            cos, sin, *local = constants
            if local:
                assert layout.depth is not None  # for mypy: `through_layers` gives it
                is_local = jnp.asarray(c.local_layers)[layout.depth - 1]
                cos, sin = jnp.where(is_local, local[0], cos), jnp.where(is_local, local[1], sin)
                window = Window(c.reach, is_local)
            parts = projected.reshape(len(x), 3, heads, c.head_dim)
            turned = (rotate_halves(parts[:, i], cos, sin) for i in (0, 1))
            query, key, value = (
                to_rows(part.reshape(len(x), -1), layout).reshape(by_head)
                for part in (*turned, parts[:, 2])
            )
        else:
            bias = constants[0] if constants else None
            together = to_rows(projected, layout).reshape(*by_head[:2], 3, *by_head[2:])
            query, key, value = jnp.moveaxis(together, 2, 0)
        attended = padded_attention(
            query,
            key,
            value,
            jnp.maximum(layout.lengths, 1),
            precision=self.precision,
            kept=kept_weights(layout.dropout, layout.place, heads),
            window=window,
            bias=bias,
        )
        attended = from_rows(attended.reshape(rows, length, -1), layout)
        output = self._linear(x.shape[-1], "attention_output", c.BIASES)
        return drop_hidden(output(attended, layout.dropout), layout.dropout, ATTENTION_OUTPUT)

    def _feed_forward(self, x: jax.Array, layout: Layout) -> jax.Array:
        c, dropout = self.config, layout.dropout
        activation, inner = ACTIVATIONS[c.hidden_act], c.intermediate_size
        if c.GATED_MAP:
            both = self._linear(2 * inner, c.GATED_MAP, False)(x, dropout)
            names = c.GATED_MAP.split("_")
            half = dict(zip(names, jnp.split(both, 2, axis=-1), strict=True))
            hidden, last = activation(half["gate"]) * half["up"], "down"
        else:
            hidden = activation(self._linear(inner, "intermediate", c.BIASES)(x, dropout))
            last = "output"
        if GATED in c.DROPS:
            hidden = drop_hidden(hidden, dropout, GATED)
        hidden = self._linear(x.shape[-1], last, c.BIASES)(hidden, dropout)
        return drop_hidden(hidden, dropout, OUTPUT) if OUTPUT in c.DROPS else hidden

    def _linear(self, features: int, name: str, bias: bool) -> Linear:
        return Linear(features, self.precision.products, bias, name=name)

    def _norm(self, name: str) -> Any:
        return _norm(self.config.layers_norm, self.config, self.precision, name)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        layout = padded_layout(jnp.ones(1, jnp.int32), 1).at_depth(1)
        x = jnp.zeros((1, self.config.hidden_size))
        return self.init(key, x, layout, *rotation(self.config, layout))["params"]


def _norm(kind: Any, config: BertConfig, precision: Precision, name: str | None = None) -> Any:
    # Flax computes mean and variance in float32 for every dtype.
    without = {"use_bias": False} if config.PRE_NORM else {}
    return kind(epsilon=config.layer_norm_eps, dtype=precision.activations, name=name, **without)


def rotation(config: BertConfig, layout: Layout) -> tuple[jax.Array, ...]:
    """cos and sin of each of the config's rotations at the places of a layout."""
    last = layout.place.shape[1] - 1
    return sum((angles_at(layout.position, each, last) for each in config.rotations), ())


class Encoder(Trunk):
    """An encoder: packed word vectors to last hidden states."""

    config: BertConfig

    def layer(self) -> EncoderLayer:
        """The module of every layer, without a parent."""
        return EncoderLayer(self.config, self.precision, parent=None)

    def setup(self) -> None:
        c = self.config
        self.make_words()
        sizes = {
            "position_embeddings": 0 if c.ROTATES else c.max_position_embeddings,
            "token_type_embeddings": c.type_vocab_size,
        }
        self.tables = {
            name: self.param(name, nn.initializers.normal(0.02), (size, c.hidden_size))
            for name, size in sizes.items()
            if size  # a model without segments has no table for them
        }
        self.embedding_norm = _norm(nn.LayerNorm, c, self.precision)
        self.layers = self.layers_params()
        if c.PRE_NORM:
            self.final_norm = _norm(nn.LayerNorm, c, self.precision)

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states `[T, H]` of `words` `[T, H]`, placed as in `layout`; see `Trunk`."""
        c = self.config
        if not c.ROTATES:
            table = jnp.asarray(self.tables["position_embeddings"])
            words = words + take_rows(table, layout.position + c.first_position)
        if c.type_vocab_size:
            words = words + self.tables["token_type_embeddings"][:1]
        x = drop_hidden(self.embedding_norm(words), layout.at_depth(0).dropout, EMBEDDINGS)
        x = self.through_layers(self.layers, x, layout, self.constants(layout))
        return self.final_norm(x) if c.PRE_NORM else x

    def constants(self, layout: Layout) -> tuple[jax.Array, ...]:
        """Further inputs of every layer."""
        return rotation(self.config, layout)


class Bert(Encoder):
    """BERT: queries, keys and values are three maps in its files."""

    COLUMNS: ClassVar[tuple[str, ...]] = (*PROJECTIONS, "intermediate")
    ROWS: ClassVar[tuple[str, ...]] = ("attention_output", "output")
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {QKV: PROJECTIONS}
