"""BERT in Flax (Devlin et al., 2019): the trunk of Contriever, MiniLM and other BERT folders."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from qrag_jax.errors import InputError
from qrag_jax.models.compute.attention import padded_attention
from qrag_jax.models.compute.dropout import (
    ATTENTION_OUTPUT,
    EMBEDDINGS,
    OUTPUT,
    drop_hidden,
    kept_weights,
)
from qrag_jax.models.compute.group import Group, first_of_part
from qrag_jax.models.compute.linear import Linear, side_by_side
from qrag_jax.models.compute.packing import Layout, from_rows, padded_layout, to_rows
from qrag_jax.models.compute.parts import SplitMaps
from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.files.weight_names import (
    DENSE_LEAVES,
    NORM_LEAVES,
    LeafPath,
    NameTable,
    module_names,
)
from qrag_jax.models.trunks.trunk import (
    LAYERS,
    WORDS,
    LayeredTrunk,
    Params,
    given_fields,
)
from qrag_jax.runtime.sharding import split_rules


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), exact. Its gradient stores only x, a third of what autodiff stores."""
    return jax.nn.gelu(x, approximate=False)


def _gelu_backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    cdf = 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * jnp.pi) ** -0.5
    return (gradient * (cdf + x * density),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)

PROJECTIONS = ("query", "key", "value")  # three maps in the file, as in every BERT folder
QKV = "query_key_value"  # computed as one

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT encoder, named and defined as in Hugging Face's `config.json`."""

    model_types: ClassVar[tuple[str, ...]] = ("bert",)

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
        """The most tokens of a row that the position table has room for."""
        return self.max_position_embeddings - self.first_position

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        if config.get("model_type", cls.model_types[0]) not in cls.model_types:
            raise InputError(
                f"{where}: model_type {config['model_type']!r} is not computed here, only "
                f"{' or '.join(cls.model_types)}."
            )
        result = cls(**given_fields(cls, config, where))
        if result.hidden_act not in ACTIVATIONS:
            raise InputError(
                f"{where}: hidden_act {result.hidden_act!r} is not one of {', '.join(ACTIVATIONS)}."
            )
        position = config.get("position_embedding_type", "absolute")
        if position != "absolute":
            raise InputError(
                f"{where}: position_embedding_type {position!r} is not supported, only 'absolute'."
            )
        if result.hidden_size % result.num_attention_heads:
            raise InputError(
                f"{where}: hidden_size {result.hidden_size} is not a multiple of "
                f"num_attention_heads {result.num_attention_heads}."
            )
        return result


class BertLayer(nn.Module):
    """Self-attention and feed-forward, each followed by a residual sum and a LayerNorm."""

    config: BertConfig
    precision: Precision
    group: Group = Group()

    @nn.compact
    def __call__(self, x: jax.Array, layout: Layout, bias: jax.Array | None = None) -> jax.Array:
        """x `[T, H]`, its rows placed as in `layout` → `[T, H]`; bias as in `padded_attention`."""
        c, parts = self.config, self.group.tensor
        width, heads = x.shape[-1], c.num_attention_heads // parts
        projected = to_rows(self._linear(3 * width // parts, QKV)(x, layout.dropout), layout)
        rows, length, _ = projected.shape
        by_head = (rows, length, 3, heads, width // c.num_attention_heads)
        query, key, value = jnp.moveaxis(projected.reshape(by_head), 2, 0)
        lengths = jnp.maximum(layout.lengths, 1)
        first = first_of_part(self.group, heads)
        kept = kept_weights(layout.dropout, layout.place, heads, first)
        how: dict[str, Any] = {"precision": self.precision, "kept": kept, "bias": bias}
        attended = padded_attention(query, key, value, lengths, **how)
        attended = from_rows(attended.reshape(rows, length, -1), layout)
        attended = self._linear(width, "attention_output", closes=True)(attended, layout.dropout)
        attended = drop_hidden(attended, layout.dropout, ATTENTION_OUTPUT)
        x = self._norm("attention_norm")(x + attended)
        hidden = self._linear(c.intermediate_size // parts, "intermediate")(x, layout.dropout)
        hidden = ACTIVATIONS[c.hidden_act](hidden)
        hidden = self._linear(width, "output", closes=True)(hidden, layout.dropout)
        hidden = drop_hidden(hidden, layout.dropout, OUTPUT)
        return self._norm("output_norm")(x + hidden)

    def _linear(self, features: int, name: str, closes: bool = False) -> Linear:
        products = self.precision.products
        return Linear(features, products, group=self.group, closes=closes, name=name)

    def _norm(self, name: str) -> nn.LayerNorm:
        # Flax computes mean and variance in float32 for every dtype.
        return nn.LayerNorm(
            epsilon=self.config.layer_norm_eps, dtype=self.precision.activations, name=name
        )

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of one layer."""
        x = jnp.zeros((1, self.config.hidden_size))
        return self.init(key, x, padded_layout(jnp.ones(1, jnp.int32), 1))["params"]


class Bert(LayeredTrunk):
    """BERT: packed word vectors to last hidden states. Segment ids are all 0, as in retrievers."""

    SPLIT: ClassVar[SplitMaps] = SplitMaps(
        columns=(*PROJECTIONS, "intermediate"), rows=("attention_output", "output"), tables=(WORDS,)
    )

    config: BertConfig

    def layer(self) -> BertLayer:
        """The module of every layer, without a parent."""
        return BertLayer(self.config, self.precision, self.group, parent=None)

    def shared_sizes(self) -> dict[str, int]:
        """Sizes that a tensor axis must divide, by their name in `config.json`."""
        names = ("num_attention_heads", "intermediate_size")
        return {name: getattr(self.config, name) for name in names}

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.make_words()
        sizes = {
            "position_embeddings": c.max_position_embeddings,
            "token_type_embeddings": c.type_vocab_size,
        }
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
        return self.through_layers(self.layers, self.embedded(words, layout), layout)

    def embedded(self, words: jax.Array, layout: Layout) -> jax.Array:
        """What the first layer gets, `[T, H]`: word, position and segment vectors, normed."""
        table = jnp.asarray(self.tables["position_embeddings"])
        total = words + take_rows(table, layout.position + self.config.first_position)
        if self.config.type_vocab_size:
            total = total + self.tables["token_type_embeddings"][:1]
        return drop_hidden(self.embedding_norm(total), layout.at_depth(0).dropout, EMBEDDINGS)

    def join(self, layer: Params) -> Params:
        """Joins the three maps that are stored separately into one."""
        layer[QKV] = side_by_side([layer.pop(name) for name in PROJECTIONS])
        return layer

    def split(self, layer: Params) -> Params:
        """The inverse of `join`."""
        parts = jax.tree.map(lambda leaf: jnp.split(leaf, 3, axis=-1), layer.pop(QKV))
        for j, name in enumerate(PROJECTIONS):
            layer[name] = {leaf: part[j] for leaf, part in parts.items()}
        return layer


# Our module → Hugging Face's module.
EMBEDDING_TABLES = {
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
}
EMBEDDING_NORM = {"embedding_norm": "embeddings.LayerNorm"}
LAYER_DENSE = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}
LAYER_NORM = {
    "attention_norm": "attention.output.LayerNorm",
    "output_norm": "output.LayerNorm",
}
LAYER = "encoder.layer.{}."


def name_table() -> dict[LeafPath, str]:
    """Leaf of the parameter tree → Hugging Face name, with `{}` for the layer's number."""
    return (
        {(ours,): f"{theirs}.weight" for ours, theirs in EMBEDDING_TABLES.items()}
        | module_names((), "", EMBEDDING_NORM, NORM_LEAVES)
        | module_names((LAYERS,), LAYER, LAYER_DENSE, DENSE_LEAVES)
        | module_names((LAYERS,), LAYER, LAYER_NORM, NORM_LEAVES)
    )


TABLE = NameTable(
    names=name_table(),
    prefixes=("", "bert.", "model.", "0.auto_model."),
    trunk=("embeddings.", "encoder."),
    ignored=re.compile(r"embeddings\.(position_ids|token_type_ids)"),  # buffers, not weights
    model_type="bert",
    architecture="BertModel",
    old_endings={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
)


# How parameters are split over a mesh (see `runtime.sharding`).
PARTITION_RULES = split_rules(Bert.SPLIT.columns, Bert.SPLIT.rows)


@dataclasses.dataclass(frozen=True)
class XlmRobertaConfig(BertConfig):
    """XLM-RoBERTa (Conneau et al., 2020) or RoBERTa (Liu et al., 2019): BERT, shifted positions.

    XLM-RoBERTa is the trunk of multilingual E5. The position table begins with unused rows, one for
    each id up to the padding token's, as in the models of Hugging Face and fairseq;
    `max_position_embeddings` counts them, too.
    """

    model_types: ClassVar[tuple[str, ...]] = ("xlm-roberta", "roberta")

    pad_token_id: int = 1

    @property
    def first_position(self) -> int:
        return self.pad_token_id + 1

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        result = super().from_dict(config, where)
        if result.longest_row < 1 or result.pad_token_id < 0:
            raise InputError(
                f"{where}: positions begin behind pad_token_id {result.pad_token_id}, but "
                f"max_position_embeddings is {result.max_position_embeddings}; copy both from the "
                "model's own config.json."
            )
        return result


XLM_ROBERTA_TABLE = dataclasses.replace(
    TABLE,
    prefixes=("", "roberta.", "model.", "0.auto_model."),
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
)
ROBERTA_TABLE = dataclasses.replace(
    XLM_ROBERTA_TABLE, model_type="roberta", architecture="RobertaModel"
)
