"""LeReT with a chat model: prompts with examples of its own tries, and what opening refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.errors import InputError
from qrag_jax.models.files.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.runtime.run import Run
from qrag_jax.systems.leret_config import PREFERENCE, SFT
from tests.systems.query_play import opened, play_by, small


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    questions = [bridge_question(0, "train", n) for n in range(8)]
    words = [f"{q.question} {p.text}" for q in questions for p in q.passages]
    sizes = TinyLMConfig(
        copies=False, layers=1, hidden=32, heads=2, key_heads=1, head_dim=16, intermediate=32,
        vocab=420, positions=1024,
    )  # fmt: skip
    write_tiny_lm(folder, words, sizes, seed=0)
    return folder


def few_shot(chat: Path, **fields: Any) -> ConfigDict:
    given: dict[str, Any] = {
        "model__path": str(chat),
        "stages": (SFT, PREFERENCE),
        "tries__ways": "few_shot",
        "tries__with_bare": True,
        "tries__samples": 1,
        "few_shot__candidates": 3,
        "few_shot__demonstrations": 1,
        "few_shot__bootstrap_questions": 2,
        "few_shot__rank_questions": 1,
        "sampling__room": 512,
    }
    return small(**{**given, **fields})


def knowing(state: Any, _: np.ndarray) -> str:
    """Writes the entity, then the bridge; each question's own."""
    number = next(n for n in range(6) if bridge_question(0, "train", n).id == state.id)
    own = bridge_question(0, "train", number)
    return own.entity if state.hop == 1 else own.bridge


def test_prompts_with_examples_are_made_once(chat: Path, tmp_path: Path) -> None:
    config = few_shot(chat)
    with opened(config, tmp_path / "run") as system:
        prompt = system.prompt(play_by(system, knowing))
        assert system.variants == (0, 1, 2)
        assert len(prompt.variants) == 2
        assert len(system.asked) == 3
        shown = {e.question for each in prompt.variants for e in each.examples}
        tried = {system.inputs.train[n].question for n in system.asked}
        assert shown
        assert not shown & tried
        assert [each.question for each in system.tries.questions] == [
            system.inputs.train[n].question for n in system.asked
        ]
        assert system.tries.variants == (0, 1, 2)
    with opened(config, tmp_path / "run") as system:
        assert system.prompt(None).variants == prompt.variants  # nothing plays
    file = tmp_path / "run" / "few_shot.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "template": "another"}))
    with (
        opened(config, tmp_path / "run") as system,
        pytest.raises(InputError, match="has examples for another prompt than the one in use"),
    ):
        system.prompt(None)
    file.write_text(json.dumps({**saved, "kept": []}))
    with (
        opened(config, tmp_path / "run") as system,
        pytest.raises(InputError, match="are not finished, and the weights that make them are"),
    ):
        system.prompt(None)


def test_fewer_prompts_than_were_asked_for(chat: Path, tmp_path: Path) -> None:
    fields = {"tries__prompts": 4, "few_shot__candidates": 4}
    with opened(few_shot(chat, **fields), tmp_path / "run") as system:
        prompt = system.prompt(play_by(system, knowing))
        few = dataclasses.replace(prompt, variants=prompt.variants[:1])
        agent = dataclasses.replace(system.inputs.agent, prompt=few)
        system.inputs = dataclasses.replace(system.inputs, agent=agent)
        assert system.variants == (0, 1)
        assert system.tries.variants == (0, 1)
        del system.__dict__["tries"]
        tries = dataclasses.replace(system.config.tries, with_bare=False)
        system.config = dataclasses.replace(system.config, tries=tries)
        with pytest.raises(InputError, match=r"few_shot\.json has one prompt, so each state would"):
            _ = system.tries


def test_no_full_credit_in_the_bootstrap(chat: Path, tmp_path: Path) -> None:
    with (
        opened(few_shot(chat), tmp_path / "run") as system,
        pytest.raises(InputError, match="has full credit, so there is nothing to show; raise"),
    ):
        system.prompt(play_by(system, lambda *_: "xyzzy"))


# ---------------------------------------------------------------- what is refused at opening


def test_another_model_or_search(chat: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat, folder)
    config = few_shot(folder)
    with opened(config, tmp_path / "run") as system:
        data = dict(system.data)
    other = few_shot(folder, search__b=0.5)
    with pytest.raises(InputError, match=r"config\.search\.b"), opened(other, tmp_path / "run"):
        pass
    sizes = TinyLMConfig(copies=False, layers=1, hidden=32, heads=2)
    write_tiny_lm(folder, ["other words"], sizes, seed=1)
    with opened(config, tmp_path / "run") as system:
        assert system.data["model"] != data["model"]
        with Run.open(tmp_path / "other", 0.0) as run:
            run.checkpoints.save_last(1, {"x": jnp.zeros(1)}, {"data": data})
            run.checkpoints.wait()
            with pytest.raises(InputError, match=r"\(model\)"):
                run.restore(lambda: {"x": jnp.zeros(1)}, system.data, {})
