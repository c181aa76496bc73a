"""Rows packed into one block, layer after layer and in the gradient, against transformers alone.

The rows are longer than ModernBERT's local window, and the window ends where a row ends.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qrag_jax.models.compute.packing import packed_layout
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained import family_of, load_encoder
from qrag_jax.models.trunks.trunk import WORDS
from tests.models.gradients import check_gradients
from tests.support.parity import gradients_in_files, hugging_face
from tests.support.small_models import write_small_model

LENGTHS = (40, 7, 0, 23, 1, 31)  # 0: there is no such row
PLACES = 110  # the last ones are unused


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "nomic_bert"])
def test_hidden_states_and_gradients_of_a_block(family: str, tmp_path: Path) -> None:
    folder = write_small_model(family, tmp_path, num_hidden_layers=3)
    model, loaded = hugging_face(folder), load_encoder(folder)
    module, params = loaded.encoder.module, loaded.params
    rng, used = np.random.default_rng(0), sum(LENGTHS)
    tokens = rng.integers(3, 60, PLACES)
    weights = rng.normal(size=(used, 16)).astype(np.float32)
    layout = packed_layout(jnp.array(LENGTHS), PLACES, max(LENGTHS))

    @jax.jit
    def loss(params):
        prepared = module.prepare(params)
        hidden = module.apply({"params": prepared}, prepared[WORDS][tokens], layout)[:used]
        return (hidden * weights).sum(), hidden

    (total, found), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    rows = np.split(tokens[:used], np.cumsum(LENGTHS)[:-1])
    states = [
        model(
            input_ids=torch.from_numpy(row)[None],
            attention_mask=torch.ones(1, len(row), dtype=torch.long),
        ).last_hidden_state[0]
        for row in rows
        if len(row)
    ]
    expected = torch.cat(states)
    theirs = (expected * torch.from_numpy(weights)).sum()
    theirs.backward()
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(total, theirs.detach().numpy(), rtol=1e-4)
    of_names = tensors_from_params(family_of(loaded.model_config, "").table, gradient)
    check_gradients(of_names, gradients_in_files(model))
