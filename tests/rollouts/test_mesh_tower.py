"""Rows of all lengths embedded at once, beside rows that are padded, not packed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.rollouts import mesh_tower
from qrag_jax.rollouts.chunks import CHUNK
from qrag_jax.systems.passage_encoder import PassageEncoder

LONGEST = 100


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PassageEncoder:
    folder = tmp_path_factory.mktemp("tower") / "encoder"
    sizes = ScratchConfig(layers=1, hidden=16, heads=2, vocab=300, positions=LONGEST)
    make_scratch_folder(folder, ["a river and a stone"] * 3, sizes, 0)
    config = EncoderConfig(dtype="float32")
    return PassageEncoder.of_folder(str(folder), config, max_tokens=LONGEST)


def test_short_and_long_rows_are_as_without_packing(
    encoder: PassageEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_tower, "GROUP", 16)
    rng = np.random.default_rng(0)
    lengths = [3, LONGEST, mesh_tower.SHORT, mesh_tower.SHORT + 1, *rng.integers(3, LONGEST, 40)]
    rows = [rng.integers(5, encoder.tokenizer.vocab_size, n).tolist() for n in lengths]
    tower = encoder.tower()
    found = tower(rows)
    text = encoder.encoder
    params = jax.tree.map(lambda leaf: leaf[CHUNK], encoder.params)
    assert found.dtype == np.float32
    assert found.shape == (len(rows), text.width)
    padded = np.zeros((len(rows), LONGEST), np.int32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    alone = jax.jit(text.embed)(params, jnp.array(padded), jnp.array(lengths))
    np.testing.assert_allclose(found, alone, atol=1e-5)
    assert tower([]).shape == (0, text.width)
    with pytest.raises(ValueError, match=f"a row of {LONGEST + 1} tokens is longer than {LONGEST}"):
        tower([[7] * (LONGEST + 1)])
