"""HARR put together: groups, agents and their models, rewards, and updates of a small run."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import FeedbackLost
from qrag_jax.metrics.rows import AGENTS
from qrag_jax.retrieval.protocol import NONE
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr, harr_scoring
from qrag_jax.systems.harr import Harr, HarrPlayer
from tests.llm.model_server import ModelServer, Reply
from tests.systems.knowing_model import KnowingModel
from tests.systems.small_runs import HARR_MEMBERS as MEMBERS
from tests.systems.small_runs import opened
from tests.systems.small_runs import small_harr as small


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harr]:
    config = small()
    harr.check(config)
    with (
        Run.open(tmp_path_factory.mktemp("harr") / "run", 0.0) as run,
        harr.open_system(config, run) as made,
    ):
        yield made


def batch_of(system: Harr, run: Any, step: int = 0) -> Any:
    experience = system.experience(run, StopSignal())
    return experience.next(system.first_state(), step, StopSignal())


class NewRun:
    """The progress of a run that has done nothing yet."""

    def __init__(self, batches: int | None = None) -> None:
        self.progress = self
        self.batches = batches
        self.pending: list[Any] = []


def test_groups_are_played_by_the_policy_and_rewarded(system: Harr) -> None:
    batch = jax.tree.map(np.asarray, batch_of(system, NewRun()))
    episodes = 2 * MEMBERS
    assert batch.tokens.shape == (episodes, 3, 96)
    assert batch.pool.shape == (episodes, 3, 10, 16)
    assert batch.scored.all()
    searched = batch.lengths > 0
    assert searched[:, 0].all()
    assert batch.present[searched].all()
    # What is stored of the acting policy is what its own weights say.
    params = jax.tree.map(np.asarray, system.first_state().params)
    encoder = system.inputs.encoder.encoder
    for row, hop in zip(*np.nonzero(searched), strict=True):
        tokens, length = batch.tokens[row, hop][None], batch.lengths[row, hop][None]
        vector = np.asarray(encoder.embed(params, tokens, length))[0]
        logits = (batch.pool[row, hop] @ vector) / system.config.policy.tau
        left, log_prob = list(range(10)), 0.0
        for action in batch.actions[row, hop]:
            log_prob += logits[action] - np.logaddexp.reduce(logits[left])
            left.remove(int(action))
        assert batch.log_probs[row, hop] == pytest.approx(log_prob, abs=1e-3)
    rewards = batch.episode_rewards.reshape(2, MEMBERS, 2)
    assert ((rewards >= 0) & (rewards <= 1)).all()
    assert batch.hop_rewards[:, 0, 0] == pytest.approx(1.0)  # all passages are new at first


def test_updates_and_evaluations(system: Harr) -> None:
    state, stop = system.first_state(), StopSignal()
    before = system.evaluate(state, 0, stop)
    assert {"eval/em", "eval/f1", "eval/recall", "eval/hops"} <= before.metrics.keys()
    assert before.score == before.scores["f1"]
    experience = system.experience(NewRun(), stop)
    first = jax.tree.map(np.asarray, state.params)
    for step in range(2):
        state, metrics = system.update(state, experience.next(state, step, stop))
        assert float(metrics["largest_ratio"]) == 1.0
        assert float(metrics["replay_gap"]) < 1e-3
        assert float(metrics["skipped"]) == 0.0
    moved = [
        np.abs(np.asarray(after) - before).max()
        for after, before in zip(jax.tree.leaves(state.params), jax.tree.leaves(first), strict=True)
    ]
    assert max(moved) > 1e-4
    assert experience.counts()["searches_per_batch"] >= 4


def test_gold_passages_are_in_the_corpus_of_all_questions(system: Harr) -> None:
    assert all(len(each.gold.relevant) == 2 for each in system.inputs.train)
    corpus = system.inputs.index.corpus
    assert len(corpus) == len({passage.text for passage in corpus.passages(range(len(corpus)))})


@pytest.mark.parametrize("fields", [{"ppo__kl": 0.01, "state__stateful": False}])
def test_ppo_without_a_history(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = small("ppo", **fields)
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        batch = batch_of(system, NewRun())
        text = system.inputs.encoder.tokenizer.backend.decode(
            np.asarray(batch.tokens)[0, 0, : int(batch.lengths[0, 0])].tolist()
        )
        assert "istory" not in text
        state, metrics = system.update(system.first_state(), batch)
    assert float(metrics["value_loss"]) > 0
    assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-3)  # the policy is the reference yet
    assert np.abs(np.asarray(state.critic.weights)).max() > 0


def test_a_pool_of_a_small_corpus_is_not_full(tmp_path: Path) -> None:
    config = small(policy__pool=300, data__limit=2)
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        batch = batch_of(system, NewRun())
        count = len(system.inputs.index.corpus)
        assert count < 300
        assert np.asarray(batch.present)[:, 0].sum(axis=-1).tolist() == [count] * 8
        assert NONE == -1
        _, metrics = system.update(system.first_state(), batch)
    assert np.isfinite(float(metrics["loss"]))


def test_questions_of_all_parts_of_an_evaluation_have_draws_of_their_own(
    system: Harr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, play = list[bytes](), HarrPlayer.play

    def seen(player: HarrPlayer, params: Any, starts: Any, stop: Any, *, is_greedy: bool = False):
        drawn.extend(start.key.tobytes() for start in starts if not is_greedy)
        return play(player, params, starts, stop, is_greedy=is_greedy)

    monkeypatch.setattr(HarrPlayer, "play", seen)
    monkeypatch.setattr(harr_scoring, "AT_ONCE", 2)
    params = system.player.here(system.first_state().params)
    log, stop = tmp_path / "log.jsonl", StopSignal()
    harr_scoring.played_parts(system, params, 4, stop).into(log, {}, stop, restart=False)
    rows = AGENTS.read(log)
    assert len(rows) == len(system.inputs.dev) > 2
    assert len(drawn) == len(set(drawn)) == 4 * len(rows)


def test_a_batch_is_played_while_eight_devices_learn(tmp_path: Path) -> None:
    """Programs of both threads send between the devices; a wrong order would never end."""
    config = small(agent__staleness=1, train__steps=6, train__batch_size=4)
    harr.check(config)
    with Run.open(tmp_path / "run", 0.0) as run, harr.open_system(config, run) as system:
        assert system.mesh.size == 8
        state, stop = system.first_state(), StopSignal()
        experience = system.experience(NewRun(), stop)
        for step in range(6):
            state, metrics = system.update(state, experience.next(state, step, stop))
            assert np.isfinite(float(metrics["loss"]))
    assert experience.position() == (6, [])


STOP = StopSignal()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harr]:
    with opened(small(), tmp_path_factory.mktemp("scripted") / "run") as system:
        yield system


@pytest.fixture(scope="module")
def model(scripted: Harr) -> KnowingModel:
    every = (*scripted.inputs.train, *scripted.inputs.dev)
    apart = {each.gold.question: each.question.decomposition for each in every}
    return KnowingModel({q: each for q, each in apart.items() if each is not None})


@pytest.fixture
def server(model: KnowingModel) -> Iterator[ModelServer]:
    with ModelServer(model) as served:
        yield served


def asking(server: ModelServer, agent: str, **fields: Any) -> ConfigDict:
    config = small(**fields)
    config.agent.name = agent
    config.llm.update(url=server.url, model="tiny", cache="")
    if agent == "search_r1":
        config.agent.chat_template = "{prompt}<end>"
    return config


def first_batch(system: Harr) -> Any:
    experience = system.experience(NewRun(), STOP)
    return jax.tree.map(np.asarray, experience.next(system.first_state(), 0, STOP))


def test_react_with_a_model_that_knows_is_the_scripted_agent(
    scripted: Harr, server: ModelServer, tmp_path: Path
) -> None:
    with opened(asking(server, "react"), tmp_path / "run") as system:
        batch = first_batch(system)
        counts = system.experience(NewRun(), STOP).counts()
    for name, one, other in zip(batch._fields, batch, first_batch(scripted), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    assert batch.scored.all()
    # The first plan of a question is asked once for its group.
    plans = [call for call in server.calls if len(call.body["messages"]) == 2]
    plans = [call for call in plans if "<passages>" not in call.prompt]
    plans = [call for call in plans if "<searches>" not in call.prompt]
    assert len(plans) == 2
    assert counts["llm/answers"] == len(server.calls)


@pytest.mark.parametrize("agent", ["planner", "search_r1"])
def test_other_agents(agent: str, server: ModelServer, tmp_path: Path) -> None:
    if agent == "planner":
        steps = server.script

        def plan(call: Any) -> Reply:
            text = call.prompt
            if "<passages>" in text:
                return steps(call)
            if "sub_query" not in call.body["messages"][0]["content"]:
                return Reply("Final answer: Oslo")
            if text.count("FOUND:") < 2:
                return Reply('{"action": "ASK", "sub_query": "Who?"}')
            return Reply('{"action": "STOP"}')

        server.script = plan
    with opened(asking(server, agent), tmp_path / "run") as system:
        batch = first_batch(system)
        state = system.first_state()
        scores = system.evaluate(state, 0, STOP)
        starts = system.player.starts(system.inputs.dev, 1, 0)
        episodes = system.player.play(state.params, starts, STOP)
    assert batch.scored.all()
    assert (batch.lengths[:, 0] > 0).all()
    assert scores.metrics["eval/broken_share"] == 0
    hops = [hop for each in episodes for hop in each.ended.history]
    assert len(hops) == sum(len(each.searches) for each in episodes)
    if agent == "search_r1":  # what the model thinks of the passages is in the history
        assert all(hop.answer.startswith("I know ") for hop in hops[:-1])


def test_a_server_that_is_away_loses_no_question(
    scripted: Harr, server: ModelServer, model: KnowingModel, tmp_path: Path
) -> None:
    def goes_away() -> None:
        while len(server.calls) < 5:
            time.sleep(0.005)
        server.kill()
        time.sleep(1.0)
        server.start()

    server.script = dataclasses.replace(model, delay=0.05)
    thread = threading.Thread(target=goes_away)
    with opened(asking(server, "react"), tmp_path / "run") as system:
        thread.start()
        batch = first_batch(system)
        thread.join()
    for one, other in zip(batch, first_batch(scripted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_failed_calls_are_masked_and_many_of_them_stop_the_run(
    server: ModelServer, model: KnowingModel, tmp_path: Path
) -> None:
    too_long = Reply(
        "This model's maximum context length is 16 tokens, your request has 99.", status=400
    )
    lost = iter(range(1000))

    def some_fail(call: Any) -> Reply:
        return too_long if "<passages>" in call.prompt and next(lost) < 1 else model(call)

    server.script = some_fail
    with opened(asking(server, "react", agent__attempts=1), tmp_path / "some" / "run") as system:
        batch = first_batch(system)
        masked = ~batch.scored
        # Episodes of a group that ask the same at the same time share the failure.
        assert 1 <= masked.sum() <= MEMBERS
        assert (batch.episode_rewards[masked] == 0).all()
        assert (batch.lengths[masked, 0] > 0).all()  # they had searched
    server.script = lambda call: Reply("I like trains.")
    hopeless = asking(server, "react", agent__attempts=1)
    with (
        opened(hopeless, tmp_path / "all" / "run") as system,
        pytest.raises(FeedbackLost, match="8 of 8 episodes broke, and playing them again would"),
    ):
        first_batch(system)


def test_rewards_that_models_give(server: ModelServer, tmp_path: Path) -> None:
    config = asking(server, "react", reward__mixture="llm=1,em=1,relevance=0.5,novelty=1")
    config.reranker.update(url=server.url, model="tiny")
    with opened(config, tmp_path / "run") as system:
        batch = first_batch(system)
    assert batch.scored.all()
    llm, em = batch.episode_rewards.T
    np.testing.assert_array_equal(llm, em)  # this judge knows
    reranked = [call for call in server.calls if call.path.endswith("/rerank")]
    assert 0 < len(reranked) <= (batch.lengths > 0).sum()  # the same is asked once
    novelty, relevance = batch.hop_rewards.transpose(2, 0, 1)[::-1]
    searched = batch.lengths > 0
    assert (novelty[:, 0] == 1).all()
    assert ((relevance[searched] >= 0) & (relevance[searched] <= 1)).all()
    assert relevance[searched].any()
    assert (relevance[~searched] == 0).all()
