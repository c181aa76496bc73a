"""Hugging Face's names of Qwen3's weights: the table for the parameter tree of `qwen3.Qwen3`."""

from __future__ import annotations

import re

from qrag_jax.models.files.weight_names import DENSE_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.models.trunks.trunk import LAYERS, WORDS
from qrag_jax.runtime.sharding import split_rules

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
