"""Configs that the code before this layout saved: `older/` holds what it wrote, unchanged."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest

from qrag_jax.runtime.saved_config import check_same_config
from qrag_jax.systems import q_rag
from qrag_jax.systems.older_runs import FREE_FIELDS, draw_as, fill_from_saved, load_config
from qrag_jax.systems.q_rag_config import QRagConfig

OLDER = sorted((Path(__file__).parent / "older").glob("*.json"))


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_the_same_command_goes_on_with_an_older_run(path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path / "config.json")
    saved = load_config(tmp_path / "config.json")
    name, _, variant = path.stem.partition("-")
    given = importlib.import_module(f"configs.{name}").get_config(variant)
    q_rag.check(given)
    fill_from_saved(given, saved)
    draw_as(given, saved)
    check_same_config(saved, given, FREE_FIELDS)
    taken = QRagConfig.of(saved, scoring=True)
    assert taken == QRagConfig.of(given, scoring=True)
    # Nothing is in it that such a run does not read.
    assert ("llm" in saved) == (variant == "contriever-babilong-em")
    assert ("synthetic" in saved.data) == (name in ("hotpotqa", "quickstart", "hotpotqa_musique"))
    assert ("scratch" in saved.encoder) == ("tiny" in variant)
    assert set(saved.data.sources) == {
        *(name.split("_") if name != "published" else ["babilong"]),
    } - {"quickstart"} | ({"synthetic"} if name == "quickstart" else set())
