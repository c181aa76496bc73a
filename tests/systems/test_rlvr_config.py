"""Configs of RLVR runs that older code saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.rlvr import VARIANTS, get_config
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.systems.rlvr_config import LATER_FIELDS, RlvrConfig, load_config


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_saved_without_later_fields(variant: str, tmp_path: Path) -> None:
    config = get_config(variant).unlock()
    for name in LATER_FIELDS:
        *sections, field = name.split(".")
        inside = config
        for section in sections:
            inside = inside[section]
        del inside[field]
    save_config(config, tmp_path / "config.json")
    loaded = load_config(tmp_path / "config.json")
    RlvrConfig.of(loaded)
    # A model that was made for the run before had random weights alone.
    assert loaded.model.tiny.copies is False
    assert loaded.model.tiny.rope_theta == 1e4
    assert loaded.optimizer.matrices == "adam"
    assert loaded.grpo.learned == "all"
    assert loaded.sampling.engine == "device"
