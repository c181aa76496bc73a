"""The names of GTE's weights in its files: the table for the parameter tree of `gte.Gte`."""

from __future__ import annotations

import re

from qrag_jax.models.files.weight_names import DENSE_LEAVES, NORM_LEAVES, NameTable, module_names
from qrag_jax.models.trunks.bert_weights import EMBEDDING_NORM, EMBEDDINGS, LAYER
from qrag_jax.models.trunks.gte import QKV, UP_GATE
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.runtime.sharding import ALL_SPLIT

# Our module → the module of NewModel.
LAYER_DENSE = {
    QKV: "attention.qkv_proj",
    "attention_output": "attention.o_proj",
    UP_GATE: "mlp.up_gate_proj",  # without a bias
    "down": "mlp.down_proj",
}
LAYER_NORM = {"attention_norm": "attn_ln", "output_norm": "mlp_ln"}

# Published folders hold a model with a head, in which the trunk is called "new"
# (gte-multilingual-base: NewForTokenClassification). Folders written here hold NewModel, the trunk.
TABLE = NameTable(
    names={
        (ours,): f"{theirs}.weight"
        for ours, theirs in EMBEDDINGS.items()
        if ours != "position_embeddings"
    }
    | module_names((), "", EMBEDDING_NORM, NORM_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_DENSE, DENSE_LEAVES)
    | module_names((LAYERS,), LAYER, LAYER_NORM, NORM_LEAVES),
    prefixes=("", "new.", "model.", "0.auto_model."),
    trunk=("embeddings.", "encoder."),
    ignored=re.compile(r"embeddings\.(position_ids|rotary_emb\.)"),  # buffers, not weights
    model_type="new",
    architecture="NewModel",
)

# How parameters are split over a mesh (see `runtime.sharding`): over `fsdp` alone.
PARTITION_RULES = ALL_SPLIT
