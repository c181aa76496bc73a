"""MPNet in Flax (Song et al., arXiv 2004.09297): the trunk of all-mpnet-base-v2.

It is BERT with shifted positions, as XLM-RoBERTa's, and without segments. Besides, a learned number
for each distance between two tokens is added to the scores of attention. One table holds these
numbers for all layers; as in T5, far distances share a row of it (Raffel et al., arXiv 1910.10683).
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
from qrag_jax.models.compute.group import TENSOR, first_of_part, used_by_all
from qrag_jax.models.compute.packing import Layout
from qrag_jax.models.compute.row_sums import take_rows
from qrag_jax.models.files.weight_names import DENSE_LEAVES, NORM_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.bert import EMBEDDING_NORM, LAYER, Bert, BertConfig
from qrag_jax.models.trunks.trunk import LAYERS, WORDS

DISTANCES = "relative_attention_bias"  # leaf: a number for each bucket and head
BUCKETS, FARTHEST = 32, 128  # distances of 128 or more are in the last bucket of their side
UNUSED_POSITIONS = 2  # of the position table; the models of Hugging Face fix their padding id at 1


@dataclasses.dataclass(frozen=True)
class MpnetConfig(BertConfig):
    """Sizes of an MPNet encoder, named as in Hugging Face's `config.json`.

    `max_position_embeddings` also counts the unused first rows of the position table.
    """

    model_types: ClassVar[tuple[str, ...]] = ("mpnet",)

    type_vocab_size: int = 0

    @property
    def first_position(self) -> int:
        return UNUSED_POSITIONS

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], where: str) -> Self:
        """Reads the fields of a parsed `config.json`; `where` names the file in errors."""
        for name, known in (("relative_attention_num_buckets", BUCKETS), ("pad_token_id", 1)):
            value = config.get(name, known)
            if value != known:
                raise InputError(
                    f"{where}: {name} {value!r:.60} is not computed here, only {known}."
                )
        result = super().from_dict({**config, "type_vocab_size": 0}, where)
        if result.longest_row < 1:
            raise InputError(
                f"{where}: max_position_embeddings is {result.max_position_embeddings}, but the "
                f"first {UNUSED_POSITIONS} positions are unused; copy it from the model's own "
                "config.json."
            )
        return result


def buckets(length: int) -> np.ndarray:
    """The bucket of each distance, key's position minus query's, from 1 - L to L - 1: `[2L - 1]`.

    Half of the buckets are for keys behind the query. In each half the first 8 buckets are of one
    distance each, and the others grow by a constant factor.
    """
    distance = np.arange(1 - length, length)
    half = BUCKETS // 2
    single = half // 2
    far = np.maximum(np.abs(distance), single).astype(np.float32)
    # In float32 as in torch: where a bucket begins, rounding decides.
    grown = np.log(far / single) / np.float32(np.log(FARTHEST / single)) * np.float32(half - single)
    bucket = np.where(np.abs(distance) < single, np.abs(distance), single + grown.astype(np.int64))
    return np.minimum(bucket, half - 1) + half * (distance > 0)


def by_pairs(values: jax.Array) -> jax.Array:
    """Values of distances `[2L - 1, heads]` → of pairs `[heads, L, L]`, by query and key.

    Each row is the row above, moved by one. So all rows are one long row, cut anew, and no gather
    is needed, whose gradient would be a scatter.
    """
    length = (len(values) + 1) // 2
    padded = jnp.pad(values.T, ((0, 0), (0, 1)))
    long = jnp.tile(padded, (1, length))[:, : length * (2 * length - 1)]
    return long.reshape(-1, length, 2 * length - 1)[:, :, length - 1 :]


class Mpnet(Bert):
    """MPNet: packed word vectors to last hidden states."""

    LEARNED_CONSTANTS: ClassVar[bool] = True

    config: MpnetConfig

    def setup(self) -> None:
        super().setup()
        init = nn.initializers.normal(0.02)
        self.distances = self.param(DISTANCES, init, (BUCKETS, self.config.num_attention_heads))

    def __call__(self, words: jax.Array, layout: Layout) -> jax.Array:
        """See `Bert`."""
        x = self.embedded(words, layout)
        return self.through_layers(self.layers, x, layout, (self._bias(layout.place.shape[1]),))

    def _bias(self, length: int) -> jax.Array:
        """What is added to the scores of this device's heads, float32 `[heads, L, L]`."""
        table, group = jnp.asarray(self.distances, jnp.float32), self.group
        heads = self.config.num_attention_heads // group.tensor
        if group.tensor > 1:
            table = used_by_all(TENSOR, table)
            table = jax.lax.dynamic_slice_in_dim(table, first_of_part(group, heads), heads, 1)
        return by_pairs(take_rows(table, jnp.asarray(buckets(length))))


LAYER_DENSE = {
    "query": "attention.attn.q",
    "key": "attention.attn.k",
    "value": "attention.attn.v",
    "attention_output": "attention.attn.o",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
}
LAYER_NORM = {"attention_norm": "attention.LayerNorm", "output_norm": "output.LayerNorm"}

TABLE = NameTable(
    names={
        (WORDS,): "embeddings.word_embeddings.weight",
        ("position_embeddings",): "embeddings.position_embeddings.weight",
        (DISTANCES,): "encoder.relative_attention_bias.weight",
    }
    | module_names((), "", EMBEDDING_NORM, NORM_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, DENSE_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_NORM, NORM_LEAVES),
    prefixes=("", "mpnet.", "model.", "0.auto_model."),
    trunk=("embeddings.", "encoder."),
    ignored=re.compile(r"embeddings\.position_ids"),  # a buffer, not a weight
    model_type="mpnet",
    architecture="MPNetModel",
)
