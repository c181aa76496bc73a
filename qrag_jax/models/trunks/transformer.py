"""One Transformer in Flax for all families: attention and feed-forward with residual sums.

What a family computes is said by its `Sizes`. Norms come after the residual sums, as in BERT
(Devlin et al., 2019), or before attention and feed-forward. Positions come from a table or by
rotation, the feed-forward may be gated, and in a decoder each token sees itself and earlier tokens.
Segment ids are all 0, as in retrievers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from qrag_jax.errors import InputError, Rule
from qrag_jax.models.compute.attention import Window, padded_attention
from qrag_jax.models.compute.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    GATED,
    OUTPUT,
    TokenDropout,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.linear import Linear
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, to_rows
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.compute.sharing import shared_attention
from qrag_jax.models.trunks.trunk import Params, Trunk
from qrag_jax.runtime.config_fields import check_value, typed_fields

QKV = "query_key_value"  # the three computed as one
HEAD = "lm_head"  # leaf of a trunk's parameters: the head, [V, H], if it is not the word table
_TYPES = ("rope_type", "type")  # spellings of the kind of a rotation


def _whole(most: int) -> Rule:
    return Rule(lambda n: type(n) is int and 1 <= n <= most, f"it must be from 1 to {most}")


Size = Annotated[int, _whole(2**31)]


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), exact. Its gradient stores only x, a third of what autodiff stores."""
    return jax.nn.gelu(x, approximate=False)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * jnp.pi) ** -0.5
    return (gradient * (cdf + x * density),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model, named and defined as in Hugging Face's `config.json`; defaults are BERT's.

    Families change what is computed by the class attributes and properties.
    """

    CAUSAL: ClassVar[bool] = False  # a decoder, whose word vectors are neither normed nor dropped
    PRE_NORM: ClassVar[bool] = False  # norms before attention and feed-forward, and at the end
    # With PRE_NORM, the first layer has a norm before attention. Without it, because the embeddings
    # were normed just before, its place in the stacked parameters holds ones, which are neither
    # used nor written to files
    FIRST_NORM: ClassVar[bool] = True
    ROTATES: ClassVar[bool] = False  # queries and keys by their positions; else a position table
    # The map of a gated feed-forward, named after its halves in their order; "": it is not gated
    GATED_MAP: ClassVar[str] = ""
    # Of the map of queries, keys and values, of what attention gives, and of the feed-forward (but
    # for the map that is gated)
    BIASES: ClassVar[tuple[bool, bool, bool]] = (True, True, True)
    DROPS: ClassVar[tuple[int, ...]] = (OUTPUT,)  # places of the feed-forward where training drops
    # Fields that choose a computation, and the values that are computed here. The first of them
    # holds where `config.json` lacks the field
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    SPELLINGS: ClassVar[Mapping[str, str]] = {}  # names of fields in `config.json` → here

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, _whole(10_000)]
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size = 512
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
    def key_heads(self) -> int:
        """Heads of keys and values, which the query heads share evenly."""
        return self.num_attention_heads

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Which maps have biases; see `BIASES`."""
        return self.BIASES

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed head by head."""
        return False

    @property
    def norm(self) -> Callable[..., nn.Module]:
        """Makes the layers' norms, and the last one."""
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
        config = {cls.SPELLINGS.get(n, n): value for n, value in cls.completed(config).items()}
        fields = {
            field.name: check_value(kind, value, f"{where}: {field.name}")
            for field, kind, _ in typed_fields(cls)
            if (value := config.get(field.name)) is not None or field.default is dataclasses.MISSING
        }
        sizes = cls(**fields | cls.further_fields(config, where))
        hidden, heads = sizes.hidden_size, sizes.num_attention_heads
        if heads % sizes.key_heads or (hidden % heads and not cls.CAUSAL):
            raise InputError(
                f"{where}: hidden_size {hidden} and num_key_value_heads {sizes.key_heads} do not "
                f"go with {heads} heads (num_attention_heads), which must divide the one and be a "
                "multiple of the other."
            )
        if cls.ROTATES and sizes.head_dim % 2:
            raise InputError(
                f"{where}: head_dim {sizes.head_dim} is odd (of num_attention_heads {heads}), and "
                "rotation takes pairs."
            )
        if sizes.first_position < 0 or sizes.longest_row < 1:
            raise InputError(
                f"{where}: max_position_embeddings is {sizes.max_position_embeddings}, but the "
                f"first {sizes.first_position} positions are unused (pad_token_id)."
            )
        return sizes

    @classmethod
    def completed(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """A parsed `config.json` with the fields that transformers needs to read it again."""
        return {**config}

    @classmethod
    def further_fields(cls, config: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields that are not read as they stand in `config.json`."""
        return {}


def rotation_fields(
    config: Mapping[str, Any], where: str, scaled: str = ""
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `rope_parameters` or `rope_scaling` (two spellings) say about the rotation.

    Args:
        scaled: a kind of scaled positions that is computed; all others are refused.

    Returns:
        `rope_theta` if they name it, and the fields of the scaling; None: there is none.
    """
    theta, scaling = dict[str, Any](), None
    for name in ("rope_parameters", "rope_scaling"):
        rope = dict(config.get(name) or {})
        kind = next((rope[of] for of in _TYPES if of in rope), "default")
        rest = {field: value for field, value in rope.items() if field not in _TYPES}
        if "rope_theta" in rest:
            theta = {"rope_theta": float(rest.pop("rope_theta"))}
        if scaled and kind == scaled:
            scaling = rest
        elif kind != "default" or rest:
            also = f" or {scaled!r}" if scaled else ""
            raise InputError(
                f"{where}: {name} {rope!r:.100} is not computed here, only the rope_type "
                f"'default'{also}; use the model without scaled positions."
            )
    return theta, scaling


def frequencies(theta: float, width: int) -> np.ndarray:
    """θ^(-2i/d), float64 `[d / 2]`."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


# ---------------------------------------------------------------------- the layer


class Layer(nn.Module):
    """Self-attention and a feed-forward, each with a residual sum and a norm."""

    config: Sizes
    precision: Precision

    def setup(self) -> None:
        c = self.config
        self.heads, self.groups = c.num_attention_heads, c.key_heads
        of_heads, of_attention, of_feed_forward = c.biases
        inner = c.intermediate_size
        self.query_key_value = self._linear((self.heads + 2 * self.groups) * c.head_dim, of_heads)
        self.attention_output = self._linear(c.hidden_size, of_attention)
        if c.GATED_MAP:
            setattr(self, c.GATED_MAP, self._linear(2 * inner, False))
            self.down = self._linear(c.hidden_size, of_feed_forward)
        else:
            self.intermediate = self._linear(inner, of_feed_forward)
            self.output = self._linear(c.hidden_size, of_feed_forward)
        norms = ["attention_norm", "feed_forward_norm" if c.PRE_NORM else "output_norm"]
        for name in norms + ["query_norm", "key_norm"] * c.norms_heads:
            setattr(self, name, norm(c, self.precision))

    def __call__(self, x: jax.Array, layout: Layout, *constants: jax.Array) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout` → `[T, H]`.

        Args:
            layout: that of this depth.
            constants: cos and sin `[T, head_dim/2]`, those of local layers behind them; or a bias
                as in `padded_attention`; or nothing.
        """
        c, normed = self.config, x
        if c.PRE_NORM:
            normed = self.attention_norm(x)
            if not c.FIRST_NORM:
                normed = jnp.where(layout.depth == 1, x, normed)
        if c.CAUSAL:
            cos, sin = constants
            heads = self._heads(normed, cos, sin, layout.dropout)
            attended = shared_attention(*heads, layout, self.precision)
        else:
            attended = self._of_rows(normed, layout, constants)
        return self.after_attention(x, attended, layout.dropout)

    def projected(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `_heads`, of a decoder's hidden states before their norm."""
        return self._heads(self.attention_norm(x), cos, sin, None)

    def _heads(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, dropout: TokenDropout | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[T, H]` → queries `[T, heads, head_dim]`, keys and values `[T, key_heads, head_dim]`.

        Queries and keys are turned by the angles of their positions.
        """
        heads, groups = self.heads, self.groups
        together = self.query_key_value(normed, dropout)
        together = together.reshape(len(normed), heads + 2 * groups, self.config.head_dim)
        query, key, value = jnp.split(together, (heads, heads + groups), axis=1)
        if self.config.norms_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate_halves(query, cos, sin), rotate_halves(key, cos, sin), value

    def _of_rows(
        self, normed: jax.Array, layout: Layout, constants: tuple[jax.Array, ...]
    ) -> jax.Array:
        """What heads attend to in an encoder, `[T, H]` → `[T, heads · head_dim]`."""
        c, (rows, length), heads = self.config, layout.place.shape, self.heads
        by_head = (rows, length, heads, c.head_dim)
        window, bias = None, None
        if c.ROTATES:
            cos, sin, *local = constants
            if local:
                assert layout.depth is not None  # for mypy: `through_layers` gives it
                is_local = jnp.asarray(c.local_layers)[layout.depth - 1]
                cos, sin = jnp.where(is_local, local[0], cos), jnp.where(is_local, local[1], sin)
                window = Window(c.reach, is_local)
            query, key, value = (
                to_rows(part.reshape(len(normed), -1), layout).reshape(by_head)
                for part in self._heads(normed, cos, sin, layout.dropout)
            )
        else:
            bias = constants[0] if constants else None
            together = to_rows(self.query_key_value(normed, layout.dropout), layout)
            together = together.reshape(*by_head[:2], 3, *by_head[2:])
            query, key, value = jnp.moveaxis(together, 2, 0)
        kept = kept_weights(layout.dropout, layout.place, heads)
        attended = padded_attention(
            query,
            key,
            value,
            jnp.maximum(layout.lengths, 1),
            precision=self.precision,
            kept=kept,
            window=window,
            bias=bias,
        )
        return from_rows(attended.reshape(rows, length, -1), layout)

    def after_attention(
        self, x: jax.Array, attended: jax.Array, dropout: TokenDropout | None = None
    ) -> jax.Array:
        """x `[T, H]` and what its heads attended to `[T, heads · head_dim]` → `[T, H]`."""
        output = drop_hidden(self.attention_output(attended, dropout), dropout, ATTENTION_OUTPUT)
        if self.config.PRE_NORM:
            x = x + output
            return x + self._feed_forward(self.feed_forward_norm(x), dropout)
        x = self.attention_norm(x + output)
        return self.output_norm(x + self._feed_forward(x, dropout))

    def _feed_forward(self, x: jax.Array, dropout: TokenDropout | None) -> jax.Array:
        c, activation = self.config, ACTIVATIONS[self.config.hidden_act]
        if c.GATED_MAP:
            both = getattr(self, c.GATED_MAP)(x, dropout)
            half = dict(zip(c.GATED_MAP.split("_"), jnp.split(both, 2, axis=-1), strict=True))
            hidden, last = activation(half["gate"]) * half["up"], self.down
        else:
            hidden, last = activation(self.intermediate(x, dropout)), self.output
        if GATED in c.DROPS:
            hidden = drop_hidden(hidden, dropout, GATED)
        hidden = last(hidden, dropout)
        return drop_hidden(hidden, dropout, OUTPUT) if OUTPUT in c.DROPS else hidden

    def _linear(self, features: int, bias: bool) -> Linear:
        return Linear(features, self.precision.products, bias)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        layout = padded_layout(jnp.ones(1, jnp.int32), 1).at_depth(1)
        x = jnp.zeros((1, self.config.hidden_size))
        return self.init(key, x, layout, *rotation(self.config, layout))["params"]


def norm(config: Sizes, precision: Precision, kind: Callable[..., nn.Module] | None = None) -> Any:
    """A norm, of the layers' kind or another. Flax computes it in float32 for every dtype."""
    kind = kind or config.norm
    without = {"use_bias": False} if config.PRE_NORM and kind is nn.LayerNorm else {}
    return kind(epsilon=config.layer_norm_eps, dtype=precision.activations, **without)


def rotation(config: Sizes, layout: Layout) -> tuple[jax.Array, ...]:
    """cos and sin of each of the config's rotations at the places of a layout."""
    last = layout.place.shape[1] - 1
    return sum((angles_at(layout.position, each, last) for each in config.rotations), ())


# ---------------------------------------------------------------------- the trunk


class Transformer(Trunk):
    """Packed word vectors to last hidden states; of a decoder, as a language-model head takes them.

    Attributes:
        own_head: whether the parameters hold a head beside the word table (`HEAD`).
    """

    config: Sizes
    own_head: bool = False

    def layer(self) -> Layer:
        """The module of every layer, without a parent."""
        return Layer(self.config, self.precision, parent=None)

    def setup(self) -> None:
        c, init = self.config, nn.initializers.normal(0.02)
        self.make_words()
        if self.own_head and self.is_initializing():
            self.param(HEAD, init, (c.vocab_size, c.hidden_size))
        sizes = {
            "position_embeddings": 0 if c.ROTATES else c.max_position_embeddings,
            "token_type_embeddings": c.type_vocab_size,
        }
        self.tables = {
            name: self.param(name, init, (size, c.hidden_size))
            for name, size in sizes.items()
            if size  # a model without segments has no table for them
        }
        if not c.CAUSAL:
            self.embedding_norm = norm(c, self.precision, nn.LayerNorm)
        self.layers = self.layers_params()
        if c.PRE_NORM:
            self.final_norm = norm(c, self.precision)

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states `[T, H]` of `words` `[T, H]`, placed as in `layout`; see `Trunk`."""
        x = self._embedded(words, layout)
        return self.normed(self.through_layers(self.layers, x, layout, self.constants(layout)))

    def _embedded(self, words: jax.Array, layout: Layout) -> jax.Array:
        """What the first layer takes, `[T, H]`."""
        c = self.config
        if c.CAUSAL:
            return words.astype(self.precision.activations)
        if not c.ROTATES:
            table = jnp.asarray(self.tables["position_embeddings"])
            words = words + take_rows(table, layout.position + c.first_position)
        if c.type_vocab_size:
            words = words + self.tables["token_type_embeddings"][:1]
        return drop_hidden(self.embedding_norm(words), layout.at_depth(0).dropout, EMBEDDINGS)

    def normed(self, x: jax.Array) -> jax.Array:
        """What the last layer gives `[T, H]` → hidden states `[T, H]`."""
        return self.final_norm(x) if self.config.PRE_NORM else x

    def constants(self, layout: Layout) -> tuple[jax.Array, ...]:
        """Further inputs of every layer."""
        return rotation(self.config, layout)

    def ends(self, fused: str) -> Any:
        """Where a map of `FUSED` is cut; a number: into so many equal parts."""
        if fused != QKV:
            return len(self.FUSED[fused])
        c = self.config
        heads, groups = c.num_attention_heads, c.key_heads
        return heads * c.head_dim, (heads + groups) * c.head_dim
