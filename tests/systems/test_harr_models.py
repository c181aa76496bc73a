"""HARR with a language model: its agents, a server that is away, and rewards that models give."""

from __future__ import annotations

import contextlib
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

from qrag_jax.errors import InputError
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import harr
from qrag_jax.systems.harr import Harr
from tests.llm.model_server import ModelServer, Reply
from tests.systems.knowing_model import KnowingModel
from tests.systems.test_harr import MEMBERS, NewRun, small

pytestmark = pytest.mark.long

STOP = StopSignal()


@contextlib.contextmanager
def opened(config: ConfigDict, folder: Path) -> Iterator[Harr]:
    harr.check(config)
    with Run.open(folder / "run", 0.0) as run, harr.open_system(config, run) as made:
        yield made


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harr]:
    with opened(small(), tmp_path_factory.mktemp("scripted")) as system:
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
    with opened(asking(server, "react"), tmp_path) as system:
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
    with opened(asking(server, agent), tmp_path) as system:
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
    scripted: Harr, server: ModelServer, tmp_path: Path
) -> None:
    def goes_away() -> None:
        while len(server.calls) < 5:
            time.sleep(0.005)
        server.kill()
        time.sleep(1.0)
        server.start()

    server.script = dataclasses.replace(server.script, delay=0.05)
    thread = threading.Thread(target=goes_away)
    with opened(asking(server, "react"), tmp_path) as system:
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
    with opened(asking(server, "react", agent__attempts=1), tmp_path / "some") as system:
        batch = first_batch(system)
        masked = ~batch.scored
        # Episodes of a group that ask the same at the same time share the failure.
        assert 1 <= masked.sum() <= MEMBERS
        assert (batch.episode_rewards[masked] == 0).all()
        assert (batch.lengths[masked, 0] > 0).all()  # they had searched
    server.script = lambda call: Reply("I like trains.")
    hopeless = asking(server, "react", agent__attempts=1)
    with (
        opened(hopeless, tmp_path / "all") as system,
        pytest.raises(FeedbackLost, match="8 of 8 episodes broke, and playing them again would"),
    ):
        first_batch(system)


def test_rewards_that_models_give(server: ModelServer, tmp_path: Path) -> None:
    config = asking(server, "react", reward__mixture="llm=1,em=1,relevance=0.5,novelty=1")
    config.reranker.update(url=server.url, model="tiny")
    with opened(config, tmp_path) as system:
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


def test_what_is_refused(server: ModelServer, tmp_path: Path) -> None:
    def refused(config: ConfigDict) -> str:
        with pytest.raises(InputError) as error, opened(config, tmp_path):
            pass
        return str(error.value)

    config = small()
    config.agent.name = "react"
    assert "config.agent.name is react" in refused(config)
    config = small(reward__mixture="f1=1,llm=1")
    assert "config.reward.mixture has llm" in refused(config)
    config = small(reward__mixture="relevance=1")
    assert "config.reranker.url" in refused(config)
    config = asking(server, "react", agent__prompts=str(tmp_path))
    assert "has none of the prompts of the react agent (rag_planner.txt" in refused(config)
    config = asking(server, "react", agent__max_broken_share=1.5)
    assert "config.agent.max_broken_share is 1.5" in refused(config)
    config = asking(server, "search_r1")
    config.agent.chat_template = ""
    with opened(config, tmp_path / "r1") as system, pytest.raises(InputError, match="tokenizer"):
        first_batch(system)
