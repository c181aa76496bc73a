"""Adapters in PEFT's format: some targets, and what does not fit.

That every family's adapters go both ways: `tests.conformance.test_encoders`.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from qrag_jax.errors import InputError
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.pretrained import LoraConfig, with_new_adapters, write_adapters
from tests.support.adapters import with_adapters
from tests.support.small_models import torch_trunk

peft = pytest.importorskip("peft", reason="peft, the reference for adapter files, is missing")

TOKENS = np.random.default_rng(0).integers(6, 40, (3, 9)).astype(np.int32)
LENGTHS = np.array([9, 4, 7], np.int32)


def test_peft_reads_ours_with_some_targets(family_bases, tmp_path) -> None:
    family, targets = "xlm-roberta", ("value", "output.dense")  # attention's output as well
    config = LoraConfig(4, 6.0, targets, 0.1)
    loaded = with_new_adapters(family_bases[family], config, seed=0)
    rng = np.random.default_rng(1)
    maps = loaded.adapters["layers"]
    assert set(maps) == {"value", "attention_output", "output"}
    for leaves in maps.values():
        assert not leaves["lora_b"].any()  # they change nothing at first
        assert 0 < np.abs(leaves["lora_a"]).max() <= leaves["lora_a"].shape[1] ** -0.5
        leaves["lora_b"] += 0.3 * rng.standard_normal(leaves["lora_b"].shape).astype(np.float32)
    write_adapters(tmp_path, loaded.table, config, loaded.adapters)
    model = peft.PeftModel.from_pretrained(torch_trunk(family), tmp_path).eval()
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (4, 6.0, 0.1)
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        tokens = torch.tensor(TOKENS, dtype=torch.long)
        expected = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    tower = loaded.encoder.alone(Adapted(loaded.params, loaded.adapters))
    found = np.asarray(jax.jit(loaded.encoder.module.hidden_states)(tower, TOKENS, LENGTHS))
    np.testing.assert_allclose(found[mask.numpy()], expected[mask].numpy(), atol=1e-4)
    again = with_adapters(family_bases[family], tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.adapters, loaded.adapters)
    assert (again.encoder.lora_scale, again.encoder.lora_dropout) == (1.5, 0.1)


def test_targets_that_are_no_maps_are_refused(family_bases) -> None:
    config = LoraConfig(4, 8.0, ("word_embeddings", "c_attn"))
    with pytest.raises(InputError, match=r"lora\.targets.*'word_embeddings'"):
        with_new_adapters(family_bases["bert"], config, 0)
