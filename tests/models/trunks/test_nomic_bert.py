"""NomicBERT: both spellings of its config, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from qrag_jax.errors import InputError
from qrag_jax.models.pretrained import load_encoder, save_encoder
from qrag_jax.models.trunks.nomic_bert import NomicBertConfig
from tests.models.trunks.test_published_sizes import NOMIC
from tests.support.small_models import torch_nomic_bert, write_small_model


def test_a_published_folder_is_written_so_that_transformers_reads_it(tmp_path: Path) -> None:
    """transformers' own class reads no field of the published spelling, only the weights."""
    folder = write_small_model("nomic_bert", tmp_path / "model")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 64}
    published = NOMIC | sizes | {"vocab_size": 60, "rotary_emb_base": 500}
    (folder / "config.json").write_text(json.dumps(published))
    loaded = load_encoder(folder)
    assert loaded.encoder.module.config.rope_theta == 500.0
    save_encoder(loaded, folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert published.items() <= written.items()  # for the published code
    back = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert back.config.rope_parameters == {"rope_type": "default", "rope_theta": 500}
    for name, tensor in torch_nomic_bert().state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    tokens = np.random.default_rng(0).integers(4, 60, (1, 30))
    with torch.no_grad():
        expected = back(input_ids=torch.from_numpy(tokens)).last_hidden_state
    found = loaded.encoder.module.hidden_states(loaded.params, tokens, np.array([30]))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_scaled_positions_limit_rows() -> None:
    """The published code scales positions in rows of more tokens than it was trained with."""
    config = NomicBertConfig.from_dict(NOMIC | {"rotary_scaling_factor": 2}, "config.json")
    assert (config.longest_row, config.rope_theta, config.rope_factor) == (2048, 1000.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"activation_function": "gelu"}, "activation_function 'gelu' is not computed here, only"),
        ({"hidden_act": "swish2"}, "hidden_act 'swish2' is not computed here, only 'silu', "),
        ({"prenorm": True}, "prenorm True is not computed here, only False"),
        ({"parallel_block": True}, "parallel_block True is not"),
        ({"causal": True}, "causal True is not"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias True is not"),
        ({"mlp_fc1_bias": True}, "mlp_fc1_bias True is not"),
        ({"use_rms_norm": True}, "use_rms_norm True is not"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction 0.5 is not computed here, only 1.0"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base 512 is not computed here, only N"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers 2 is not"),  # nomic-embed-text-v2-moe
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling and rope_parameters ask for scaled"),
        ({"rope_parameters": {"rope_type": "linear"}}, "ask for scaled positions"),
        ({"head_dim": 32}, "hidden_size 768 does not split into 12 heads"),
        ({"n_head": 256}, "hidden_size 768 does not split into 256 heads of even width"),
        ({"n_embd": None}, "the fields hidden_size are missing"),
        ({"model_type": "bert"}, "model_type 'bert' is not computed here, only 'nomic_bert'"),
    ],
    ids=str,
)
def test_models_that_are_not_computed(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        NomicBertConfig.from_dict(NOMIC | fields, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
