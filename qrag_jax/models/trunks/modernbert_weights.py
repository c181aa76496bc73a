"""The names of ModernBERT's weights in its files: the table for `modernbert.ModernBert`."""

from __future__ import annotations

import re

from qrag_jax.models.files.weight_names import NameTable, module_names
from qrag_jax.models.trunks.modernbert import GATE_UP, QKV
from qrag_jax.models.trunks.trunk import LAYERS, WORDS
from qrag_jax.runtime.sharding import ALL_SPLIT

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
