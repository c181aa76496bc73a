"""What the encoder in a run's folder was made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qrag_jax.models.encoder_config import EncoderConfig
from qrag_jax.models.first_encoder import FOLDER, origin, prepare_encoder
from qrag_jax.models.scratch import ScratchConfig
from qrag_jax.runtime.minilm import HUB_NAME, MINILM, MINILM_OR_SCRATCH, find_minilm

SMALL = ScratchConfig(layers=6, hidden=16, heads=2, vocab=100, positions=16)


def test_random_weights_and_named_models(tmp_path: Path) -> None:
    config = EncoderConfig(path="", scratch=SMALL)
    prepare_encoder(config, tmp_path, ["a river", "a stone"], 0, is_kept=False)
    assert origin(MINILM_OR_SCRATCH, tmp_path) == origin("", tmp_path) == ""
    assert origin("intfloat/multilingual-e5-large", tmp_path) == "intfloat/multilingual-e5-large"


def test_minilm_is_known_by_its_weights(tmp_path: Path) -> None:
    if find_minilm(download=False) is None:
        pytest.skip("all-MiniLM-L6-v2 is not on this machine")
    prepare_encoder(EncoderConfig(path=MINILM_OR_SCRATCH), tmp_path, [], 0, is_kept=False)
    assert origin(MINILM_OR_SCRATCH, tmp_path) == origin(MINILM, tmp_path) == HUB_NAME
    # Others of its sizes are not taken for it.
    path = tmp_path / FOLDER / "model.safetensors"
    changed = {name: np.array(array) + 1 for name, array in load_file(path).items()}
    save_file(changed, path)
    assert origin(MINILM_OR_SCRATCH, tmp_path) == ""
