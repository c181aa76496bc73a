"""Tries of LeReT, hop by hop, and the prompts with examples that are made of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from examples.worlds.scripts import bridge_question
from qrag_jax.environments.episode import Document, Ended, Failed, Look
from qrag_jax.environments.queries import (
    BY_PASSAGE,
    EMPTY,
    STOPPED,
    TOO_LONG,
    QueryAgent,
    QueryPrompt,
    QueryState,
    Searched,
    Variant,
)
from qrag_jax.errors import InputError
from qrag_jax.feedback.pairs import StateKey, Try
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.metrics.rows import Hop
from qrag_jax.rollouts.token_episodes import Episode, Speech, Start
from qrag_jax.rollouts.trajectories import Turn
from qrag_jax.runtime.interrupt import Stopped
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import LeretConfig
from qrag_jax.systems.leret_tries import Asked, kept_prompts, search_hops, try_of
from tests.environments.trying import BERG, LATER, OSLO, RAIN, STATE, tiny_speech
from tests.systems.small_runs import opened, said, small_leret

FOUND = {"ada berg": (BERG, RAIN), "oslo": (OSLO, BERG), "rain": (RAIN,)}
OTHER = dataclasses.replace(STATE, id="r", question="Where does it rain?")


class Shelf:
    """Finds what is written above."""

    def look(self, asked: Sequence[tuple[Any, Look]]) -> list[tuple[Document, ...] | Failure]:
        return [self._found(step) for _, step in asked]

    def _found(self, step: Look) -> tuple[Document, ...] | Failure:
        if step.query == "broken":
            return Failure("timeout", "no reply.")
        return FOUND.get(step.query, ())[: step.most]

    def named(self, _: Any, names: Sequence[str]) -> tuple[Document, ...]:
        every = {each.id: each for each in (BERG, OSLO, RAIN)}
        return tuple(every[name]._replace(score=0.0) for name in names)


LIBRARY: Any = Shelf()
CONFIG = LeretConfig.of(small_leret(seed=3, writing__k=2, search__gold_by=BY_PASSAGE))
PROMPT = QueryPrompt(prompts.load("bare_query"), (Variant("one", mark="style: one"),))
AGENT = QueryAgent(PROMPT, 2, stop="enough")


@pytest.fixture(scope="module")
def speech() -> Speech:
    return tiny_speech()


def model(
    speech: Speech, *queries: Sequence[str]
) -> tuple[Callable[..., list[Episode]], list[list[Start]]]:
    """Writes these queries, hop by hop; and what it was asked."""
    asked: list[list[Start]] = []

    def play(starts: Sequence[Start]) -> list[Episode]:
        asked.append([*starts])
        texts = queries[len(asked) - 1]
        return [
            Episode(Failed("timeout", "no reply."), (), 1)
            if text == "fails"
            else said(AGENT, LIBRARY, speech, start.task, text)
            for start, text in zip(starts, texts, strict=True)
        ]

    return play, asked


def by_hop(*played: Any) -> list[list[Hop]]:
    """All hops of played questions."""
    rows, _ = search_hops(CONFIG, LIBRARY, *played)
    return [[*hops] for hops in zip(*(row.hops for row in rows), strict=True)]


def pools(hops: Sequence[Hop]) -> list[list[str]]:
    return [[*hop.pool] for hop in hops]


def test_pools_grow_hop_by_hop(speech: Speech) -> None:
    play, asked = model(speech, ["ada berg", "rain"], ["oslo", "oslo"])
    first, second = by_hop([STATE, OTHER], play, 1)
    assert pools(first) == [["a", "c"], ["c"]]
    assert pools(second) == [["a", "c", "b"], ["c", "b", "a"]]
    assert [row.scores["recall"] for row in (*first, *second)] == [0.5, 0.0, 1.0, 1.0]
    assert second[0].scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert second[1].scores["ap_min"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert [hop.query for hop in second] == ["oslo", "oslo"]
    hops = [[start.task.hop for start in each] for each in asked]  # type: ignore[attr-defined]
    assert hops == [[1, 1], [2, 2]]
    opening = speech.scaffold.opening(PROMPT.messages(STATE))
    assert (first[0].read, second[0].read > len(opening)) == (len(opening), True)
    assert first[0].sampled > 1


def test_nothing_is_found_without_a_query_and_the_next_hop_asks_again(speech: Speech) -> None:
    play, asked = model(speech, ["", "fails", "broken"], ["ada berg", "oslo", "oslo"])
    first, second = by_hop([STATE] * 3, play, 1)
    assert pools(first) == [[], [], []]
    assert [hop.outcome for hop in first] == ["no_query", "timeout", "timeout"]
    assert [row.scores["recall"] for row in first] == [0, 0, 0]
    assert pools(second) == [["a", "c"], ["b", "a"], ["b", "a"]]
    assert [start.task.hop for start in asked[1]] == [2, 2, 2]  # type: ignore[attr-defined]


def test_draws_depend_on_stream_hop_and_question_alone(speech: Speech) -> None:
    def keys(states: Sequence[QueryState], stream: int) -> list[bytes]:
        play, asked = model(speech, *[["rain"] * len(states)] * 2)
        by_hop(states, play, stream)
        return [start.key.tobytes() for each in asked for start in each]

    one, two = keys([STATE, OTHER], 1), keys([STATE, OTHER], 2)
    assert len({*one, *two}) == 8
    assert keys([STATE], 1) == one[::2]


SAID = Turn(np.arange(3), np.array([7, 8]), np.array([-1.5, -2.5], np.float32), "stop", "v3")


def tried(ended: Ended, *turns: Turn) -> Try:
    asked = Asked(StateKey(4, LATER.hop), LATER.asked_by(2), 3)
    return try_of(CONFIG, asked, Episode(ended, (turns,), 1))


def test_what_a_query_found_joins_the_pool_and_is_scored() -> None:
    item = tried(Searched(answer="oslo", seen=("b", "a"), found=(OSLO, BERG)), SAID)
    assert (item.at, item.variant, item.draw) == ((4, 2), 2, 3)
    assert item.pool == ("a", "c", "b")
    assert item.found == (("b", 7.0), ("a", 5.0))
    assert item.scores["ap"] == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert item.reward == item.scores["ap"]
    assert item.sampled == tuple(SAID.sampled.tolist())
    assert (item.log_probs, item.version) == (tuple(SAID.log_probs.tolist()), "v3")
    stop = tried(Searched(answer="DONE", outcome=STOPPED), SAID)
    assert (stop.pool, stop.reward, stop.scores["ap"]) == (("a", "c"), 0.5, 0.5)
    # Without a query, and after a failure, there is no reward.
    for outcome in (EMPTY, TOO_LONG):
        item = tried(Searched(answer="", outcome=outcome), SAID)
        assert (item.reward, item.scores, item.pool) == (None, {}, ("a", "c"))
    item = tried(Failed("timeout", "no reply"))
    assert (item.outcome, item.reward, item.sampled, item.finish) == ("timeout", None, (), "")


# ---------------------------------------------------------------- prompts with examples

QUESTIONS = [bridge_question(0, "train", number) for number in range(6)]


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    """Of two rounds of examples, which need longer prompts."""
    sizes = {"candidates": 3, "demonstrations": 1, "bootstrap_questions": 2, "rank_questions": 1}
    fields: dict[str, Any] = {
        "tries__ways": "few_shot",
        "tries__with_bare": True,
        "tries__samples": 1,
        "model__tiny__positions": 1024,
        "sampling__room": 512,
        "few_shot__rounds": 2,
        **{f"few_shot__{name}": count for name, count in sizes.items()},
    }
    return small_leret(**fields)


@pytest.fixture(scope="module")
def system(config: ConfigDict, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leret]:
    with opened(config, tmp_path_factory.mktemp("leret") / "run") as system:
        yield system


def prompts_of(
    system: Leret, workdir: Path, query_of: Callable[[QueryState], str], stop_at: int = 0
) -> tuple[tuple[Variant, ...], int]:
    """The prompts of a model that writes by a rule; how often it played."""
    calls, inputs = [], system.inputs

    def play(prompt: QueryPrompt, starts: Sequence[Start]) -> list[Episode]:
        calls.append(prompt)
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        agent = QueryAgent(prompt, inputs.agent.k, inputs.agent.stop)
        tasks: list[Any] = [start.task for start in starts]
        return [said(agent, inputs.library, inputs.speech, task, query_of(task)) for task in tasks]

    workdir.mkdir(exist_ok=True)
    assert system.maker is not None
    return system.maker.prompts(workdir, play), len(calls)


def knowing(state: QueryState) -> str:
    """The entity, then the bridge."""
    (question,) = (each for each in QUESTIONS if each.id == state.id)
    return question.entity if state.hop == 1 else question.bridge


def test_prompts_with_examples_are_made_once(config: ConfigDict, tmp_path: Path) -> None:
    with opened(config, tmp_path / "run") as system:
        variants, _ = prompts_of(system, system.workdir, knowing)
        assert system.variants == (0, 1, 2)
        assert len(variants) == 2
        tried = [system.inputs.train[number].question for number in system.asked]
        shown = {example.question for each in variants for example in each.examples}
        assert len(tried) == 3
        assert shown
        assert not shown & {*tried}
        assert [each.question for each in system.tries.questions] == tried
        assert system.tries.variants == (0, 1, 2)
    with opened(config, system.workdir) as again:  # nothing plays
        assert again.prompt.variants == variants
    saved = json.loads((system.workdir / "few_shot.json").read_text())
    for change in ({"template": "another"}, {"kept": []}):
        (tmp_path / "few_shot.json").write_text(json.dumps(saved | change))
        with pytest.raises(InputError, match="few_shot"):
            kept_prompts(tmp_path, system.inputs.agent.prompt)


def test_a_later_round_of_examples_goes_on(system: Leret, tmp_path: Path) -> None:
    whole, calls = prompts_of(system, tmp_path / "whole", knowing)
    with pytest.raises(Stopped):
        prompts_of(system, tmp_path / "broken", knowing, stop_at=calls)
    again, left = prompts_of(system, tmp_path / "broken", knowing)
    assert again == whole
    assert 0 < left < calls  # the first round is not played again


def test_no_full_credit_in_the_bootstrap(system: Leret, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="full credit"):
        prompts_of(system, tmp_path / "run", lambda state: "xyzzy")
