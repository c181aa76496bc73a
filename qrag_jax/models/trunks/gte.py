"""GTE's encoder in Flax (Zhang et al., arXiv 2407.19669, "mGTE").

It is a BERT with two changes: queries and keys are rotated instead of adding position embeddings,
and the feed-forward is gated. It is the trunk of gte-multilingual-base and gte-base-en-v1.5, whose
class is called NewModel and whose model_type is "new" (huggingface.co/Alibaba-NLP/new-impl). Two
maps are packed, in the files too: one holds queries, keys and values, the other holds both halves
of the feed-forward (first the values that are gated, then the gate).
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
from qrag_jax.models.compute.attention import padded_attention
from qrag_jax.models.compute.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    GATED,
    OUTPUT,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.group import Group
from qrag_jax.models.compute.linear import Linear
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, to_rows
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.rope import angles_at, rotate_halves
from qrag_jax.models.files.weight_names import DENSE_LEAVES, NORM_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.bert import ACTIVATIONS as BERT_ACTIVATIONS
from qrag_jax.models.trunks.bert import EMBEDDING_NORM, EMBEDDING_TABLES, LAYER
from qrag_jax.models.trunks.trunk import (
    LAYERS,
    LayeredTrunk,
    Params,
    given_fields,
)
from qrag_jax.runtime.sharding import ALL_SPLIT

ACTIVATIONS = BERT_ACTIVATIONS | {"silu": jax.nn.silu}
LAYER_NORM, RMS_NORM = NORMS = ("layer_norm", "rms_norm")
QKV, UP_GATE = "query_key_value", "up_gate"


@dataclasses.dataclass(frozen=True)
class GteConfig:
    """Sizes of a GTE encoder, named as in its `config.json`.

    Attributes:
        rope_factor: how many times longer rows may be than those of the first training (`factor`
            of rope_scaling); 1: no scaling.
        rope_mixed_b: b of mixed NTK scaling; None: fixed NTK scaling.
    """

    model_types: ClassVar[tuple[str, ...]] = ("new",)
    BIASES: ClassVar[bool] = True  # of all linear maps but that of `UP_GATE`
    DROPS_GATED: ClassVar[bool] = True  # whether gated values are dropped in training

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 2048
    type_vocab_size: int = 1
    layer_norm_type: str = LAYER_NORM
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    rope_theta: float = 1e4
    rope_factor: float = 1.0
    rope_mixed_b: float | None = None

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row the model was made for."""
        return self.max_position_embeddings

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        if config.get("model_type", "new") not in cls.model_types:
            raise InputError(
                f"{where}: model_type {config['model_type']!r} is not computed here, only 'new'."
            )
        result = cls(**given_fields(cls, config, where) | _rope(config, where))
        # If a field is absent, the model's published code uses the first of these values.
        for name, known in (
            ("hidden_act", ("gelu", *ACTIVATIONS)),
            ("layer_norm_type", NORMS),
            ("position_embedding_type", ("rope",)),
            ("pack_qkv", (True,)),
            ("logn_attention_scale", (False,)),
        ):
            value = config.get(name, known[0])
            if value not in known:
                them = ", ".join(map(repr, dict.fromkeys(known)))
                raise InputError(f"{where}: {name} {value!r} is not computed here, only {them}.")
        if result.hidden_size % (2 * result.num_attention_heads):
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} does not split into "
                f"{result.num_attention_heads} heads of even width (num_attention_heads)."
            )
        return result


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the rotation that `rope_parameters` or `rope_scaling` holds (two spellings)."""
    found: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if "rope_theta" in rope:
            found["rope_theta"] = float(rope["rope_theta"])
        if kind == "default":
            continue
        factor = rope.get("factor")
        if kind != "ntk" or not isinstance(factor, int | float) or factor < 1:
            raise InputError(
                f"{where}: {name} {dict(rope)!r} is not computed here, only type 'ntk' with a "
                "factor of at least 1."
            )
        found |= {"rope_factor": float(factor), "rope_mixed_b": rope.get("mixed_b")}
    return found


def frequencies(config: GteConfig) -> np.ndarray:
    """Radians per position of each pair of a head's numbers, float64 `[head_dim / 2]`.

    Fixed NTK scaling by a factor k replaces θ by θ·k and divides all frequencies by k^(2/d). Mixed
    scaling divides the m-th frequency by exp(log k / (d/2)^b · m^b) (Su, kexue.fm/archives/9706,
    equations 6 and 10 to 13). The published code has one table of these frequencies, k times as
    long as the longest row, so the same frequencies apply to every row.
    """
    width, factor, b = config.head_dim, config.rope_factor, config.rope_mixed_b
    theta = config.rope_theta * (factor if b is None else 1.0)
    plain = theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if b is None:
        return plain / factor ** (2 / width)
    number = np.arange(1, width // 2 + 1, dtype=np.float64)
    return plain / np.exp(np.log(factor) / (width / 2) ** b * number**b)


class GteLayer(nn.Module):
    """Self-attention and a gated feed-forward, each followed by a residual sum and a norm."""

    config: GteConfig
    precision: Precision
    group: Group = Group()

    @nn.compact
    def __call__(self, x: jax.Array, layout: Layout, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout`; cos, sin `[T, head_dim/2]` → `[T, H]`."""
        c, width = self.config, x.shape[-1]
        projected = self._linear(3 * width, QKV)(x, layout.dropout)
        heads = projected.reshape(len(x), 3, c.num_attention_heads, c.head_dim)
        turned = (rotate_halves(heads[:, i], cos, sin) for i in (0, 1))
        rows, length = layout.place.shape
        query, key, value = (
            to_rows(part.reshape(len(x), width), layout).reshape(rows, length, -1, c.head_dim)
            for part in (*turned, heads[:, 2])
        )
        lengths = jnp.maximum(layout.lengths, 1)
        kept = kept_weights(layout.dropout, layout.place, c.num_attention_heads)
        attended = padded_attention(query, key, value, lengths, precision=self.precision, kept=kept)
        attended = from_rows(attended.reshape(rows, length, width), layout)
        attended = self._linear(width, "attention_output")(attended, layout.dropout)
        attended = drop_hidden(attended, layout.dropout, ATTENTION_OUTPUT)
        x = self._norm("attention_norm")(x + attended)
        both = self._linear(2 * c.intermediate_size, UP_GATE, bias=False)(x, layout.dropout)
        up, gate = jnp.split(both, 2, axis=-1)
        hidden = ACTIVATIONS[c.hidden_act](gate) * up
        if c.DROPS_GATED:
            hidden = drop_hidden(hidden, layout.dropout, GATED)
        hidden = self._linear(width, "down")(hidden, layout.dropout)
        hidden = drop_hidden(hidden, layout.dropout, OUTPUT)
        return self._norm("output_norm")(x + hidden)

    def _linear(self, features: int, name: str, bias: bool = True) -> Linear:
        bias = bias and self.config.BIASES
        return Linear(features, self.precision.products, bias, self.group, name=name)

    def _norm(self, name: str) -> nn.Module:
        # Flax computes mean and variance in float32 for every dtype.
        kind = nn.LayerNorm if self.config.layer_norm_type == LAYER_NORM else nn.RMSNorm
        epsilon = self.config.layer_norm_eps
        return kind(epsilon=epsilon, dtype=self.precision.activations, name=name)

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        x, angle = jnp.zeros((1, self.config.hidden_size)), jnp.zeros(self.config.head_dim // 2)
        layout = padded_layout(jnp.ones(1, jnp.int32), 1)
        return self.init(key, x, layout, angle[None], angle[None])["params"]


class Gte(LayeredTrunk):
    """GTE: packed word vectors to last hidden states. Segment ids are all 0, as in retrievers."""

    config: GteConfig

    def layer(self) -> GteLayer:
        """The module of every layer, without a parent."""
        return GteLayer(self.config, self.precision, self.group, parent=None)

    def setup(self) -> None:
        c, init = self.config, nn.initializers.normal(0.02)
        self.make_words()
        sizes = {"token_type_embeddings": c.type_vocab_size}
        self.tables = {
            name: self.param(name, init, (size, c.hidden_size))
            for name, size in sizes.items()
            if size  # a model without segments has no table for them
        }
        self.embedding_norm = nn.LayerNorm(
            epsilon=c.layer_norm_eps, dtype=self.precision.activations
        )
        self.layers = self.layers_params()

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """The hidden states of `words` `[T, H]`: rows of the word table, placed as in `layout`.

        Returns:
            Hidden states `[T, H]`; at unused places they are finite but meaningless.
        """
        c = self.config
        if c.type_vocab_size:
            words = words + self.tables["token_type_embeddings"][:1]
        x = drop_hidden(self.embedding_norm(words), layout.at_depth(0).dropout, EMBEDDINGS)
        cos, sin = angles_at(layout.position, frequencies(c), layout.place.shape[1] - 1)
        return self.through_layers(self.layers, x, layout, (cos, sin))


# Our module → the module of NewModel.
LAYER_DENSE = {
    QKV: "attention.qkv_proj",
    "attention_output": "attention.o_proj",
    UP_GATE: "mlp.up_gate_proj",  # without a bias
    "down": "mlp.down_proj",
}
LAYER_NORMS = {"attention_norm": "attn_ln", "output_norm": "mlp_ln"}

# Published folders hold a model with a head, in which the trunk is called "new"
# (gte-multilingual-base: NewForTokenClassification). Folders written here hold NewModel, the trunk.
TABLE = NameTable(
    names={
        (ours,): f"{theirs}.weight"
        for ours, theirs in EMBEDDING_TABLES.items()
        if ours != "position_embeddings"
    }
    | module_names((), "", EMBEDDING_NORM, NORM_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, DENSE_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_NORMS, NORM_LEAVES),
    prefixes=("", "new.", "model.", "0.auto_model."),
    trunk=("embeddings.", "encoder."),
    ignored=re.compile(r"embeddings\.(position_ids|rotary_emb\.)"),  # buffers, not weights
    model_type="new",
    architecture="NewModel",
)

# How parameters are split over a mesh (see `runtime.sharding`): over `fsdp` alone.
PARTITION_RULES = ALL_SPLIT
