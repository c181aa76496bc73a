"""The encoders' full sizes, as shapes only, have as many numbers as the published weights."""

from __future__ import annotations

import math
from typing import Any

import pytest

from qrag_jax.models.compute.precision import Precision
from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.pretrained import family_of

MODERNBERT: dict[str, Any] = {
    "model_type": "modernbert",
    "attention_bias": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "position_embedding_type": "absolute",  # which no code reads
    "vocab_size": 50368,
}
MPNET: dict[str, Any] = {
    "model_type": "mpnet",
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "vocab_size": 30527,
}
NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert",
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 30528,
}
BGE_M3: dict[str, Any] = {
    "model_type": "xlm-roberta",
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 8194,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 250002,
}


@pytest.mark.parametrize(
    ("fields", "numbers", "longest"),
    [
        (MODERNBERT, 149_014_272, 8192),  # modernbert-embed-base, gte-modernbert-base
        # all-mpnet-base-v2 has 109,486,978 with its pooler and the ids of its 514 positions.
        (MPNET, 109_486_978 - (768 + 1) * 768 - 514, 512),
        (NOMIC, 136_731_648, 8192),  # nomic-embed-text-v1.5
        (BGE_M3, 567_754_752 - (1024 + 1) * 1024, 8192),  # with a pooler
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_as_many_numbers(fields: dict[str, Any], numbers: int, longest: int) -> None:
    family = family_of(fields, "config.json")
    config = family.read_config(fields, "config.json")
    shapes = expected_shapes(family.table, family.trunk(config, Precision(), "none", False))
    assert sum(math.prod(shape) for shape in shapes.values()) == numbers
    assert config.longest_row == longest
