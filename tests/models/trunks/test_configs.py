"""What trunks read in a `config.json`: sizes, spellings, scaled positions, what is not computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from qrag_jax.errors import InputError
from qrag_jax.models.files.weight_names import expected_shapes
from qrag_jax.models.trunks.families import FAMILIES, GLOBAL, LOCAL
from qrag_jax.models.trunks.transformer import Transformer, buckets
from tests.support.small_models import small_model

# fmt: off
BASE: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
MODERNBERT: dict[str, Any] = BASE | {
    "attention_bias": False, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
    "hidden_activation": "gelu", "intermediate_size": 1152, "local_attention": 128,
    "local_rope_theta": 10000.0, "max_position_embeddings": 8192, "mlp_bias": False,
    "norm_bias": False, "norm_eps": 1e-05, "num_hidden_layers": 22, "vocab_size": 50368,
    "position_embedding_type": "absolute",  # which no code reads
}
NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False,
    "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12,
    "n_positions": 8192, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2,
    "use_rms_norm": False, "vocab_size": 30528,
}
GTE = BASE | {
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
    "logn_attention_scale": False, "max_position_embeddings": 8192, "pack_qkv": True,
    "position_embedding_type": "rope", "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000, "type_vocab_size": 1, "vocab_size": 250048,
}
BGE_M3 = transformers.XLMRobertaConfig(
    vocab_size=250002, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
    num_hidden_layers=24, max_position_embeddings=8194, type_vocab_size=1,
).to_dict()
# fmt: on
# A published config of each family, by its model_type.
PUBLISHED: dict[str, dict[str, Any]] = {
    "bert": transformers.BertConfig().to_dict(),
    "xlm-roberta": BGE_M3,
    "roberta": BGE_M3 | {"model_type": "roberta"},
    "new": GTE,
    "modernbert": MODERNBERT,
    "mpnet": transformers.MPNetConfig(max_position_embeddings=514).to_dict(),
    "nomic_bert": NOMIC,
    "qwen3": small_model("qwen3").config.to_dict(),
}


def read(family: str, **changes: Any) -> Any:
    fields = {"model_type": family} | PUBLISHED[family] | changes
    given = {name: value for name, value in fields.items() if value != "absent"}
    return FAMILIES[family].config.from_dict(given, "folder/config.json")


def check_refused(family: str, named: str, **changes: Any) -> None:
    with pytest.raises(InputError) as caught:
        read(family, **changes)
    assert str(caught.value).startswith("folder/config.json: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "numbers", "longest"),
    [
        ("modernbert", 149_014_272, 8192),  # modernbert-embed-base, gte-modernbert-base
        # all-mpnet-base-v2 has 109,486,978 with its pooler and the ids of its 514 positions.
        ("mpnet", 109_486_978 - (768 + 1) * 768 - 514, 512),
        ("nomic_bert", 136_731_648, 8192),  # nomic-embed-text-v1.5
        ("xlm-roberta", 567_754_752 - (1024 + 1) * 1024, 8192),  # bge-m3, with a pooler
    ],
)
def test_as_many_numbers_as_the_published_weights(family: str, numbers: int, longest: int) -> None:
    config = read(family)
    trunk = Transformer(config)
    shapes = expected_shapes(FAMILIES[family].table, trunk)
    assert sum(math.prod(shape) for shape in shapes.values()) == numbers
    assert config.longest_row == longest


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_missing_or_no_sizes_are_named(family: str) -> None:
    nomic = dict.fromkeys(("n_embd", "n_layer", "n_head")) | BASE  # in the usual spelling
    usual: dict[str, Any] = nomic if family == "nomic_bert" else {}
    required, optional = ["hidden_size", "num_hidden_layers"], ["max_position_embeddings"]
    if family == "qwen3":
        required, optional = [*required, "num_key_value_heads"], [*optional, "head_dim"]
    for name in (*required, *optional):
        for value in (0, 2.5, "4", True, 2**40, *((None, "absent") if name in required else ())):
            check_refused(family, name, **(usual | {name: value}))


ROPE = "rope_parameters"
# What is computed in another way, or not at all: without a refusal vectors would be wrong.
YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}
# fmt: off
REFUSED: dict[str, list[dict[str, Any]]] = {
    "bert": [{"num_attention_heads": 7}],
    "xlm-roberta": [
        {"pad_token_id": 8193}, {"position_embedding_type": "relative_key"},
    ],
    "new": [
        {"logn_attention_scale": True}, {"pack_qkv": False}, {"layer_norm_type": "batch"},
        {"position_embedding_type": "absolute"}, {"hidden_act": "swish2"}, {"rope_scaling": LINEAR},
        {"rope_scaling": {"type": "ntk"}}, {"heads": 0, "num_attention_heads": 512},
    ],
    "modernbert": [
        {"hidden_activation": "swish2"}, {"norm_bias": True}, {"attention_bias": True},
        {"mlp_bias": True}, {"layer_types": [GLOBAL] * 3}, {"layer_types": ["chunked"] * 22},
        {"global_attn_every_n_layers": 0}, {"local_attention": 0}, {"local_rope_theta": None},
        {"local_attention": "all"}, {"norm_eps": math.nan},
        {"global_rope_theta": -1.0}, {"rope_scaling": YARN}, {"yarn": 0, ROPE: {LOCAL: YARN}},
        {"heads": 0, "num_attention_heads": 256},
    ],
    "mpnet": [
        {"relative_attention_num_buckets": 64}, {"pad_token_id": 0}, {"hidden_act": "swish2"},
        {"positions": 0, "max_position_embeddings": 2},
    ],
    "nomic_bert": [
        {"prenorm": True}, {"parallel_block": True}, {"causal": True}, {"qkv_proj_bias": True},
        {"mlp_fc1_bias": True}, {"use_rms_norm": True}, {"activation_function": "gelu"},
        {"hidden_act": "swish2"}, {"rotary_emb_fraction": 0.5}, {"rotary_emb_interleaved": True},
        {"rotary_emb_scale_base": 512}, {"rope_scaling": {"type": "yarn"}},
        {ROPE: {"rope_type": "linear"}}, {"heads": 0, "head_dim": 32},
        {"moe_every_n_layers": 2},  # nomic-embed-text-v2-moe
    ],
    "qwen3": [
        {"rope_scaling": YARN}, {ROPE: YARN}, {"hidden_act": "gelu"}, {"head_dim": 15},
        {"window": 0, "use_sliding_window": True}, {"window": 0, "layer_types": [GLOBAL, LOCAL]},
        {"num_attention_heads": 4, "num_key_value_heads": 3},
    ],
}
# fmt: on


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_are_not_computed(family: str) -> None:
    """The first name of each is in the refusal."""
    for fields in REFUSED[family]:
        check_refused(family, next(iter(fields)), **fields)


# ---------------------------------------------------------------------- spellings, and positions


def test_scaled_positions_of_nomic_limit_rows() -> None:
    """The published code scales positions in rows of more tokens than it was trained with."""
    config = read("nomic_bert", rotary_scaling_factor=2)
    assert (config.longest_row, config.rope_theta, config.rope_factor) == (2048, 1000.0, 1.0)


def test_older_and_newer_files_of_modernbert_say_the_same() -> None:
    older = read("modernbert")
    assert older.layer_types == tuple(GLOBAL if i % 3 == 0 else LOCAL for i in range(22))
    assert (older.global_rope_theta, older.local_rope_theta) == (160_000.0, 10_000.0)
    absent = dict.fromkeys((n for n in MODERNBERT if n.startswith(("glob", "local_r"))), "absent")
    thetas = {GLOBAL: 160000.0, LOCAL: 10000.0}
    rope = {kind: {"rope_type": "default", "rope_theta": v} for kind, v in thetas.items()}
    newer = {"layer_types": list(older.layer_types), ROPE: rope}
    assert read("modernbert", **(absent | newer)) == older
    assert read("modernbert", **absent) == older  # by the defaults
    assert read("modernbert", global_attn_every_n_layers=1).layer_types == (GLOBAL,) * 22


def test_buckets_of_mpnet_are_those_of_torch() -> None:
    expected = MPNetEncoder.relative_position_bucket(torch.arange(-2099, 2100))
    np.testing.assert_array_equal(buckets(2100), expected.numpy())
    assert buckets(1).tolist() == [0]
