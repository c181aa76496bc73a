"""What trunks read in a `config.json`: sizes, spellings, scaled positions, what is not computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from qrag_jax.errors import InputError
from qrag_jax.models.trunks.families import FAMILIES, GLOBAL, LOCAL
from qrag_jax.models.trunks.transformer import buckets
from tests.support.small_models import small_model

# fmt: off
NOMIC: dict[str, Any] = {  # as it is published
    "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False,
    "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12,
    "n_positions": 8192, "parallel_block": False, "prenorm": False, "qkv_proj_bias": False,
    "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2,
    "use_rms_norm": False, "vocab_size": 30528,
}
# fmt: on
SOUND = {family: small_model(family).config.to_dict() for family in FAMILIES} | {
    "nomic_bert": NOMIC
}


def read(family: str, **changes: Any) -> Any:
    fields = {"model_type": family} | SOUND[family] | changes
    given = {name: value for name, value in fields.items() if value != "absent"}
    return FAMILIES[family].config.from_dict(given, "folder/config.json")


def check_refused(family: str, named: str, **changes: Any) -> None:
    with pytest.raises(InputError) as caught:
        read(family, **changes)
    assert str(caught.value).startswith("folder/config.json: ")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_are_missing_or_no_sizes_are_named(family: str) -> None:
    name = "n_embd" if family == "nomic_bert" else "hidden_size"
    for value in (0, 2.5, "4", 2**40, "absent"):
        check_refused(family, "hidden_size", **{name: value})


ROPE = "rope_parameters"
# What is computed in another way, or not at all: without a refusal vectors would be wrong.
YARN, LINEAR = {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}
# fmt: off
REFUSED: dict[str, list[dict[str, Any]]] = {
    "bert": [{"num_attention_heads": 7}],
    "xlm-roberta": [
        {"pad_token_id": 23}, {"position_embedding_type": "relative_key"},
    ],
    "new": [
        {"logn_attention_scale": True}, {"hidden_act": "swish2"}, {"rope_scaling": LINEAR},
        {"heads": 0, "num_attention_heads": 5},
    ],
    "modernbert": [
        {"attention_bias": True}, {"layer_types": ["chunked"] * 2}, {"local_attention": "all"},
        {"global_rope_theta": -1.0, ROPE: "absent"}, {"yarn": 0, ROPE: {LOCAL: YARN}},
    ],
    "mpnet": [
        {"relative_attention_num_buckets": 64}, {"pad_token_id": 0},
        {"positions": 0, "max_position_embeddings": 2},
    ],
    "nomic_bert": [
        {"prenorm": True}, {"activation_function": "gelu"}, {"rotary_emb_interleaved": True},
        {"rope_scaling": {"type": "yarn"}}, {"moe_every_n_layers": 2},  # nomic-embed-text-v2-moe
    ],
    "qwen3": [
        {"rope_scaling": YARN}, {"head_dim": 15}, {"window": 0, "use_sliding_window": True},
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
    bare = {"num_hidden_layers": 5, "layer_types": "absent", ROPE: "absent"}
    thetas = {GLOBAL: 160_000.0, LOCAL: 10_000.0}
    older = {"global_rope_theta": thetas[GLOBAL], "local_rope_theta": thetas[LOCAL]}
    rope = {kind: {"rope_type": "default", "rope_theta": v} for kind, v in thetas.items()}
    newer = {"layer_types": [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL], ROPE: rope}
    config = read("modernbert", **(bare | newer))
    assert config == read("modernbert", **(bare | older | {"global_attn_every_n_layers": 3}))
    assert config == read("modernbert", **bare)  # by the defaults
    assert config.layer_types == tuple(newer["layer_types"])
    assert (config.global_rope_theta, config.local_rope_theta) == (160_000.0, 10_000.0)


def test_places_before_the_first_position_are_no_room_for_tokens() -> None:
    assert read("mpnet", max_position_embeddings=514).longest_row == 512
    assert read("bert", max_position_embeddings=514).longest_row == 514


def test_buckets_of_mpnet_are_those_of_torch() -> None:
    expected = MPNetEncoder.relative_position_bucket(torch.arange(-2099, 2100))
    np.testing.assert_array_equal(buckets(2100), expected.numpy())
    assert buckets(1).tolist() == [0]
