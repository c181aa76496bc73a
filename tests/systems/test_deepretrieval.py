"""DeepRetrieval put together: demonstrations, rewards of rewritings, and updates of a small run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from qrag_jax.environments.query_rewriting.output import TOO_LONG
from qrag_jax.environments.query_rewriting.task import RewriteTask, Rewritten
from qrag_jax.environments.tools.episode import Failed, Look, Said, Speak, ToolTally
from qrag_jax.feedback.found_scores import ndcg
from qrag_jax.feedback.rewrite_guards import GUARD_MEASURES
from qrag_jax.llm.outcomes import Failure
from qrag_jax.metrics.ranking import ranking_columns
from qrag_jax.rollouts.scripted_tokens import Talk, encoded
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, TokenTrajectory
from qrag_jax.runtime.dry_run import program_lines
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.deepretrieval import DeepRetrieval
from qrag_jax.systems.deepretrieval_episodes import RewriteEpisodes
from qrag_jax.systems.rewrite_search import Collections
from tests.systems.rewrite_play import SCRIPT_STEPS, opened, small

pytestmark = pytest.mark.long

STOP = StopSignal()
DEAD = Failure("server", "status 500")
BATCH = 4


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeepRetrieval]:
    with opened(small(), tmp_path_factory.mktemp("deepretrieval") / "run") as made:
        yield made


def played(system: DeepRetrieval, step: int) -> list[TokenTrajectory]:
    numbers = system._order.at(step).numbers.tolist()
    return system._play(system.first_state().params, numbers, step, STOP)


def written(system: DeepRetrieval, task: RewriteTask, text: str) -> TokenEpisode:
    """The episode of a model that writes `text`."""
    agent, library = system.inputs.agent, system.inputs.library
    play = agent.play(task)
    asked: Any = next(play)
    assert isinstance(asked, Speak)
    messages, reply = asked.messages, Said(text, "stop")
    try:
        while True:
            asked = play.send(reply)
            assert isinstance(asked, Look)
            (reply,) = library.look([(task, asked)])  # type: ignore[assignment]
    except StopIteration as end:
        return encoded(Talk(end.value, ((messages, text),)), system.inputs.speech)


def original_of(system: DeepRetrieval, task: RewriteTask) -> float:
    found = system.episodes.originals.measures([task], system.player.patience(STOP, Failure))[0]
    assert not isinstance(found, Failure)
    return found


def learnable(system: DeepRetrieval, texts: list[str]) -> list[TokenTrajectory]:
    """Readable rewritings of one training query each, as the stage `rl` has them."""
    members, found = system.config.rule.members, []
    for place, text in enumerate(texts):
        number = place // members
        task = system.inputs.train[number]
        episode = written(system, task, text)
        original = original_of(system, task)
        found.append(system.episodes.trajectory(episode, (number, place % members), task, original))
    return found


# ---------------------------------------------------------------- stages


def test_demonstrations_come_first(system: DeepRetrieval) -> None:
    given = played(system, 0)
    assert [each.facts["scripted"] for each in given] == [True] * BATCH
    assert all(each.status == DONE and each.parts == {"reward": 0.0} for each in given)
    assert "2 steps of imitating 4 scripted rewritings, then 2 steps of PPO by 4" in system.line
    assert "searched by bm25" in system.line
    script = system.inputs.script
    assert script is not None
    for place, each in enumerate(given):
        shown = script.at(system.config, each.question, place)
        (turn,) = each.segments[0]
        assert system.inputs.speech.text(turn.sampled) == shown.query
        opening = system.inputs.speech.scaffold.opening(
            system.inputs.agent.prompt.messages(shown.task)
        )
        np.testing.assert_array_equal(turn.observed, opening)


def test_prompts_are_imitated_too_if_the_config_says_so(
    system: DeepRetrieval, tmp_path: Path
) -> None:
    model = str(system.inputs.model.folder)
    config = small(script__observed=True, model__path=model)
    with opened(config, tmp_path / "run") as other:
        whole, answers = played(other, 0), played(system, 0)
    for one, two in zip(whole, answers, strict=True):
        (first,), (second,) = one.segments[0], two.segments[0]
        assert len(first.sampled) > len(second.sampled)
        both = [np.concatenate([each.observed, each.sampled]) for each in (first, second)]
        np.testing.assert_array_equal(*both)


def test_each_stage_has_its_own_order(system: DeepRetrieval) -> None:
    imitated = [system._order.at(step).numbers.tolist() for step in range(SCRIPT_STEPS)]
    asked = [system._order.at(SCRIPT_STEPS + step).numbers.tolist() for step in range(3)]
    assert len({number for batch in imitated for number in batch}) == SCRIPT_STEPS * BATCH
    assert {number for batch in asked for number in batch} == set(range(6))
    system._step = 1
    assert system._names([3]) == ["demonstration 3"]
    system._step = SCRIPT_STEPS + 1
    assert system._names([3]) == [system.inputs.train[3].id]


def test_episodes_have_draws_of_their_own_and_are_drawn_again_alike(system: DeepRetrieval) -> None:
    given = played(system, SCRIPT_STEPS)
    assert len({each.segments[0][0].sampled.tobytes() for each in given}) == BATCH
    again = played(system, SCRIPT_STEPS)
    assert [each.to_json() for each in again] == [each.to_json() for each in given]
    read = [TokenTrajectory.from_json(json.loads(json.dumps(each.to_json()))) for each in given]
    assert [each.to_json() for each in read] == [each.to_json() for each in given]
    other = played(system, SCRIPT_STEPS + 1)
    assert other[0].segments[0][0].sampled.tobytes() != given[0].segments[0][0].sampled.tobytes()


def test_stages_follow_each_other_with_moments_and_a_critic_of_their_own(
    system: DeepRetrieval,
) -> None:
    state, kept = system.first_state(), []
    system._step, system.keep = None, lambda step, params: kept.append(step)
    losses = []
    for step in range(SCRIPT_STEPS):
        state, metrics = system.update(state, system._batch(played(system, step)))
        losses.append(float(metrics["loss"]))
        assert "return" not in metrics
    assert losses[1] < losses[0]
    before = jax.device_get(state)
    assert kept == []
    state, metrics = system.update(state, system._batch(played(system, SCRIPT_STEPS)))
    assert kept == [SCRIPT_STEPS]
    after = jax.device_get(state)
    counts = [int(x) for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
    assert counts
    assert set(counts) == {1}
    assert int(after.step) == SCRIPT_STEPS + 1
    # The KL is to the weights with which the stage began, of which the critic began as a copy.
    jax.tree.map(np.testing.assert_array_equal, after.reference, before.params)
    assert float(metrics["kl"]) == pytest.approx(0, abs=1e-6)
    # Its map begins with zeros, through which no gradient comes to its tower.
    jax.tree.map(np.testing.assert_array_equal, after.critic.tower, before.params)
    assert float(np.abs(after.critic.weights).max()) > 0
    assert float(metrics["learning_rate"]) == pytest.approx(1e-3)


def test_the_sampler_and_the_learner_agree(system: DeepRetrieval) -> None:
    system._step = SCRIPT_STEPS + 1
    _, metrics = system.update(system.first_state(), system._batch(played(system, SCRIPT_STEPS)))
    assert float(metrics["sampler_kl"]) < 1e-5
    assert abs(float(metrics["sampler_largest_ratio"]) - 1) < 5e-3


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
        each = system.episodes.trajectory(written(system, task, text), (0, 0), task, original)
        (found,) = system.episodes.searched([task], k, [text])
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
    episodes = RewriteEpisodes(config, system.inputs)
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
    empty = system.episodes.trajectory(written(system, task, " ?! "), (0, 0), task, 0.625)
    assert (empty.status, empty.parts["reward"], empty.parts["format"]) == (DONE, -0.625, 0.0)
    ended = Rewritten(answer="", outcome=TOO_LONG, tally=ToolTally(turns=1, truncated=True))
    cut = system.episodes.trajectory(TokenEpisode(ended, (), 1), (0, 0), task, 0.625)
    assert (cut.status, cut.parts["reward"]) == (TRUNCATED, -0.625)


def test_what_failed_has_no_reward(system: DeepRetrieval) -> None:
    task = system.inputs.train[0]
    failed = system.episodes.trajectory(
        TokenEpisode(Failed("timeout", "no reply"), (), 2), (0, 0), task, 0.5
    )
    assert (failed.failed, failed.status, failed.parts, failed.attempt) == (True, "timeout", {}, 2)
    whole = written(system, task, "Trarb")
    lost = system.episodes.trajectory(whole, (0, 0), task, DEAD)
    assert (lost.failed, lost.status, lost.parts) == (True, "server", {})


def test_a_batch_teaches_what_its_rewards_say(system: DeepRetrieval) -> None:
    script = system.inputs.script
    assert script is not None
    good = [script.given[n].entity for n in (0, 1)]  # type: ignore[union-attr]
    given = learnable(system, [good[0], good[1], "the the the", "of of"])
    rewards = [each.parts["reward"] for each in given]
    assert min(rewards[:2]) > max(rewards[2:])
    system._step = SCRIPT_STEPS + 1
    state = system.first_state()
    batch = system._batch(given)
    state, metrics = system.update(state, batch)
    assert float(metrics["return"]) == pytest.approx(np.mean(rewards), abs=1e-5)
    assert float(metrics["grad_norm"]) > 0
    # What a failed episode did teaches nothing: its tokens are masked.
    failed = dataclasses.replace(given[3], parts={}, status="server")
    _, fewer = system.update(state, system._batch([*given[:3], failed]))
    assert float(fewer["tokens"]) < float(metrics["tokens"])
    assert float(fewer["return"]) == pytest.approx(np.mean(rewards[:3]), abs=1e-5)


def test_a_batch_in_which_all_failed_teaches_nothing(system: DeepRetrieval) -> None:
    given = learnable(system, ["the the", "of", "winter", "and"])
    lost = [dataclasses.replace(each, parts={}, status="server") for each in given]
    system._step = SCRIPT_STEPS + 1
    state = system.first_state()
    before = jax.device_get(state)
    state, metrics = system.update(state, system._batch(lost))
    assert float(metrics["tokens"]) == 0
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.critic, before.critic)


def test_the_measures_of_a_batch(system: DeepRetrieval) -> None:
    given = played(system, SCRIPT_STEPS)
    system._batch(given)
    counted = system._counted()
    assert counted["train/ndcg@100"] == pytest.approx(
        np.mean([each.parts["ndcg@100"] for each in given])
    )
    assert {"train/gain", "train/format", "train/words"} <= counted.keys()
    assert "train/reward" not in counted
    assert counted["failed_episodes"] == 0
    assert counted["searches"] > 0
    assert 0 <= counted["kept_search_share"] < 1
    readable = any(each.parts["format"] for each in given)
    assert (set(GUARD_MEASURES) <= counted.keys()) == readable


# ---------------------------------------------------------------- evaluation


def test_evaluation_and_programs(system: DeepRetrieval) -> None:
    found = system.evaluate(system.first_state(), 0, STOP)
    tasks = system.inputs.dev
    assert f"on {len(tasks)} queries" in found.line
    hits = system.episodes.searched(tasks, 100)
    rankings = {f"{n}": [one.id for one in each] for n, each in enumerate(hits)}  # type: ignore[union-attr]
    qrels = {f"{n}": dict(each.grades) for n, each in enumerate(tasks)}
    for name, column in ranking_columns(rankings, qrels, system.config.eval.measures).items():
        assert found.baselines[f"original/{name}"] == pytest.approx(np.mean([*column.values()]))
        assert f"eval/{name}" in found.metrics
    assert {f"eval/{name}" for name in (*GUARD_MEASURES, "format")} <= set(found.metrics)
    lines = list(program_lines(system.programs()))
    assert [line.split(":")[0].strip() for line in lines[:2]] == [
        "update by ScriptConfig",
        "update by TokenPPOConfig",
    ]


def test_evaluation_finds_as_many_documents_as_its_measures_need(system: DeepRetrieval) -> None:
    episodes = system.play(system.first_state().params, system.inputs.dev, STOP, greedy=False)
    assert len(episodes) == len(system.inputs.dev)
    for each in episodes:
        if isinstance(each.ended, Rewritten) and each.ended.answer:
            assert len(each.ended.found) <= system.config.eval.depth


def test_outputs_may_be_shorter_in_learning_than_in_evaluation(tmp_path: Path) -> None:
    with opened(small(rollout__query_tokens=5), tmp_path / "run") as system:
        params = system.first_state().params
        numbers = system._order.at(SCRIPT_STEPS).numbers.tolist()
        learned = [system._play(params, numbers, SCRIPT_STEPS + n, STOP) for n in range(4)]
        tried = [sum(len(turn.sampled) for turn in each.segments[0]) for n in learned for each in n]
        scored = system.play(params, system.inputs.dev * 4, STOP, greedy=False)
        tokens = [sum(len(turn.sampled) for turn in each.segments[0]) for each in scored]
        assert max(tried) == 5  # a model that knows nothing seldom ends by itself
        assert 5 < max(tokens) <= system.config.writing.query_tokens
        rows = [system._longest(stage) for stage in system.stages]
        assert [int(each.blocks.learned.sum()) for each in rows] == [4 * 24, 4 * 5]


# ---------------------------------------------------------------- other ways to learn


WAYS: dict[str, dict[str, Any]] = {
    "none": {"ppo__critic": "none", "ppo__kl": 0.0},
    "grpo": {"algorithm": "grpo", "grpo__beta": 0.1},
    "adapters": {"model__lora__rank": 4},
    "adapters by grpo": {"algorithm": "grpo", "model__lora__rank": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_learns(way: str, system: DeepRetrieval, tmp_path: Path) -> None:
    model = str(system.inputs.model.folder)
    config = small(stages=("rl",), model__path=model, **WAYS[way])
    with opened(config, tmp_path / "run") as other:
        script = system.inputs.script
        assert script is not None
        texts = [script.given[0].entity, "the the", "winter", "of of"]  # type: ignore[union-attr]
        given, state = learnable(other, texts), other.first_state()
        before = jax.device_get(state)
        assert (before.critic is None) == (way in ("none", "grpo", "adapters by grpo"))
        assert (before.reference is None) == (way in ("none", "adapters by grpo"))
        base = jax.device_get(other.base)
        state, metrics = other.update(state, other._batch(given))
        after = jax.device_get(state)
        assert float(metrics["grad_norm"]) > 0
        assert np.isfinite(float(metrics["loss"]))
        assert float(metrics["return"]) == pytest.approx(
            np.mean([each.parts["reward"] for each in given]), abs=1e-5
        )
        assert int(after.step) == 1
        moved = [
            float(np.abs(one - two).max())
            for one, two in zip(*map(jax.tree.leaves, (after.params, before.params)), strict=True)
        ]
        assert max(moved) > 0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.base), base)
        assert bool(base) == way.startswith("adapters")
        if before.critic is not None:
            assert float(np.abs(after.critic.bias)) > 0
        names = [program.name for program in other.programs()]
        kind = "TokenGRPOConfig" if "grpo" in way else "TokenPPOConfig"
        assert names == [f"update by {kind}"]
