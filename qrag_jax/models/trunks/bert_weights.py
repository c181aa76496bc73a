"""Converts weights between Hugging Face's BERT names and the parameter tree of `bert.Bert`."""

from __future__ import annotations

import re

from qrag_jax.models.files.weight_names import (
    DENSE_LEAVES,
    NORM_LEAVES,
    LeafPath,
    NameTable,
    module_names,
)
from qrag_jax.models.trunks.bert import Bert
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.runtime.sharding import split_rules

# Our module → Hugging Face's module.
EMBEDDINGS = {
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
        {(ours,): f"{theirs}.weight" for ours, theirs in EMBEDDINGS.items()}
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
