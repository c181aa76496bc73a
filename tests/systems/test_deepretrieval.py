"""DeepRetrieval put together: its config, rewards of rewritings, and updates of a small run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.environments.episode import Failed, ToolTally
from qrag_jax.environments.queries import TOO_LONG, RewriteTask, Searched
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ndcg
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_config import RewriteConfig, default_config
from qrag_jax.systems.search import Collections
from tests.systems.leret_run import said
from tests.systems.small_runs import opened_run
from tests.systems.small_runs import small_deepretrieval as small

STOP = StopSignal()
DEAD = Failure("server", "status 500")
SCRIPT_STEPS = 2  # of `small`


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened_run(small(), tmp_path_factory.mktemp("deepretrieval") / "run") as made:
        yield made


@pytest.fixture
def system(both: Any) -> DeepRetrieval:
    return both[0]


def written(system: DeepRetrieval, task: RewriteTask, text: str) -> TokenEpisode:
    """The episode of a model that writes `text`."""
    inputs = system.inputs
    return said(inputs.agent, inputs.library, inputs.speech, task, text)


def original_of(system: DeepRetrieval, task: RewriteTask) -> float:
    found = system.originals.measures([task], system.patience(STOP, Failure))[0]
    assert not isinstance(found, Failure)
    return found


# ---------------------------------------------------------------- stages


def test_stages_follow_each_other_with_moments_and_a_critic_of_their_own(both: Any) -> None:
    system, run = both
    state, kept = system.first_state(), []
    system.keep = lambda step, params: kept.append(step)
    experience = system.experience(run, STOP)
    for step in range(SCRIPT_STEPS):
        state, metrics = system.update(state, experience.next(state, step, STOP))
        assert "return" not in metrics
    before = jax.device_get(state)
    assert kept == []
    state, metrics = system.update(state, experience.next(state, SCRIPT_STEPS, STOP))
    assert kept == [SCRIPT_STEPS]
    after = jax.device_get(state)
    counts = [int(x) for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
    assert set(counts) == {1}
    assert int(after.step) == SCRIPT_STEPS + 1
    # The KL is to the weights with which the stage began, of which the critic began as a copy.
    jax.tree.map(np.testing.assert_array_equal, after.reference, before.params)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
    # Its map begins with zeros, through which no gradient comes to its tower.
    jax.tree.map(np.testing.assert_array_equal, after.critic.tower, before.params)
    assert float(np.abs(after.critic.weights).max()) > 0
    assert float(metrics["learning_rate"]) == pytest.approx(1e-3)
    # The sampler's log-probabilities are the learner's.
    assert float(metrics["sampler_kl"]) < 1e-5
    assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 5e-3
    counted = experience.counts()
    assert {"train/gain", "train/format", "train/words"} <= counted.keys()
    assert counted["failed_episodes"] == 0
    assert counted["searches"] > 0


@pytest.mark.parametrize(
    "way",
    [{"ppo__epochs": 2, "ppo__minibatches": 2, "ppo__critic": "none"}, {"model__lora__rank": 4}],
)
def test_every_way_learns(way: dict[str, Any], system: DeepRetrieval, tmp_path: Path) -> None:
    model = str(system.inputs.model.folder)
    config = small(stages=("rl",), model__path=model, rollout__query_tokens=5, **way)
    with opened_run(config, tmp_path / "run") as (other, run):
        state, base = other.first_state(), jax.device_get(other.base)
        assert (state.critic is None) == ("ppo__critic" in way)
        state, metrics = other.update(state, other.experience(run, STOP).next(state, 0, STOP))
        assert np.isfinite(float(metrics["loss"]))
        assert 0 < float(metrics["tokens"]) <= 4 * 5  # shorter in learning than in evaluation
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.base), base)
        assert bool(base) == ("model__lora__rank" in way)


# ---------------------------------------------------------------- rewards


def test_a_query_is_worth_what_it_finds_less_what_the_original_finds(
    system: DeepRetrieval,
) -> None:
    task = system.inputs.train[0]
    original, k = original_of(system, task), system.config.reward.k
    script = system.inputs.script
    assert script is not None
    entity = script.given[0].entity  # type: ignore[union-attr]
    for text in (entity, task.question, "Trarb", "nothing of that"):
        each = system.trajectory(written(system, task, text), (0, 0), task, original)
        (found,) = system.searched([task], k, [text])
        ranking = [one.id for one in found]  # type: ignore[union-attr]
        value = ndcg(ranking, dict(task.grades), k)
        assert each.parts[f"ndcg@{k}"] == pytest.approx(value)
        assert each.parts["reward"] == each.parts["gain"] == pytest.approx(value - original)
        assert (each.status, each.parts["format"]) == (DONE, 1.0)
        assert each.parts["words"] == len(text.split())
        if text == task.question:
            assert each.parts["reward"] == 0
        if text == entity:
            assert value == 1


def test_reading_costs_what_the_corpus_says(system: DeepRetrieval) -> None:
    reward = dataclasses.replace(system.config.reward, reading_cost=0.25)
    config = dataclasses.replace(system.config, reward=reward)
    episodes = dataclasses.replace(system, config=config)
    task, library = system.inputs.train[0], system.inputs.library.library
    assert isinstance(library, Collections)
    passages = [passage.whole for passage in library.by_name[task.collection].corpus]

    def read(text: str) -> int:
        asked = set(re.findall(r"\w+", text.lower()))
        return sum(len(asked & set(re.findall(r"\w+", each.lower()))) for each in passages)

    words = task.question.split()
    for text in (task.question, " ".join(words[2:]), words[0]):
        parts = episodes.trajectory(written(system, task, text), (0, 0), task, 0.5).parts
        share = read(text) / read(task.question)
        assert parts["read_share"] == pytest.approx(share)
        assert parts["reward"] == pytest.approx(parts["gain"] - 0.25 * share)
    assert parts["read_share"] < 1
    told = episodes.shape_of([episodes.trajectory(written(system, task, text), (0, 0), task, 0.5)])
    assert told["train/read_share"] == parts["read_share"]


def test_what_cannot_be_read_costs_the_originals_measure(system: DeepRetrieval) -> None:
    task = system.inputs.train[0]
    empty = system.trajectory(written(system, task, " ?! "), (0, 0), task, 0.625)
    assert (empty.status, empty.parts["reward"], empty.parts["format"]) == (DONE, -0.625, 0.0)
    ended = Searched(answer="", outcome=TOO_LONG, tally=ToolTally(turns=1, truncated=True))
    cut = system.trajectory(TokenEpisode(ended, (), 1), (0, 0), task, 0.625)
    assert (cut.status, cut.parts["reward"]) == (TRUNCATED, -0.625)


def test_what_failed_has_no_reward(system: DeepRetrieval) -> None:
    task = system.inputs.train[0]
    failed = system.trajectory(
        TokenEpisode(Failed("timeout", "no reply"), (), 2), (0, 0), task, 0.5
    )
    assert (failed.failed, failed.status, failed.parts, failed.attempt) == (True, "timeout", {}, 2)
    whole = written(system, task, "Trarb")
    lost = system.trajectory(whole, (0, 0), task, DEAD)
    assert (lost.failed, lost.status, lost.parts) == (True, "server", {})


# ---------------------------------------------------------------- config


def of(**fields: Any) -> RewriteConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return RewriteConfig.of(config)


RL = {"stages": ("rl",)}
GRPO = {"algorithm": "grpo"}
REMOTE = {**RL, "search.engine": "remote"}


def test_steps_and_groups() -> None:
    both = of(**{"script.steps": 5, "train.steps": 7, "ppo.epochs": 3, "ppo.minibatches": 2})
    assert (both.imitated, both.train.steps) == (5, 12)
    assert both.optimizer.total_steps == 7 * 3 * 2
    only = of(**RL, **{"train.steps": 7})
    assert (only.imitated, only.train.steps, only.optimizer.total_steps) == (0, 7, 7)
    by_ppo = of(**{"train.batch_size": 12})
    assert (by_ppo.rule, by_ppo.groups) == (by_ppo.ppo, 12)
    grouped = of(**GRPO, **{"train.batch_size": 12, "grpo.members": 4, "grpo.longest": 300})
    assert (grouped.rule, grouped.groups) == (grouped.grpo, 3)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"stages": ("rl", "script")}, "config.stages"),
        ({"search.engine": "remote"}, "config.stages"),
        ({"writing.prompt": "rewrite_boolean"}, "config.writing.prompt"),
        ({**GRPO, "grpo.members": 8, "train.batch_size": 12}, "config.grpo.members"),
        ({"ppo.minibatches": 3, "train.batch_size": 16}, "config.ppo.minibatches"),
        ({**GRPO, "grpo.longest": 255, "train.batch_size": 64}, "config.grpo.longest"),
        ({"guards.max_kl": 0.5, "ppo.kl": 0.0}, "config.guards.max_kl"),
        ({"ppo.critic": "none", "ppo.critic_warmup": 2}, "config.ppo.critic_warmup"),
        ({**REMOTE, "reward.measure": "answer_rank"}, "config.reward.measure"),
        ({**REMOTE, "engine.most": 999, "eval.measures": ("ndcg@10", "ap")}, "config.eval.measur"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        of(**fields)
