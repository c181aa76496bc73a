"""Many episodes at once: batches of searches, shared requests, failures, and the way to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np
import pytest

from qrag_jax.data.decompositions import Decomposition, SubQuestion
from qrag_jax.environments.rag.episode import Broken, Finished, Limits, Task
from qrag_jax.environments.rag.react import ReAct
from qrag_jax.environments.rag.reading import Reader
from qrag_jax.environments.rag.scripted import Scripted
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, ChatRequest, Failure, Outcome, Request
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import load
from qrag_jax.policies.plackett_luce import PlackettLuceConfig
from qrag_jax.rollouts.agents import AgentRollout, PlayConfig, Start
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from tests.rollouts.searching import pool_search

TEXTS = (
    "Ada Berg was born in Oslo",
    "Oslo is the capital of Norway",
    "Bo Lund was born in Rome",
    "Rome is the capital of Italy",
    *(f"passage {number} says nothing" for number in range(12)),
)
CONFIG = PlackettLuceConfig(tau=0.3, pool=6, passages=2)
PEOPLE = {"Ada Berg": ("Oslo", "Norway"), "Bo Lund": ("Rome", "Italy")}


def scripted(max_hops: int = 4) -> Scripted:
    whole = {
        name: Decomposition(
            (
                SubQuestion(f"Where was {name} born?", (city,)),
                SubQuestion("Of which country is #1 the capital?", (country,)),
            ),
            (country,),
        )
        for name, (city, country) in PEOPLE.items()
    }
    return Scripted(whole, Limits(max_hops=max_hops))


def starts(members: int, people: Sequence[str] = tuple(PEOPLE)) -> list[Start]:
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 64)))
    return [
        Start(Task(name, f"In whose capital was {name} born?"), name, keys[8 * group + member])
        for group, name in enumerate(people)
        for member in range(members)
    ]


class Thinking:
    """A language model that answers after a while, each request in a thread of its own."""

    def __init__(self, reply: Callable[[ChatRequest], Outcome], seconds: float = 0.0) -> None:
        self.asked: list[Request] = []
        self._reply, self._seconds = reply, seconds

    def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
        (request,) = requests
        assert isinstance(request, ChatRequest)
        self.asked.append(request)
        future: Future[list[Outcome]] = Future()

        def answer() -> None:
            time.sleep(self._seconds)
            if future.set_running_or_notify_cancel():
                future.set_result([self._reply(request)])

        threading.Thread(target=answer, daemon=True).start()
        return future


def react() -> ReAct:
    generation = Generation()
    reader = Reader(load("rag_qa"), generation)
    return ReAct(load("rag_planner"), load("rag_final"), reader, generation, Limits(max_hops=2))


def answers(request: ChatRequest) -> Outcome:
    """Plans one search, reads that it was found, and answers."""
    last, whole = request.messages[-1][1], str(request.messages)
    if "<passages>" in whole:
        return Answer('{"status": "FOUND", "answer": "Oslo"}')
    return Answer("Answer: Norway" if last.startswith("FOUND") else "Search: Where was Ada born?")


def rollout(
    agent, model: Thinking | None = None, config: PlayConfig | None = None, **search
) -> AgentRollout:
    found = pool_search(TEXTS, CONFIG, **search)
    return AgentRollout(agent, found, model, config or PlayConfig(), StopSignal())


def test_scripted_episodes_are_searched_in_one_batch_a_round() -> None:
    playing = rollout(scripted())
    played = playing.play(starts(8))
    assert [len(each.searches) for each in played] == [len(each.ended.history) for each in played]
    rounds = max(len(each.searches) for each in played)
    assert playing.counts.batches == rounds
    assert playing.counts.searches == sum(len(each.searches) for each in played)
    right = [PEOPLE[start.task.id][1] for start in starts(8)]
    good = [
        isinstance(each.ended, Finished) and each.ended.answer == answer
        for each, answer in zip(played, right, strict=True)
    ]
    assert sum(good) >= len(good) // 2  # the others gave up


def test_episodes_are_the_same_alone_and_among_others() -> None:
    together = rollout(scripted()).play(starts(4))
    for start, among in zip(starts(4), together, strict=True):
        (alone,) = rollout(scripted()).play([start])
        assert alone.ended == among.ended
        assert [s.names for s in alone.searches] == [s.names for s in among.searches]
        assert [s.log_prob for s in alone.searches] == pytest.approx(
            [s.log_prob for s in among.searches], abs=1e-5
        )


def test_a_plan_that_depends_on_the_question_alone_is_made_once_a_group() -> None:
    model = Thinking(answers)
    playing = rollout(react(), model)
    played = playing.play(starts(4))
    assert [each.ended.answer for each in played if isinstance(each.ended, Finished)] == [
        "Norway"
    ] * 8
    # One plan for each of two groups; then every episode reads and answers by itself.
    assert playing.counts.calls == len(model.asked) == 2 + 8 + 8
    assert playing.counts.shared == 6


def test_an_episode_that_breaks_is_played_again_with_other_draws() -> None:
    failed: list[ChatRequest] = []

    def reply(request: ChatRequest) -> Outcome:
        if "<passages>" in str(request.messages) and len(failed) < 1:
            failed.append(request)
            return Failure("timeout", "no answer.")
        return answers(request)

    playing = rollout(react(), Thinking(reply))
    (episode,) = playing.play(starts(1)[:1])
    assert isinstance(episode.ended, Finished)
    assert (episode.attempts, playing.counts.broken) == (2, 1)
    assert len(episode.searches) == 1  # those of the attempt that counts


def test_a_group_whose_first_replies_broke_gets_others() -> None:
    """A server gives the same reply to the same request with the same seed."""
    seeds: list[int | None] = []

    def reply(request: ChatRequest) -> Outcome:
        seeds.append(request.seed)
        # An answer without a search, even when it is corrected.
        return Answer("Answer: Norway") if request.seed == seeds[0] else answers(request)

    playing = rollout(react(), Thinking(reply))
    played = playing.play(starts(3)[:3])
    assert [(type(each.ended), each.attempts) for each in played] == [(Finished, 2)] * 3
    assert playing.counts.calls == 2 + 1 + 3 + 3  # both attempts share what comes before a search


def test_an_episode_that_keeps_breaking_has_no_answer() -> None:
    playing = rollout(react(), Thinking(lambda _: Failure("server", "HTTP 500."), seconds=0.5))
    played = playing.play(starts(2))
    assert all(isinstance(each.ended, Broken) for each in played)
    assert {each.ended.cause for each in played if isinstance(each.ended, Broken)} == {"server"}
    assert [each.attempts for each in played] == [2] * 4
    # A failure is not shared with the next attempt: both groups ask twice.
    assert playing.counts.calls == 4


def test_searches_of_a_moment_are_one_call_of_the_encoder() -> None:
    """64 episodes of a model that takes 0.2 s: few, large batches, and no waiting in turn."""
    model = Thinking(answers, seconds=0.2)
    playing = rollout(react(), model, PlayConfig(gather=0.05))
    begun = time.monotonic()
    many = [start._replace(group=number) for number, start in enumerate(starts(8) * 4)]
    played = playing.play(many)
    assert all(isinstance(each.ended, Finished) for each in played)
    assert playing.counts.searches / playing.counts.batches >= 16
    assert time.monotonic() - begun < 20  # 64 episodes one after the other take 38 s


def test_a_signal_to_stop_cancels_what_is_in_flight() -> None:
    stop = StopSignal()
    futures: list[Future] = []

    class Silent:
        def submit(self, requests: Sequence[Request]) -> Future[list[Outcome]]:
            futures.append(Future())
            stop.requested = True
            return futures[-1]

    found = pool_search(TEXTS, CONFIG)
    playing = AgentRollout(react(), found, Silent(), PlayConfig(), stop)
    with pytest.raises(Stopped):
        playing.play(starts(2))
    assert len(futures) == 2
    assert all(future.cancelled() for future in futures)


def test_a_state_that_does_not_fit_breaks_its_episode_alone() -> None:
    long = Scripted(
        {
            "long": Decomposition((SubQuestion("word " * 80, ("x",)),), ("x",)),
            "Ada Berg": scripted().decompositions["Ada Berg"],
        }
    )
    given = [starts(1)[0], starts(1)[0]._replace(task=Task("long", "?"))]
    first, second = rollout(long).play(given)
    assert isinstance(first.ended, Finished)
    assert isinstance(second.ended, Broken)
    assert second.ended.cause == "too_long"
    assert second.searches == ()


def test_an_agent_that_needs_a_model() -> None:
    with pytest.raises(InputError, match="asks a language model, and the run has none"):
        rollout(react()).play(starts(1))


@pytest.mark.parametrize("fields", [{"attempts": 0}, {"gather": -1.0}])
def test_refusals(fields: dict) -> None:
    with pytest.raises(InputError, match=f"config.agent.{next(iter(fields))} is"):
        PlayConfig(**fields)
