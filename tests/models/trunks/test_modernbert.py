"""ModernBERT: local layers, the layer without a norm, spellings of its config, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.compute.packing import packed_layout
from qrag_jax.models.files.model_folder import read_safetensors
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.modernbert import GLOBAL, LOCAL, ModernBert, ModernBertConfig
from tests.models.trunks.test_published_sizes import MODERNBERT
from tests.support.small_models import write_small_model

SMALL = ModernBertConfig(
    vocab_size=20,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
    local_attention=8,
    layer_types=(LOCAL,),
)


def read(**fields: Any) -> ModernBertConfig:
    return ModernBertConfig.from_dict(MODERNBERT | fields, "config.json")


def test_a_local_layer_sees_four_tokens_of_its_own_row() -> None:
    module = ModernBert(SMALL)
    prepared = module.prepare(module.init_params(jax.random.key(0)))
    layout = packed_layout(jnp.array([30, 10]), 40, 30)
    rng = np.random.default_rng(0)
    words, other = rng.normal(size=(2, 40, 16)).astype(np.float32)
    changed = np.isin(np.arange(40), (12, 29))  # in the middle of the first row, and its end
    other = np.where(changed[:, None], other, words)
    apply = jax.jit(lambda words: module.apply({"params": prepared}, words, layout))
    changed = np.abs(apply(words) - apply(other)).max(axis=-1) > 0
    assert np.flatnonzero(changed).tolist() == [*range(8, 17), *range(25, 30)]


def test_the_first_layer_has_no_norm_before_attention(tmp_path: Path) -> None:
    folder = write_small_model("modernbert", tmp_path / "model")
    loaded = load_encoder(folder)
    scale = loaded.params["layers"]["attention_norm"]["scale"]
    assert scale.shape == (2, 16)
    np.testing.assert_array_equal(scale[0], 1)
    assert np.abs(scale[1] - 1).max() > 0.1
    encoder, params = loaded.encoder, loaded.params
    tokens, lengths = np.arange(12, dtype=np.int32)[None], np.array([12])

    def total(params: Any) -> jax.Array:
        return jnp.square(encoder.module.hidden_states(params, tokens, lengths)).sum()

    gradient = jax.jit(jax.grad(total))(params)["layers"]["attention_norm"]["scale"]
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.abs(gradient[1]).max() > 0
    save_encoder(loaded, folder, tmp_path / "out")
    one, two = (read_safetensors(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert one.keys() == two.keys()
    assert "layers.0.attn_norm.weight" not in two
    for name, tensor in one.items():
        np.testing.assert_array_equal(two[name], tensor, err_msg=name)


def test_older_and_newer_files_say_the_same() -> None:
    older = read()
    assert older.layer_types == tuple(GLOBAL if i % 3 == 0 else LOCAL for i in range(22))
    assert (older.global_rope_theta, older.local_rope_theta) == (160_000.0, 10_000.0)
    fields = {name: v for name, v in MODERNBERT.items() if not name.startswith(("glob", "local_r"))}
    newer = fields | {
        "layer_types": list(older.layer_types),
        "rope_parameters": {
            GLOBAL: {"rope_type": "default", "rope_theta": 160000.0},
            LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    assert ModernBertConfig.from_dict(newer, "") == older
    assert ModernBertConfig.from_dict(fields, "") == older  # by the defaults
    assert read(global_attn_every_n_layers=1).layer_types == (GLOBAL,) * 22


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_activation": "swish2"}, "hidden_activation 'swish2' is not computed here, only"),
        ({"norm_bias": True}, "norm_bias True is not computed here, only False"),
        ({"attention_bias": True}, "attention_bias True is not computed here, only False"),
        ({"mlp_bias": True}, "mlp_bias True is not computed here, only False"),
        ({"layer_types": ["full_attention"] * 3}, "for each of the 22 layers (num_hidden_layers)"),
        ({"layer_types": ["chunked_attention"] * 22}, "must name full_attention or sliding_atte"),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0; it must be a whole"),
        ({"local_attention": 0}, "local_attention is 0; it must be at least 1"),
        ({"local_attention": "all"}, "local_attention is 'all'; give a value such as 128"),
        ({"local_rope_theta": None}, "the rope_theta of sliding_attention (local_rope_theta) is N"),
        ({"global_rope_theta": -1.0}, "full_attention (global_rope_theta) is -1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling is set, but scaled"),
        ({"rope_parameters": {LOCAL: {"rope_type": "yarn"}}}, "have the rope_type 'yarn'"),
        ({"num_attention_heads": 256}, "does not split into 256 heads of even width"),
        ({"hidden_size": None}, "the fields hidden_size are missing"),
        ({"model_type": "bert"}, "model_type 'bert' is not computed here, only 'modernbert'"),
    ],
    ids=str,
)
def test_models_that_are_not_computed(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        read(**fields)
    assert str(caught.value).startswith("config.json: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
