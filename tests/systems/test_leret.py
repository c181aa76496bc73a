"""LeReT put together: its stages, the programs of a dry run, and its evaluation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.environments.tools.episode import Look
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import PREFERENCE, SCRIPT, SFT
from qrag_jax.systems.token_system import EVALUATED
from tests.systems.leret_run import (
    FIRST_PAIRS,
    FIRST_SFT,
    STOP,
    Trained,
    tries_of,
)
from tests.systems.query_play import PAIR_STEPS, SCRIPT_STEPS

pytestmark = pytest.mark.long


def texts(system: Leret, blocks: Any) -> list[str]:
    """What is learned from, an episode each."""
    episodes = sorted({int(each) for each in blocks.episode[blocks.valid]})
    return [
        system.inputs.speech.text(blocks.target[blocks.valid & (blocks.episode == each)])
        for each in episodes
    ]


def test_demonstrations_come_first(trained: Trained) -> None:
    system = trained.system
    assert "12 steps of imitating scripted styles; then 2 × tries by 2 prompts × 4" in system.line
    shown = texts(system, trained.batches[0].blocks)
    assert len(shown) == 4 * 2  # questions, hops
    asked = " ".join(system.inputs.train[n].question for n in trained.samples[0][:, 0])
    assert any(query.split()[0] in asked for query in shown)
    assert trained.metrics[SCRIPT_STEPS - 1]["loss"] < trained.metrics[0]["loss"] - 1


def test_a_later_stage_has_moments_of_its_own(trained: Trained) -> None:
    kept = Checkpoints(trained.system.workdir, read_only=True)
    stages = trained.system.config.plan
    assert [each.kind for each in stages] == [SCRIPT, SFT, PREFERENCE, SFT, PREFERENCE]
    for stage in stages[1:]:
        before, after = trained.states[stage.first], trained.states[stage.first + 1]
        params = kept.restore_params_of(stage.first, before.params)
        jax.tree.map(np.testing.assert_array_equal, params, before.params)
        counts = [x for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
        assert set(map(int, counts)) == {1}
        assert int(after.step) == stage.first + 1
        rate = trained.metrics[stage.first]["learning_rate"]
        assert rate == pytest.approx(getattr(trained.system.config, stage.kind).learning_rate)


def test_samples_are_questions_of_the_run(trained: Trained) -> None:
    system = trained.system
    made = {each.question for each in tries_of(system, 1) if each.reward}
    for number in range(FIRST_SFT, FIRST_PAIRS + PAIR_STEPS):
        questions = trained.samples[number][:, 0].tolist()
        assert len(questions) == 4  # of a batch, however few lessons there are
        assert set(questions) <= made
    assert system._names(questions) == [system.inputs.train[n].id for n in questions]


def test_the_programs_of_a_dry_run(trained: Trained) -> None:
    programs = trained.system.programs()
    assert [each.name for each in programs] == [
        "update of script",
        "update of sft",
        "update of preference",
    ]
    blocks = programs[2].arguments[1].blocks
    assert blocks.room.shape[1:3] == (256, 224)
    for each in programs:
        state, metrics = jax.eval_shape(each.function, *each.arguments)
        assert {"loss", "skipped"} <= metrics.keys()
        shapes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (state, each.arguments[0])]
        assert shapes[0] == shapes[1]


def test_evaluation_is_what_the_queries_find(trained: Trained) -> None:
    system, state = trained.system, trained.states[-1]
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
    assert found.line.startswith("step 20: hop 1: recall ")
    assert found.line.endswith(f"{len(system.inputs.dev)} questions")
