"""HARR put together: groups, agents and their models, rewards, and updates of a small run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.data.sample import Sample
from qrag_jax.environments.rag import named
from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.metrics.row_log import AGENTS
from qrag_jax.retrieval.building import IndexSettings
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.harr.system import Harr
from qrag_jax.systems.indexing import index_corpus
from qrag_jax.systems.scoring import Questions, Way
from tests.environments.trying import saved_tokenizer
from tests.llm.model_server import Call, ModelServer, Reply
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
    state = system.first_state()
    placed = system.experience(NEW_RUN, STOP).next(state, 0, STOP)
    batch = jax.device_get(placed)
    assert batch.scored.all()
    assert (batch.lengths[:, 0] > 0).all()
    rewards = batch.episode_rewards.reshape(2, MEMBERS, 2)
    assert ((rewards >= 0) & (rewards <= 1)).all()
    assert batch.hop_rewards[:, 0, 0] == pytest.approx(1.0)  # all passages are new at first
    # What is stored of the acting policy is what the learner says of its weights.
    _, metrics = system.update(state, placed)
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
        assert "istory" not in system.inputs.model.tokenizer.backend.decode(row.tolist())
        state, metrics = system.update(state, batch)
        assert float(metrics["value_loss"]) > 0
        assert float(metrics["kl"]) == pytest.approx(0.0, abs=1e-3)  # the policy is the reference
        assert np.abs(np.asarray(state.critic.weights)).max() > 0
        for step in range(1, 6):
            state, metrics = system.update(state, experience.next(state, step, STOP))
            assert np.isfinite(float(metrics["loss"]))
    assert experience.position() == (6, [])


def test_an_index_that_is_there_is_searched(system: Harr, workdir: Path, tmp_path: Path) -> None:
    """Of its vectors a pool takes as many as there are; vectors of other weights are refused."""
    index, count = system.inputs.index, len(system.inputs.index.corpus)
    folder = str(workdir / "index")
    with opened(small(search__index=folder, policy__pool=count + 9), tmp_path / "run") as other:
        assert not (tmp_path / "run" / "index").exists()
        numbers = range(count)
        np.testing.assert_array_equal(other.inputs.index.vectors(numbers), index.vectors(numbers))
        present = first_batch(other).present
        assert present.shape[-1] == count + 9
        assert present[:, 0].sum(axis=-1).tolist() == [count] * 2 * MEMBERS
        drawn = first_batch(other).actions
    config = small(search__index=folder, seed=7)
    with pytest.raises(InputError, match="index"), opened(config, tmp_path / "other"):
        pass
    by_faiss = {"search__index": str(tmp_path / "index"), "search__engine": "faiss"}
    shutil.copytree(folder, tmp_path / "index")
    served = small(search__engine="milvus")
    with pytest.raises(InputError, match="milvus"), opened(served, tmp_path / "served"):
        pass
    index_corpus(None, tmp_path / "index", None, IndexSettings(engine="faiss"))
    with opened(small(**by_faiss, policy__pool=count + 9), tmp_path / "faiss") as other:
        np.testing.assert_array_equal(first_batch(other).actions, drawn)


# ---------------------------------------------------------------- agents that ask a model

GIVEN_UP = "none of them"


@dataclasses.dataclass(frozen=True)
class KnowingModel:
    """The script of a `ModelServer`: a language model that takes every question apart rightly.

    So an agent that asks it does what the scripted agent does, number by number.
    """

    questions: Mapping[str, Sample]  # with their sub-questions, by the text

    def __call__(self, call: Call) -> Reply:
        return Reply() if call.path.endswith("/rerank") else Reply(self._text(call))

    def _text(self, call: Call) -> str:
        if "messages" not in call.body:
            return self._search_r1(call.body["prompt"])
        messages = [message["content"] for message in call.body["messages"]]
        if "<passages>" in messages[1]:
            return self._read(messages[1])
        if "<prediction>" in messages[1]:
            golds, said = _between("golds", messages[1]), _between("prediction", messages[1])
            return f"Final answer: {'yes' if said in golds.split('; ') else 'no'}"
        if "<searches>" in messages[1]:
            return f"Final answer: {GIVEN_UP}"
        found = [line.removeprefix("FOUND: ") for line in messages if line.startswith("FOUND: ")]
        whole = self.questions[_between("question", messages[1])]
        if len(found) == len(whole.hops):
            return f"Thought: That is all.\nAnswer: {found[-1]}"
        return f"Thought: The next one.\nSearch: {whole.hops[len(found)].filled(found)}"

    def _read(self, message: str) -> str:
        answer = self._named(_between("question", message), _between("passages", message))
        status = "FOUND" if answer else "NOT_FOUND"
        return f"I have read them.\n{json.dumps({'status': status, 'answer': answer})}"

    def _search_r1(self, text: str) -> str:
        question = next(q for q in self.questions if f"{q}<end>" in text)
        whole, found = self.questions[question], list[str]()
        turns = re.findall(r"<search>(.*?)</search>\s*<information>(.*?)</information>", text, re.S)
        for sub_query, passages in turns:
            if answer := self._named(sub_query.strip(), passages):
                found.append(answer)
        thought = f"<think>I know {found[-1] if found else 'nothing'}.</think>"
        if text.endswith("<answer>"):
            return f"{GIVEN_UP}</answer>"
        if len(found) == len(whole.hops):
            return f"{thought}<answer>{found[-1]}</answer>"
        return f"{thought}<search>{whole.hops[len(found)].filled(found)}</search>"

    def _named(self, sub_query: str, text: str) -> str:
        """The answer of the hop that asks this, if the text names it."""
        for whole in self.questions.values():
            for hop in whole.hops:
                pattern = re.escape(hop.text).replace(r"\#1", ".+").replace(r"\#2", ".+")
                if re.fullmatch(pattern, sub_query) and (found := named(hop.answers, [text])):
                    return found
        return ""


def _between(mark: str, text: str) -> str:
    found = re.search(rf"<{mark}>(.*?)</{mark}>", text, re.S)
    assert found is not None
    return found[1].strip()


@pytest.fixture(scope="module")
def model(system: Harr) -> KnowingModel:
    return KnowingModel(
        {each.question: each for each in (*system.inputs.train, *system.inputs.dev)}
    )


@pytest.fixture
def server(model: KnowingModel) -> Iterator[ModelServer]:
    with ModelServer(model) as served:
        yield served


def asking(server: ModelServer, agent: str, **fields: Any) -> ConfigDict:
    config = small(**fields)
    config.agent.name = agent
    config.llm.update(url=server.url, model="tiny", cache="")
    return config


def test_react_is_the_scripted_agent(system: Harr, server: ModelServer, tmp_path: Path) -> None:
    with opened(asking(server, "react"), tmp_path / "run") as asks:
        batch = first_batch(asks)
        assert asks.experience(NEW_RUN, STOP).counts()["llm/answers"] == len(server.calls)
    for name, one, other in zip(batch._fields, batch, first_batch(system), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_search_r1_has_its_thoughts_in_its_history(server: ModelServer, tmp_path: Path) -> None:
    config = asking(server, "search_r1")
    template = "{{ messages[0]['content'] }}<end>"
    config.llm.tokenizer = saved_tokenizer(tmp_path / "tokenizer", template)
    with opened(config, tmp_path / "run") as system:
        batch, state = first_batch(system), system.first_state()
        episodes = system.play(state.params, system.starts(system.inputs.dev, 1, 0), STOP)
    assert batch.scored.all()
    assert (batch.lengths[:, 0] > 0).all()
    assert all(len(each.ended.history) == len(each.searches) for each in episodes)
    answers = [hop.answer for each in episodes for hop in each.ended.history[:-1]]
    assert all(answer.startswith("I know ") for answer in answers)


def test_failed_calls_are_masked_and_many_of_them_stop_the_run(
    server: ModelServer, model: KnowingModel, tmp_path: Path
) -> None:
    too_long = Reply("This model's maximum context length is 16 tokens.", status=400)
    failures = iter([too_long])

    def some_fail(call: Any) -> Reply:
        reads = "<passages>" in call.prompt
        return (next(failures, None) if reads else None) or model(call)

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
    way = Way("drawn", "drawn", partial(system.answered, params, stop=STOP, sampled=4), {})
    asked = Questions(AGENTS, system.inputs.dev, size=2)
    asked.into(tmp_path / "log.jsonl", way, STOP, restart=False)
    assert len(drawn) == len(set(drawn)) == 4 * len(system.inputs.dev) > 8
