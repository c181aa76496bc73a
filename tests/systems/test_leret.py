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
from qrag_jax.environments.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.models.tiny_lm import TinyLMConfig, write_tiny_lm
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import (
    PREFERENCE,
    SCRIPT,
    SFT,
    LeretConfig,
    StagePlan,
    default_config,
)
from qrag_jax.systems.leret_inputs import Script
from qrag_jax.systems.token_system import EVALUATED
from tests.systems.leret_run import (
    FIRST_PAIRS,
    FIRST_SFT,
    PAIR_STEPS,
    SCRIPT_STEPS,
    STOP,
    Trained,
    play_by,
    tries_of,
)
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


def test_samples_are_questions_of_the_run(leret_trained: Trained) -> None:
    system = leret_trained.system
    made = {each.question for each in tries_of(system, 1) if each.reward}
    for number in range(FIRST_SFT, FIRST_PAIRS + PAIR_STEPS):
        questions = leret_trained.samples[number][:, 0].tolist()
        assert len(questions) == 4  # of a batch, however few lessons there are
        assert set(questions) <= made


def test_evaluation_is_what_the_queries_find(leret_trained: Trained) -> None:
    system, state = leret_trained.system, leret_trained.states[-1]
    params = jax.device_put(state.params, system.param_shardings)
    found = system.evaluate(state._replace(params=params), 20, STOP)
    hops = system.hops.by_model(system.inputs.dev, system.by_device(params, STOP), EVALUATED)
    pools: list[list[str]] = [[] for _ in system.inputs.dev]
    for number, rows in enumerate(hops, start=1):
        recalls, precisions = [], []
        for pool, row in zip(pools, rows, strict=True):
            made = row.made
            assert made is not None
            if made.outcome == "searched":
                (hits,) = system.inputs.library.look([(row.before, Look(row.query, 4))])
                pool += [each.id for each in hits if each.id not in pool]  # type: ignore[union-attr]
            gold = row.before.gold_ids
            places = [n for n, name in enumerate(pool, 1) if name in gold]
            recalls.append(len(places) / 2)
            precisions.append(sum(k / n for k, n in enumerate(places, 1)) / 2)
        assert found.metrics[f"eval/hop{number}/recall"] == pytest.approx(np.mean(recalls))
        assert found.metrics[f"eval/hop{number}/ap"] == pytest.approx(np.mean(precisions))
    made = [row.made for rows in hops for row in rows if row.made is not None]
    lost = [each for each in made if not each.scored]
    shares = [found.metrics[f"eval/{n}_share"] for n in ("empty", "too_long", "failed")]
    assert sum(shares) == pytest.approx(len(lost) / len(made))


FEW_SHOT = {"tries.ways": "few_shot", "stages": ("sft", "preference")}


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


def test_the_prompts_that_try() -> None:
    assert of().tries.variants == (1, 2, 3, 4)
    assert of(**{"tries.prompts": 2, "tries.with_bare": True}).tries.variants == (0, 1, 2)
    config = of(**{"tries.ways": "bare", "tries.samples": 4})
    assert (config.tries.variants, config.tries.asked) == ((0,), 1)
    assert of(**FEW_SHOT, **{"tries.prompts": 2}).few_shot.kept == 2


def demonstrations(system) -> Script:
    script = system.inputs.script
    assert script is not None
    return script


def test_marks_are_demonstrated_whatever_tries_are_asked_by(tmp_path: Path) -> None:
    with opened(small(tries__ways="bare", styles__marked=1.0), tmp_path / "run") as system:
        experience, state = system.lessons(), system.first_state()
        blocks = first_of(jax.device_get(experience.next(state, 0, StopSignal())).blocks)
        speech = system.inputs.speech
        read = "".join(speech.text(row) for row in blocks.tokens)
        assert "style: " in read
        assert system.variants == (0,)


def test_draws_depend_on_the_number_of_a_demonstration(tmp_path: Path) -> None:
    first = 7
    with opened(small(styles__marked=0.5), tmp_path / "run") as system:
        script = demonstrations(system)
        every = script.starts(system.config, [0, 1, 2] * 4, 0)
        some = script.starts(system.config, ([0, 1, 2] * 4)[first : first + 3], first)
        assert some == every[first : first + 3]


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


def test_no_full_credit_in_the_bootstrap(chat: Path, tmp_path: Path) -> None:
    with (
        opened(few_shot(chat), tmp_path / "run") as system,
        pytest.raises(InputError, match="full credit"),
    ):
        system.maker.prompts(system.workdir, play_by(system, lambda *_: "xyzzy"))
