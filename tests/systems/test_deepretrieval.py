"""DeepRetrieval put together: updates of a small run, rewards of rewritings, guards, its config."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.environments.episode import Document, Failed, Look, ToolTally, ToolTask
from qrag_jax.environments.queries import TOO_LONG, RewriteTask, Searched
from qrag_jax.errors import InputError
from qrag_jax.feedback import rewards
from qrag_jax.feedback.rewards import Patience
from qrag_jax.feedback.rewrite import GuardsConfig, RewriteRewardConfig
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ndcg
from qrag_jax.rollouts.experience import Playing, QuestionOrder
from qrag_jax.rollouts.token_episodes import Episode
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, TokenTrajectory
from qrag_jax.runtime.interrupt import EndedEarly, StopSignal
from qrag_jax.systems.deepretrieval import DeepRetrieval, Found, GuardedExperience
from qrag_jax.systems.deepretrieval_config import RewriteConfig, default_config
from qrag_jax.systems.search import Collections
from tests.systems.small_runs import opened_alone, said
from tests.systems.small_runs import small_deepretrieval as small

STOP = StopSignal()
DEAD = Failure("server", "status 500")
SCRIPT_STEPS = 2  # of `small`


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened_alone(small(), tmp_path_factory.mktemp("deepretrieval") / "run") as made:
        yield made


@pytest.fixture
def system(both: Any) -> DeepRetrieval:
    return both[0]


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


def test_adapters_learn_in_epochs_without_a_critic(system: DeepRetrieval, tmp_path: Path) -> None:
    ways = {"ppo__epochs": 2, "ppo__minibatches": 2, "ppo__critic": "none", "model__lora__rank": 4}
    model = str(system.inputs.model.folder)
    config = small(stages=("rl",), model__path=model, rollout__query_tokens=5, **ways)
    with opened_alone(config, tmp_path / "run") as (other, run):
        state, base = other.first_state(), jax.device_get(other.base)
        assert state.critic is None
        state, metrics = other.update(state, other.experience(run, STOP).next(state, 0, STOP))
        assert np.isfinite(float(metrics["loss"]))
        assert 0 < float(metrics["tokens"]) <= 4 * 5  # shorter in learning than in evaluation
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.base), base)


# ---------------------------------------------------------------- rewards


def trajectory(system: DeepRetrieval, text: str, original: float | Failure) -> TokenTrajectory:
    """Of a model that writes `text` for the first training query."""
    inputs, task = system.inputs, system.inputs.train[0]
    episode = said(inputs.agent, inputs.library, inputs.speech, task, text)
    return system.trajectory(episode, (0, 0), task, original)


def test_a_query_is_worth_what_it_finds_less_what_the_original_finds(system: DeepRetrieval) -> None:
    task, script = system.inputs.train[0], system.inputs.script
    original, k = system.measures([task], patience([]))[0], system.config.reward.k
    assert script is not None
    entity = script.given[0].entity  # type: ignore[union-attr]
    for text in (entity, task.question, "Trarb", "nothing of that"):
        each = trajectory(system, text, original)
        (found,) = system.searched([task], k, [text])
        value = ndcg([one.id for one in found], dict(task.grades), k)  # type: ignore[union-attr]
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
    costly = dataclasses.replace(system, config=dataclasses.replace(system.config, reward=reward))
    task, library = system.inputs.train[0], system.inputs.library.library
    assert isinstance(library, Collections)
    passages = [passage.whole for passage in library.by_name[task.collection].corpus]

    def read(text: str) -> int:
        asked = set(re.findall(r"\w+", text.lower()))
        return sum(len(asked & set(re.findall(r"\w+", each.lower()))) for each in passages)

    words = task.question.split()
    for text in (task.question, " ".join(words[2:]), words[0]):
        each = trajectory(costly, text, 0.5)
        share = read(text) / read(task.question)
        assert each.parts["read_share"] == pytest.approx(share)
        assert each.parts["reward"] == pytest.approx(each.parts["gain"] - 0.25 * share)
    assert share < 1
    assert costly.shape_of([each])["train/read_share"] == each.parts["read_share"]


def test_what_finds_nothing_costs_the_originals_measure_and_what_failed_has_no_reward(
    system: DeepRetrieval,
) -> None:
    task = system.inputs.train[0]
    empty = trajectory(system, " ?! ", 0.625)
    assert (empty.status, empty.parts["reward"], empty.parts["format"]) == (DONE, -0.625, 0.0)
    ended = Searched(answer="", outcome=TOO_LONG, tally=ToolTally(turns=1, truncated=True))
    cut = system.trajectory(Episode(ended, (), 1), (0, 0), task, 0.625)
    assert (cut.status, cut.parts["reward"]) == (TRUNCATED, -0.625)
    timeout = Episode(Failed("timeout", "no reply"), (), 2)
    failed = system.trajectory(timeout, (0, 0), task, 0.5)
    assert (failed.failed, failed.status, failed.parts, failed.attempt) == (True, "timeout", {}, 2)
    lost = trajectory(system, "Trarb", DEAD)
    assert (lost.failed, lost.status, lost.parts) == (True, "server", {})


# ---------------------------------------------------------------- original queries

ONE, TWO, THREE = (RewriteTask.judged(f"{n}", f"query {n}", {f"d{n}": 1}) for n in (1, 2, 3))


class Search:
    """Finds `d2`, then `d1`; the first searches for some queries fail."""

    def __init__(self, **fails: int) -> None:
        self.fails = fails  # by the last letter of the query
        self.library = None
        self.calls: list[list[str]] = []

    def look(self, asked: Sequence[tuple[ToolTask, Look]]) -> list[Found]:
        self.calls.append([step.query for _, step in asked])
        return [*map(self._one, self.calls[-1])]

    def _one(self, query: str) -> Found:
        name = f"q{query[-1]}"
        self.fails[name] = self.fails.get(name, 0) - 1
        if self.fails[name] >= 0:
            return DEAD
        return tuple(Document(each, "", "", False) for each in ("d2", "d1"))


def searching(system: DeepRetrieval, search: Search, attempts: int) -> DeepRetrieval:
    """The system with this search, of so many attempts."""
    rollout = dataclasses.replace(system.config.rollout, attempts=attempts)
    reward = RewriteRewardConfig(measure="rr", k=3)
    config = dataclasses.replace(system.config, rollout=rollout, reward=reward)
    inputs = dataclasses.replace(system.inputs, library=search)
    return dataclasses.replace(system, config=config, inputs=inputs)


def patience(lines: list[str], share: float = 0.0) -> Patience:
    return Patience(share, STOP, lines.append, "", Failure)


def test_measures_are_kept_and_searches_that_fail_are_repeated_at_once(
    system: DeepRetrieval,
) -> None:
    search, lines = Search(q1=2), list[str]()
    searches = searching(system, search, 3)
    assert searches.measures([ONE, TWO, ONE], patience(lines)) == [0.5, 1.0, 0.5]
    assert searches.measures([TWO, THREE], patience(lines)) == [1.0, 0.0]
    assert search.calls == [["query 1", "query 2"], ["query 1"], ["query 1"], ["query 3"]]
    assert not lines


def test_few_failures_are_values_and_are_not_kept(system: DeepRetrieval) -> None:
    searches = searching(system, Search(q1=2), 2)
    assert searches.measures([ONE, TWO, ONE], patience([], 0.5)) == [DEAD, 1.0, DEAD]
    assert searches.measures([ONE, TWO], patience([], 0.5)) == [0.5, 1.0]


def test_many_failures_are_waited_for(
    system: DeepRetrieval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(rewards, "LOOK_EVERY", 0.001)
    lines, searches = list[str](), searching(system, Search(q1=5, q2=3), 2)
    found = searches.originals([ONE, TWO, THREE], 7, patience(lines))
    assert [[each.id for each in one] for one in found] == [["d2", "d1"]] * 3  # type: ignore[union-attr]
    assert len(lines) == 2


# ---------------------------------------------------------------- guards

LONG, SHORT = {"query_words": 11.0}, {"query_words": 4.0}


def guarded(position: Any = None) -> GuardedExperience:
    playing = Playing(
        play=lambda params, numbers, step, stop: [*numbers],
        batch=lambda episodes, number: np.array(episodes),
        save=lambda episode: episode,
        restore=lambda saved: saved,
        params=lambda state: state,
        staleness=0,
        steps=100,
    )
    order, guards = QuestionOrder(12, 3, seed=1).at, GuardsConfig(max_words=10.0, patience=2)
    return GuardedExperience(order, playing, dict, guards, position=position)


def test_a_guard_ends_a_training_after_its_patience_also_when_resumed() -> None:
    played = guarded()
    first = played.next(None, 0, STOP)
    for metrics in (LONG, SHORT, LONG):
        played.look(metrics)
        assert not played.ended
    position, pending = played.position()
    assert pending == []
    second, resumed = played.next(None, 1, STOP), guarded(position)
    np.testing.assert_array_equal(resumed.next(None, 1, STOP), second)
    assert not np.array_equal(first, second)
    for experience in (played, resumed):
        experience.look(LONG)
        with pytest.raises(EndedEarly, match=r"config\.guards\.max_words"):
            experience.next(None, 2, STOP)


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
    assert [*both.plan] == [("script", 0, 5, 0), ("rl", 5, 7, 0)]
    assert both.train.steps == 12
    assert both.optimizer.total_steps == 7 * 3 * 2
    only = of(**RL, **{"train.steps": 7})
    assert (len(only.plan), only.train.steps, only.optimizer.total_steps) == (1, 7, 7)
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
