"""Agents' searches: draws from a pool, batches of many episodes, shared requests, failures."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from qrag_jax.data.sample import Sample, SubQuestion
from qrag_jax.environments.episode import Closed, Failed, Hop, Retrieve, Task
from qrag_jax.environments.rag import ReAct, Scripted
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome, Request
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import load
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.retrieval.towers import Rows
from qrag_jax.rollouts.pool_search import Ask, Drawn, PoolSearch, StateRows
from qrag_jax.rollouts.token_episodes import AgentRollout, Start
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from tests.retrieval.small_corpus import of_texts

WORDS, WIDTH = 1000, 16
FRUIT = ("red apple", "green apple", "blue sky", "grey sky", "black coal", "white snow")
TEXTS = (
    "Ada Berg was born in Oslo",
    "Oslo is the capital of Norway",
    "Bo Lund was born in Rome",
    "Rome is the capital of Italy",
    *(f"passage {number} says nothing" for number in range(12)),
)
PEOPLE = {"Ada Berg": ("Oslo", "Norway"), "Bo Lund": ("Rome", "Italy")}


class WordIds:
    """A tokenizer: each word is its own token."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            [zlib.crc32(word.encode()) % WORDS for word in re.findall(r"\w+", text.lower())]
            for text in texts
        ]


def bag_tower(rows: Rows) -> np.ndarray:
    """Rows → the direction of the sum of their words' vectors."""
    table = np.random.default_rng(0).normal(size=(WORDS + 2, WIDTH))
    summed = np.stack([table[list(row)[1:-1]].sum(axis=0) for row in rows])
    return (summed / np.linalg.norm(summed, axis=1, keepdims=True)).astype(np.float32)


def pool_search(texts: Sequence[str], *, stateful: bool = True) -> PoolSearch:
    """Searches passages p0, p1 and so on with these texts."""
    vectors = bag_tower([[0, *ids, 0] for ids in WordIds().encode(texts)])
    states = StateRows(WordIds(), (WORDS,), WORDS + 1, 64, stateful, instruction=False)  # type: ignore[arg-type]
    config = PlackettLuceConfig(tau=0.5, pool=4, passages=2)
    return PoolSearch(bag_tower, of_texts(texts, vectors), states, config)


def asks(count: int, hops: int = 0) -> list[Ask]:
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), count)))
    step = Retrieve("apple", (Hop("", ""),) * hops)
    return [Ask("Which fruit is red?", step, key) for key in keys]


def draws(search: PoolSearch, asked: Sequence[Ask]) -> list[Drawn]:
    return [item for item in search(asked) if isinstance(item, Drawn)]


def test_the_pool_is_the_best_and_the_draw_is_from_it() -> None:
    search = pool_search(FRUIT, stateful=False)
    (drawn,) = draws(search, asks(1))
    vector = bag_tower([drawn.row.tolist()])[0]
    everything = search.index.vectors(np.arange(len(FRUIT))) @ vector
    np.testing.assert_array_equal(drawn.pool, np.argsort(-everything, kind="stable")[:4])
    np.testing.assert_array_equal(drawn.vectors, search.index.vectors(drawn.pool))
    logits, left, log_prob = (drawn.vectors @ vector) / 0.5, set(range(4)), 0.0
    for action in drawn.actions:
        log_prob += logits[action] - math.log(sum(math.exp(logits[i]) for i in left))
        left.remove(int(action))
    assert drawn.log_prob == pytest.approx(log_prob, abs=1e-5)
    names = tuple(f"p{drawn.pool[action]}" for action in drawn.actions)
    assert drawn.names == names
    assert drawn.passages[0].text == FRUIT[int(drawn.pool[drawn.actions[0]])]
    greedy = draws(dataclasses.replace(search, is_greedy=True), asks(3))
    assert [item.actions.tolist() for item in greedy] == [[0, 1]] * 3


def test_draws_depend_on_the_episode_and_the_hop_not_on_the_batch() -> None:
    search, asked = pool_search(FRUIT, stateful=False), asks(11)
    together = [tuple(drawn.actions) for drawn in draws(search, asked)]
    assert together == [tuple(draws(search, [item])[0].actions) for item in asked]
    assert len({*together}) > 3
    assert len({tuple(draws(search, asks(1, hops))[0].actions) for hops in range(8)}) > 2


# ---------------------------------------------------------------- many episodes at once


def scripted(**more: Sample) -> Scripted:
    whole = {
        name: Sample(
            *("", "", (), (), (country,)),
            hops=(
                SubQuestion(f"Where was {name} born?", (city,)),
                SubQuestion("Of which country is #1 the capital?", (country,)),
            ),
        )
        for name, (city, country) in PEOPLE.items()
    }
    return Scripted({**whole, **more}, 4)


def starts(members: int) -> list[Start]:
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 64)))
    return [
        Start(Task(name, f"In whose capital was {name} born?"), keys[8 * group + member], name)
        for group, name in enumerate(PEOPLE)
        for member in range(members)
    ]


class Model:
    """A language model that answers at once."""

    def __init__(self, reply: Callable[[ChatRequest], Outcome]) -> None:
        self.asked: list[ChatRequest] = []
        self._reply = reply

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
        (request,) = requests
        assert isinstance(request, ChatRequest)
        self.asked.append(request)
        future: Future[list[Outcome]] = Future()
        future.set_result([self._reply(request)])
        return future


def react() -> ReAct:
    generation = Generation()
    reader = load("rag_qa")
    return ReAct(load("rag_planner"), load("rag_final"), reader, generation, 2)


def answers(request: ChatRequest) -> Outcome:
    """Plans one search, reads that it was found, and answers."""
    last, whole = request.messages[-1][1], str(request.messages)
    if "<passages>" in whole:
        return Answer('{"status": "FOUND", "answer": "Oslo"}')
    return Answer("Answer: Norway" if last.startswith("FOUND") else "Search: Where was Ada born?")


def rollout(agent: ReAct | Scripted, model: Model | None = None) -> AgentRollout:
    return AgentRollout(agent, stop=StopSignal(), search=pool_search(TEXTS), model=model)


def test_scripted_episodes_are_searched_in_one_batch_a_round_and_are_as_alone() -> None:
    playing, asked = rollout(scripted()), starts(8)
    played = playing.play(asked)
    assert [len(item.searches) for item in played] == [len(item.ended.history) for item in played]
    assert playing.counts.batches == max(len(item.searches) for item in played)
    assert playing.counts.searches == sum(len(item.searches) for item in played)
    right = [
        isinstance(item.ended, Closed) and item.ended.answer == PEOPLE[start.task.id][1]
        for start, item in zip(asked, played, strict=True)
    ]
    assert sum(right) >= len(right) // 2  # the others gave up
    for start, among in list(zip(asked, played, strict=True))[::4]:
        (alone,) = rollout(scripted()).play([start])
        assert alone.ended == among.ended
        assert [s.names for s in alone.searches] == [s.names for s in among.searches]
        assert [s.log_prob for s in alone.searches] == pytest.approx(
            [s.log_prob for s in among.searches], abs=1e-5
        )


def test_a_plan_that_depends_on_the_question_alone_is_requested_once_a_group() -> None:
    model = Model(answers)
    playing = rollout(react(), model)
    played = playing.play(starts(4))
    assert all(isinstance(item.ended, Closed) for item in played)
    assert {item.ended.answer for item in played} == {"Norway"}
    # One plan for each of two groups; then every episode reads and answers by itself.
    assert playing.counts.turns == len(model.asked) == 2 + 8 + 8

    # A server gives the same reply to the same request with the same seed: others have another.
    def breaks_first(request: ChatRequest) -> Outcome:
        first = broken.asked[0].seed
        # An answer without a search, even when it is corrected.
        return Answer("Answer: Norway") if request.seed == first else answers(request)

    broken = Model(breaks_first)
    playing = rollout(react(), broken)
    played = playing.play(starts(3)[:3])
    assert [(type(item.ended), item.attempts) for item in played] == [(Closed, 2)] * 3
    assert [len(item.searches) for item in played] == [1] * 3  # of the attempt that counts
    assert playing.counts.turns == 2 + 1 + 3 + 3  # both attempts share what comes before a search


def test_an_episode_that_keeps_breaking_has_no_answer() -> None:
    playing = rollout(react(), Model(lambda _: Failure("server", "HTTP 500.")))
    played = playing.play(starts(2))
    assert all(isinstance(item.ended, Failed) and item.ended.cause == "server" for item in played)
    assert [item.attempts for item in played] == [2] * 4
    # A failure is not shared with the next attempt: both groups ask twice.
    assert playing.counts.turns == 4
    # A state that does not fit breaks its episode alone.
    long = Sample("", "", answers=("x",), hops=(SubQuestion("word " * 80, ("x",)),))
    start = starts(1)[0]
    one, other = rollout(scripted(long=long)).play([start, start._replace(task=Task("long", "?"))])
    assert isinstance(one.ended, Closed)
    assert isinstance(other.ended, Failed)
    assert (other.ended.cause, other.searches) == ("too_long", ())


def test_a_signal_to_stop_cancels_what_is_in_flight() -> None:
    stop, futures = StopSignal(), list[Future]()

    class Silent:
        def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
            futures.append(Future())
            stop.requested = True
            return futures[-1]

    playing = AgentRollout(react(), stop=stop, search=pool_search(TEXTS), model=Silent())
    with pytest.raises(Stopped):
        playing.play(starts(2))
    assert [future.cancelled() for future in futures] == [True, True]
