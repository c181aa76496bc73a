"""LeReT put together: its stages, its script, prompts with examples, and its evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from examples.worlds.scripts import bridge_question
from qrag_jax.errors import InputError
from qrag_jax.models.first_language_model import TinyLMConfig, write_tiny_lm
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import (
    PREFERENCE,
    SCRIPT,
    SFT,
    LeretConfig,
    StagePlan,
    default_config,
)
from qrag_jax.systems.leret_tries import kept_prompts
from tests.systems.leret_run import SCRIPT_STEPS, Trained, play_by
from tests.systems.small_runs import opened
from tests.systems.small_runs import small_leret as small


def first_of(blocks: Any) -> Any:
    """The blocks of the first minibatch."""
    return jax.tree.map(lambda leaf: leaf[0], blocks)


def texts(system: Leret, blocks: Any) -> list[str]:
    """What is learned from, an episode each."""
    episodes = sorted({int(each) for each in blocks.episode[blocks.valid]})
    return [
        system.inputs.speech.text(blocks.target[blocks.valid & (blocks.episode == each)])
        for each in episodes
    ]


def test_demonstrations_come_first(leret_trained: Trained) -> None:
    system = leret_trained.system
    shown = texts(system, first_of(leret_trained.batches[0].blocks))
    assert len(shown) == 4 * 2  # questions, hops
    asked = " ".join(system.inputs.train[n].question for n in leret_trained.samples[0][:, 0])
    assert any(query.split()[0] in asked for query in shown)
    assert leret_trained.metrics[SCRIPT_STEPS - 1]["loss"] < leret_trained.metrics[0]["loss"] - 1


def test_a_later_stage_has_moments_of_its_own(leret_trained: Trained) -> None:
    kept = Checkpoints(leret_trained.system.workdir, read_only=True)
    stages = leret_trained.system.config.plan
    assert [each.kind for each in stages] == [SCRIPT, SFT, PREFERENCE, SFT, PREFERENCE]
    for stage in stages[1:]:
        before, after = leret_trained.states[stage.first], leret_trained.states[stage.first + 1]
        params = kept.restore_params_of(stage.first, before.params)
        jax.tree.map(np.testing.assert_array_equal, params, before.params)
        counts = [x for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
        assert set(map(int, counts)) == {1}
        assert int(after.step) == stage.first + 1
        rate = leret_trained.metrics[stage.first]["learning_rate"]
        assert rate == pytest.approx(getattr(leret_trained.system.config, stage.kind).learning_rate)


def of(**fields: Any) -> LeretConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return LeretConfig.of(config)


def test_the_stages_come_in_turn() -> None:
    config = of(**{"script.steps": 5, "sft.steps": 3, "preference.steps": 4})
    assert config.plan == (
        StagePlan("script", 0, 0, 5),
        StagePlan("sft", 1, 5, 3),
        StagePlan("preference", 1, 8, 4),
        StagePlan("sft", 2, 12, 3),
        StagePlan("preference", 2, 15, 4),
    )
    assert config.train.steps == 19
    assert [config.stage_at(step).first for step in (0, 4, 5, 11, 18)] == [0, 0, 5, 8, 15]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    questions = [bridge_question(0, "train", n) for n in range(8)]
    words = [f"{q.question} {p.text}" for q in questions for p in q.passages]
    sizes = TinyLMConfig(
        layers=1, hidden=32, heads=2, key_heads=1, head_dim=16, intermediate=32,
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
        assert system.maker is not None
        system.maker.prompts(system.workdir, play_by(system, knowing))
        prompt = system.prompt
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
        assert system.prompt.variants == prompt.variants  # nothing plays
    file = tmp_path / "run" / "few_shot.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "template": "another"}))
    with (
        opened(config, tmp_path / "run") as system,
        pytest.raises(InputError, match="few_shot"),
    ):
        _ = system.prompt
    file.write_text(json.dumps({**saved, "kept": []}))
    with (
        opened(config, tmp_path / "run") as system,
        pytest.raises(InputError, match="few_shot"),
    ):
        _ = system.prompt


def test_a_later_round_of_examples_goes_on(chat: Path, tmp_path: Path) -> None:
    with opened(few_shot(chat, few_shot__rounds=2), tmp_path / "run") as system:

        def played(folder: str, stop_at: int = 0) -> tuple[list[str], Any]:
            calls, play = list[str](), play_by(system, knowing)

            def counted(prompt: Any, starts: Any) -> Any:
                calls.append(prompt.names[-1])
                if len(calls) == stop_at:
                    raise Stopped("SIGTERM")
                return play(prompt, starts)

            (tmp_path / folder).mkdir(exist_ok=True)
            assert system.maker is not None
            return calls, system.maker.prompts(tmp_path / folder, counted)

        calls, found = played("whole")
        with pytest.raises(Stopped):
            played("broken", len(calls))
        with pytest.raises(InputError, match=r"few_shot\.json"):
            kept_prompts(tmp_path / "broken", system.inputs.agent.prompt)
        again, same = played("broken")
        assert same == found
        assert again == calls[-len(again) :]
        assert len(again) < len(calls)  # the first round is not played again


def test_no_full_credit_in_the_bootstrap(chat: Path, tmp_path: Path) -> None:
    with (
        opened(few_shot(chat), tmp_path / "run") as system,
        pytest.raises(InputError, match="full credit"),
    ):
        system.maker.prompts(system.workdir, play_by(system, lambda *_: "xyzzy"))
