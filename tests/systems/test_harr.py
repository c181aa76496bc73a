"""HARR put together: groups, agents and their models, rewards, and updates of a small run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.metrics.rows import AGENTS
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems import harr_scoring
from qrag_jax.systems.harr import Harr
from qrag_jax.systems.scoring import Questions
from tests.llm.model_server import ModelServer, Reply
from tests.support.word_tokenizer import saved_tokenizer
from tests.systems.knowing_model import KnowingModel
from tests.systems.small_runs import HARR_MEMBERS as MEMBERS
from tests.systems.small_runs import opened, opened_run
from tests.systems.small_runs import small_harr as small


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("harr") / "run"


@pytest.fixture(scope="module")
def system(workdir: Path) -> Iterator[Harr]:
    with opened(small(), workdir) as system:
        yield system


STOP = StopSignal()
NEW_RUN: Any = SimpleNamespace(progress=SimpleNamespace(batches=None, pending=[]))


def first_batch(system: Harr) -> Any:
    experience = system.experience(NEW_RUN, STOP)
    return jax.device_get(experience.next(system.first_state(), 0, STOP))


def test_groups_are_played_by_the_policy_and_rewarded(system: Harr) -> None:
    batch = first_batch(system)
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
    _, metrics = system.update(
        system.first_state(), system.experience(NEW_RUN, STOP).next(system.first_state(), 0, STOP)
    )
    assert float(metrics["largest_ratio"]) == 1.0
    assert float(metrics["replay_gap"]) < 1e-3


def test_ppo_without_a_history_is_played_while_eight_devices_learn(tmp_path: Path) -> None:
    """Programs of both threads send between the devices; a wrong order would never end."""
    fields = {"ppo__kl": 0.01, "state__stateful": False, "train__steps": 6, "train__batch_size": 4}
    config = small("ppo", **fields, agent__staleness=1)
    with opened_run(config, tmp_path / "run") as (system, _):
        assert system.mesh.size == 8
        state, experience = system.first_state(), system.experience(NEW_RUN, STOP)
        batch = experience.next(state, 0, STOP)
        row = np.asarray(batch.tokens)[0, 0, : int(batch.lengths[0, 0])]
        assert "istory" not in system.inputs.encoder.tokenizer.backend.decode(row.tolist())
        state, metrics = system.update(state, batch)
        assert float(metrics["value_loss"]) > 0
        assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-3)  # the policy is the reference
        assert np.abs(np.asarray(state.critic.weights)).max() > 0
        for step in range(1, 6):
            state, metrics = system.update(state, experience.next(state, step, STOP))
            assert np.isfinite(float(metrics["loss"]))
    assert experience.position() == (6, [])


def test_an_index_that_is_there_is_searched(system: Harr, workdir: Path, tmp_path: Path) -> None:
    """Of its vectors a pool takes as many as there are."""
    index, count = system.inputs.index, len(system.inputs.index.corpus)
    folder = str(workdir / "index")
    config = small(corpus__path=folder, policy__pool=count + 9)
    with opened(config, tmp_path / "run") as other:
        assert not (tmp_path / "run" / "index").exists()
        found, numbers = other.inputs.index, range(count)
        np.testing.assert_array_equal(found.vectors(numbers), index.vectors(numbers))
        batch = other.experience(NEW_RUN, STOP).next(other.first_state(), 0, STOP)
        present = np.asarray(batch.present)
        assert present.shape[-1] == count + 9
        assert present[:, 0].sum(axis=-1).tolist() == [count] * 2 * MEMBERS
        _, metrics = other.update(other.first_state(), batch)
        assert np.isfinite(float(metrics["loss"]))
    config = small(corpus__path=folder, seed=7)  # the vectors are of other weights
    with pytest.raises(InputError, match="index"), opened(config, tmp_path / "other"):
        pass


@pytest.fixture(scope="module")
def model(system: Harr) -> KnowingModel:
    every = (*system.inputs.train, *system.inputs.dev)
    apart = {each.question: system.inputs.apart.get(each.id) for each in every}
    return KnowingModel({q: each for q, each in apart.items() if each is not None})


@pytest.fixture
def server(model: KnowingModel) -> Iterator[ModelServer]:
    with ModelServer(model) as served:
        yield served


def asking(server: ModelServer, agent: str, **fields: Any) -> ConfigDict:
    config = small(**fields)
    config.agent.name = agent
    config.llm.update(url=server.url, model="tiny", cache="")
    return config


def test_react_with_a_model_that_knows_is_the_scripted_agent(
    system: Harr, server: ModelServer, tmp_path: Path
) -> None:
    with opened(asking(server, "react"), tmp_path / "run") as asks:
        batch = first_batch(asks)
        counts = asks.experience(NEW_RUN, STOP).counts()
    for name, one, other in zip(batch._fields, batch, first_batch(system), strict=True):
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
    config = asking(server, agent)
    if agent == "search_r1":
        template = "{{ messages[0]['content'] }}<end>"
        config.llm.tokenizer = saved_tokenizer(tmp_path / "tokenizer", template)
    with opened(config, tmp_path / "run") as system:
        batch, state = first_batch(system), system.first_state()
        scores = system.evaluate(state, 0, STOP)
        starts = system.starts(system.inputs.dev, 1, 0)
        episodes = system.play(state.params, starts, STOP)
    assert batch.scored.all()
    assert (batch.lengths[:, 0] > 0).all()
    assert scores.metrics["eval/broken_share"] == 0
    assert all(len(each.ended.history) == len(each.searches) for each in episodes)
    if agent == "search_r1":  # what the model thinks of the passages is in the history
        answers = [hop.answer for each in episodes for hop in each.ended.history[:-1]]
        assert all(answer.startswith("I know ") for answer in answers)


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
    with opened(asking(server, "react", agent__attempts=1), tmp_path / "run") as system:
        batch = first_batch(system)
        masked = ~batch.scored
        # Episodes of a group that ask the same at the same time share the failure.
        assert 1 <= masked.sum() <= MEMBERS
        assert (batch.episode_rewards[masked] == 0).all()
        assert (batch.lengths[masked, 0] > 0).all()  # they had searched
        server.script = lambda call: Reply("I like trains.")
        with pytest.raises(FeedbackLost, match="8 of 8"):
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


def test_questions_of_all_parts_of_an_evaluation_have_draws_of_their_own(
    system: Harr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, play = list[bytes](), Harr.play

    def seen(system: Harr, params: Any, starts: Any, stop: Any, *, is_greedy: bool = False):
        drawn.extend(start.key.tobytes() for start in starts if not is_greedy)
        return play(system, params, starts, stop, is_greedy=is_greedy)

    monkeypatch.setattr(Harr, "play", seen)
    params = system.here(system.first_state().params)
    way = harr_scoring.agent_way(system, STOP, "drawn", "drawn", params, sampled=4)
    asked = Questions(AGENTS, system.inputs.dev, size=2)
    asked.into(tmp_path / "log.jsonl", way, {}, STOP, restart=False)
    assert len(drawn) == len(set(drawn)) == 4 * len(system.inputs.dev) > 8
