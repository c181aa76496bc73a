"""The experiment files: every variant builds, every tiny one has programs that fit together."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import ml_collections
import pytest

from qrag_jax import systems
from qrag_jax.runtime.run import Run
from tests.entry_points import ROOT

EVERY = sorted(
    path.stem for path in (ROOT / "configs").glob("*.py") if not path.stem.startswith("common")
)
# Those whose tiny variant another test trains, tests/pinned among them.
TRAINED = {"hotpotqa", "harr_grpo", "harr_ppo", "rlvr", "leret", "deepretrieval", "quickstart"}
TRAINED |= {"own", "babilong", "two_wiki"}
AGENTS = ("synthetic-react-tiny", "two_wiki-planner-minilm", "musique-search_r1-4b")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"configs.{name}")


def variants(name: str) -> list[str]:
    """The variants that a config names when it is asked for one it does not have."""
    with pytest.raises(ValueError, match="none-such") as caught:
        module(name).get_config("none-such")
    found = re.findall(r":([\w-]+)", str(caught.value).partition("use ")[2])
    return [name for each in found for name in (AGENTS if each == "DATA-AGENT-SIZE" else (each,))]


def complete(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The config with what the user alone can name: data, and a language model."""
    if config.get("system") == "deepretrieval":
        for field in ("train", "test"):
            config.queries[field] = config.queries[field] or "some/folder,train"
    if config.get("system") == "harr" and not config.llm.server.model:
        config.llm.update(url="http://127.0.0.1:8000/v1", model="a-model")
    return config


@pytest.mark.parametrize("name", EVERY)
def test_every_variant_builds(name: str) -> None:
    known = variants(name)
    assert "tiny" in known or name.startswith("babilong")
    for given in ((), *((variant,) for variant in known)):
        config = module(name).get_config(*given)
        assert config.is_locked
        systems.check(complete(config))
    assert f"python -m qrag_jax.train --config=configs/{name}.py" in (module(name).__doc__ or "")


@pytest.mark.parametrize("name", sorted({*EVERY} - TRAINED))
def test_programs_of_every_tiny_experiment_fit(name: str, tmp_path: Path) -> None:
    """Data, model and the shapes of all that is computed, without computing it."""
    config: Any = module(name).get_config("tiny")
    if "cache" in config.get("data", {}):
        config.data.cache = str(tmp_path / "cache")
    systems.check(config)
    with (
        Run.open(tmp_path / "run", 0.0) as run,
        systems.open_system(config, run, dry=True) as system,
    ):
        shapes = {p.name: jax.eval_shape(p.function, *p.arguments) for p in system.programs()}
    updates = [shapes[key] for key in shapes if key.startswith("update")]
    assert updates
    assert all("loss" in metrics for _, metrics in updates)
