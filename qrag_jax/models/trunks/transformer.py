"""One Transformer in Flax for all families: attention and feed-forward with residual sums.

What a family computes is said by its `Sizes`. Norms come after the residual sums, as in BERT
(Devlin et al., 2019), or before attention and feed-forward. Positions come from a table or by
rotation, the feed-forward may be gated, and in a decoder each token sees itself and earlier tokens.
Segment ids are all 0, as in retrievers.

The layers' parameters are stored stacked on one axis: few, large arrays for the optimizer, the
checkpoint and the mesh. `prepare` makes the form that is computed with, once, outside any loop.

On accelerators the layers stay stacked and are scanned: XLA compiles one layer instead of all, and
compiling takes minutes there. On CPU they are cut apart and computed one after the other. A scan
would copy weights and activations in and out of the stacks in every pass, which costs more there
than compiling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from qrag_jax.errors import InputError, within
from qrag_jax.models.compute import attention
from qrag_jax.models.compute.attention import angles_at, rotate_halves
from qrag_jax.models.compute.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    GATED,
    OUTPUT,
    TokenDropout,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.lora import Linear, side_by_side
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, take_rows, to_rows
from qrag_jax.models.compute.precision import Precision
from qrag_jax.runtime.config_fields import check_value, typed_fields
from qrag_jax.runtime.mesh import Rules, everywhere, split_rules

Params = Any  # a pytree of arrays
WORDS = "word_embeddings"  # leaf of the parameters: the word table, [V, H]
HEAD = "lm_head"  # leaf of the parameters: the head, [V, H], if it is not the word table
DISTANCES = "relative_attention_bias"  # leaf of the parameters: a number for each bucket and head
LAYERS = "layers"  # subtree whose leaves have a leading axis with one entry per layer
QKV = "query_key_value"  # the three computed as one

# What a layer stores for its gradient; the rest is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,  # everything is stored
    "dots": jax.checkpoint_policies.dots_saveable,  # matrix products are stored
    "layers": jax.checkpoint_policies.nothing_saveable,  # only the layer's inputs are stored
}
_FARTHEST = 128  # distances of so many tokens or more are in the last bucket of their side
_TYPES = ("rope_type", "type")  # spellings of the kind of a rotation
Size = Annotated[int, within(1, 2**31)]


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
    # Maps of a layer that are stored separately, but computed as one
    FUSED: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # Maps of a layer that a tensor axis splits: of those that open attention and feed-forward the
    # outputs, of those that close them the inputs
    COLUMNS: ClassVar[tuple[str, ...]] = ()
    ROWS: ClassVar[tuple[str, ...]] = ()
    # Buckets of distances between tokens that add a learned number to scores of attention
    BUCKETS: ClassVar[int] = 0
    # Fields that choose a computation, and the values that are computed here. The first of them
    # holds where `config.json` lacks the field
    CHOICES: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    SPELLINGS: ClassVar[Mapping[str, str]] = {}  # names of fields in `config.json` → here

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Annotated[int, within(1, 10_000)]
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
    def last_norm(self) -> tuple[str, ...]:
        """Path of the parameters of the norm whose output is the last hidden states."""
        return ("final_norm",) if self.PRE_NORM else (LAYERS, "output_norm")

    @property
    def rotations(self) -> tuple[np.ndarray, ...]:
        """Radians per position of a head's pairs, float64 `[head_dim / 2]`; then local layers'."""
        return ()

    @property
    def local(self) -> tuple[int, tuple[bool, ...]]:
        """So many tokens before and behind it a token sees in local layers, and which these are."""
        return 0, ()

    def flops(self, rows: float, length: float, read: float = 0.0) -> float:
        """FLOPs of matrix products of a forward pass over rows of so many tokens.

        Two for each weight and token, and attention's with padding (PaLM, arXiv 2204.02311,
        appendix B).

        Args:
            read: tokens of which the head reads log-probabilities.
        """
        queries, keys = (n * self.head_dim for n in (self.num_attention_heads, self.key_heads))
        feed_forward = (3 if self.GATED_MAP else 2) * self.intermediate_size
        weights = self.hidden_size * (2 * (queries + keys) + feed_forward)
        layers = self.num_hidden_layers * rows * length * (2 * weights + 4 * length * queries)
        return layers + 2 * read * self.hidden_size * self.vocab_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        for name, known in cls.CHOICES.items():
            value = config.get(name, known[0])
            if value not in known:
                them = ", ".join(map(repr, known))
                raise InputError(f"{where}: {name} {value!r:.60} is not supported, only {them}.")
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
                f"{where}: num_attention_heads {heads} must divide hidden_size {hidden} and be a "
                f"multiple of num_key_value_heads {sizes.key_heads}."
            )
        if cls.ROTATES and sizes.head_dim % 2:
            raise InputError(f"{where}: head_dim {sizes.head_dim} is odd ({heads} heads).")
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
            raise InputError(f"{where}: {name} {rope!r:.100} is unsupported; use 'default'{also}.")
    return theta, scaling


def frequencies(theta: float, width: int) -> np.ndarray:
    """θ^(-2i/d), float64 `[d / 2]`."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def rotation(config: Sizes, layout: Layout) -> tuple[jax.Array, ...]:
    """cos and sin of each of the config's rotations at the places of a layout."""
    last = layout.place.shape[1] - 1
    return sum((angles_at(layout.position, rope, last) for rope in config.rotations), ())


def buckets(length: int, count: int = 32) -> np.ndarray:
    """The bucket of each distance, key's position minus query's, from 1 - L to L - 1: `[2L - 1]`.

    Half of the buckets are for keys behind the query. In each half the first 8 buckets are of one
    distance each, and the others grow by a constant factor, as in T5 (Raffel et al., arXiv
    1910.10683).
    """
    distance = np.arange(1 - length, length)
    half = count // 2
    single = half // 2
    far = np.maximum(np.abs(distance), single).astype(np.float32)
    # In float32 as in torch: where a bucket begins, rounding decides.
    share = np.log(far / single) / np.float32(np.log(_FARTHEST / single))
    grown = share * np.float32(half - single)
    bucket = np.where(np.abs(distance) < single, np.abs(distance), single + grown.astype(np.int64))
    return np.minimum(bucket, half - 1) + half * (distance > 0)


def by_pairs(values: jax.Array) -> jax.Array:
    """Values of distances `[2L - 1, heads]` → of pairs `[heads, L, L]`, by query and key.

    Each row is the row above, moved by one. So all rows are one long row, cut again, and no gather
    is needed, whose gradient would be a scatter.
    """
    length = (len(values) + 1) // 2
    padded = jnp.pad(values.T, ((0, 0), (0, 1)))
    long = jnp.tile(padded, (1, length))[:, : length * (2 * length - 1)]
    return long.reshape(-1, length, 2 * length - 1)[:, :, length - 1 :]


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
            heads = self._heads(normed, constants, layout.dropout)
            attended = attention.shared_attention(*heads, layout, self.precision)
        else:
            attended = self._of_rows(normed, layout, constants)
        return self.after_attention(x, attended, layout.dropout)

    def projected(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `_heads`, of a decoder's hidden states before their norm."""
        return self._heads(self.attention_norm(x), (cos, sin), None)

    def _heads(
        self, normed: jax.Array, angles: tuple[jax.Array, ...], dropout: TokenDropout | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[T, H]` → queries `[T, heads, head_dim]`, keys and values `[T, key_heads, head_dim]`.

        Queries and keys are turned by the angles of their positions, cos and sin, in a family that
        does so.
        """
        heads, groups = self.heads, self.groups
        together = self.query_key_value(normed, dropout)
        together = together.reshape(len(normed), heads + 2 * groups, self.config.head_dim)
        query, key, value = jnp.split(together, (heads, heads + groups), axis=1)
        if self.config.norms_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.config.ROTATES:
            query, key = rotate_halves(query, *angles), rotate_halves(key, *angles)
        return query, key, value

    def _of_rows(
        self, normed: jax.Array, layout: Layout, constants: tuple[jax.Array, ...]
    ) -> jax.Array:
        """What heads attend to in an encoder, `[T, H]` → `[T, heads · head_dim]`."""
        c, (rows, length) = self.config, layout.place.shape
        bias = None if c.ROTATES or not constants else constants[0]
        angles, local, window = constants[:2], constants[2:], None
        if local:
            assert layout.depth is not None  # for mypy: `at_depth` gives it
            reach, layers = c.local
            is_local = jnp.asarray(layers)[layout.depth - 1]
            angles = tuple(jnp.where(is_local, *pair) for pair in zip(local, angles, strict=True))
            window = attention.Window(reach, is_local)

        def by_rows(part: jax.Array) -> jax.Array:
            flat = to_rows(part.reshape(len(normed), -1), layout)
            return flat.reshape(rows, length, -1, c.head_dim)

        heads = self._heads(normed, angles, layout.dropout)
        if c.ROTATES:  # the three no longer lie side by side
            query, key, value = map(by_rows, heads)
        else:
            query, key, value = jnp.split(by_rows(jnp.concatenate(heads, axis=1)), 3, axis=2)
        kept = kept_weights(layout.dropout, layout.place, self.heads)
        attended = attention.padded_attention(
            query,
            key,
            value,
            jnp.maximum(layout.lengths, 1),
            self.precision,
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


@partial(jax.jit, static_argnums=(0, 1))
def apply_layer(
    layer: nn.Module,
    remat: str,
    params: Params,
    x: jax.Array,
    layout: Layout,
    *,
    constants: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """`layer(x, layout, *constants)`. Under jit it is traced once for all layers of one shape.

    Args:
        layer: a module without a parent.
        layout: the block's layout, with the dropout keys of this layer.
        constants: further inputs of every layer, such as cos and sin.
    """

    def apply(params: Params, x: jax.Array) -> jax.Array:
        return jnp.asarray(layer.apply({"params": params}, x, layout, *constants))

    if remat != "none":
        apply = jax.checkpoint(apply, policy=REMAT_POLICIES[remat], prevent_cse=True)
    return apply(params, x)


# ---------------------------------------------------------------------- the trunk


class Transformer(nn.Module):
    """Packed word vectors to last hidden states; of a decoder, as a language-model head takes them.

    `apply({"params": prepared}, words [T, H], layout) -> [T, H]`: words are rows of the table
    `WORDS`, placed as in `layout`; at unused places the result is finite but meaningless.
    """

    config: Sizes
    precision: Precision = Precision()  # dtypes of the computation; parameters stay float32
    remat: str = "none"  # what is computed again for the gradient, a name of `REMAT_POLICIES`
    # the layers stay stacked and are scanned, else they are computed one by one
    scanned: bool = False
    mesh: Mesh | None = None  # that programs run on; None: one device
    own_head: bool = False  # whether the parameters hold a head next to the word table (`HEAD`)

    def layer(self) -> Layer:
        """The module of every layer, without a parent."""
        return Layer(self.config, self.precision, parent=None)

    def partition_rules(self) -> Rules:
        """How parameters are split over a mesh (see `runtime.mesh`)."""
        return split_rules(self.config.COLUMNS, self.config.ROWS)

    def setup(self) -> None:
        c, init = self.config, nn.initializers.normal(0.02)
        if self.is_initializing():  # `apply` takes rows of the word table, and no table
            self.param(WORDS, init, (c.vocab_size, c.hidden_size))
            if self.own_head:
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
        # Flax's `param` would compare existing parameters with new ones and refuse adapters next to
        # kernels.
        self.layers = (
            self.get_variable("params", LAYERS)
            if self.scanned
            else [
                self.get_variable("params", name)
                if self.has_variable("params", name)
                else self.param(name, self.layer().init_params)
                for name in self._layer_names
            ]
        )
        if c.PRE_NORM:
            self.final_norm = norm(c, self.precision)
        if c.BUCKETS:
            self.distances = self.param(DISTANCES, init, (c.BUCKETS, c.num_attention_heads))

    @property
    def _layer_names(self) -> list[str]:
        """Of the layers' parameters where they are computed one by one."""
        return [f"{LAYERS}_{i}" for i in range(self.config.num_hidden_layers)]

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states `[T, H]` of `words` `[T, H]`, placed as in `layout`."""
        x = self._embedded(words, layout)
        if self.config.BUCKETS:  # added to the scores of attention, float32 `[heads, L, L]`
            table = jnp.asarray(self.distances, jnp.float32)
            numbers = jnp.asarray(buckets(layout.place.shape[1], len(table)))
            constants: tuple[jax.Array, ...] = (by_pairs(take_rows(table, numbers)),)
        else:
            constants = rotation(self.config, layout)
        module = self.layer()

        def one(x: jax.Array, layer: tuple[Params, Any]) -> tuple[jax.Array, None]:
            # Each device goes on with rows of its own: kernels are gathered, not activations.
            x, (params, depth) = everywhere(self.mesh, x), layer
            of_layer = layout.at_depth(depth)
            return apply_layer(module, self.remat, params, x, of_layer, constants=constants), None

        if self.scanned:
            depths = jnp.arange(1, self.config.num_hidden_layers + 1)
            x, _ = jax.lax.scan(one, x, (self.layers, depths))
        else:
            for depth, params in enumerate(self.layers, 1):
                x, _ = one(x, (params, depth))
        return self.normed(x)

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

    def hidden_states(self, params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """tokens `[B, L]` padded on the right, lengths `[B]` → hidden states `[B, L, H]`.

        `params` are stacked. At positions ≥ length the values are finite but meaningless.
        """
        prepared = self.prepare(params)
        layout = padded_layout(lengths, tokens.shape[1])
        hidden = self.apply({"params": prepared}, prepared[WORDS][tokens.reshape(-1)], layout)
        return jnp.asarray(hidden).reshape(*tokens.shape, -1)

    # ------------------------------------------------------------------ forms of the parameters

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters, `layers` stacked on a leading axis."""
        one_by_one = self.clone(scanned=False)
        words = jnp.zeros((1, self.config.hidden_size))
        params = one_by_one.init(key, words, padded_layout(jnp.ones(1, jnp.int32), 1))["params"]
        return one_by_one.as_stored(params)

    def prepare(self, params: Params, kernel_dtype: jnp.dtype = jnp.float32) -> Params:
        """Stacked parameters → the form that `apply` takes: each layer with joined maps.

        The layers stay under `LAYERS` if they are scanned; else they are `layers_0`, …. Kernels
        are converted to `kernel_dtype` here, once, instead of at every use.
        """
        outside = {name: leaf for name, leaf in params.items() if name != LAYERS}

        def layers(number: int | None = None) -> Params:
            def taken(path: tuple, leaf: jax.Array) -> jax.Array:
                leaf = leaf if number is None else leaf[number]
                return leaf.astype(kernel_dtype) if path[-1].key == "kernel" else leaf

            layer = jax.tree_util.tree_map_with_path(taken, params[LAYERS])
            for fused, names in self.config.FUSED.items():
                layer[fused] = side_by_side([layer.pop(name) for name in names])
            return layer

        if self.scanned:
            return outside | {LAYERS: layers()}
        return outside | {name: layers(i) for i, name in enumerate(self._layer_names)}

    def as_stored(self, prepared: Params) -> Params:
        """The inverse of `prepare`, but for the dtype."""
        if self.scanned:
            return prepared | {LAYERS: self._split(prepared[LAYERS])}
        outside = {name: leaf for name, leaf in prepared.items() if name not in self._layer_names}
        layers = [self._split(prepared[name]) for name in self._layer_names]
        return outside | {LAYERS: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}

    def _split(self, layer: Params) -> Params:
        """A layer, or stacked layers, with the maps of `FUSED` one by one."""
        c, layer = self.config, dict(layer)
        heads, groups = c.num_attention_heads, c.key_heads
        of_heads = heads * c.head_dim, (heads + groups) * c.head_dim
        for fused, names in c.FUSED.items():
            for leaf, array in layer.pop(fused).items():
                parts = jnp.split(array, of_heads if fused == QKV else len(names), axis=-1)
                for name, part in zip(names, parts, strict=True):
                    layer.setdefault(name, {})[leaf] = part
        return layer
