"""Episodes of a language model with tools: tokens in, tokens out, side by side."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from examples.worlds.demonstrations import (
    Demonstration,
    Start,
    Style,
    draw_choices,
    play_styled,
)
from examples.worlds.scripts import bridge_question
from qrag_jax.environments.demonstrations import (
    BRIDGE,
    PASSAGE,
    style_variants,
)
from qrag_jax.environments.episode import (
    Closed,
    Failed,
    Play,
    Speak,
    ToolTask,
)
from qrag_jax.environments.queries import QueryPrompt
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.environments.tools import COMPLETE, GET, RETRIEVE, ToolAgent
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.rollouts.libraries import OwnLibrary
from qrag_jax.rollouts.token_episodes import (
    Speech,
    TokenRollout,
    TokenStart,
    all_sampled,
    encoded,
    scripted_talk,
    styled_episode,
)
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED, Sampled, SampleRequest
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from tests.environments.trying import EXPERT, WorldSearch, tiny_speech, world, world_state

QUESTIONS = [bridge_question(0, "train", index) for index in range(4)]
TASKS = [bridge_task(question) for question in QUESTIONS]
LIBRARY = OwnLibrary(OwnRetriever("bm25"))
AGENT = ToolAgent(prompts.load("bare_question"), top_n=1, most=1, max_turns=4)


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return tiny_speech(tmp_path_factory.mktemp("lm"), turn=200, room=900)


class Told:
    """Says what a function of the ids so far says, letter by letter: not as a tokenizer would."""

    version = "7"

    def __init__(
        self, speech: Speech, say: Callable[[str], str | Failure], *, in_rounds: bool
    ) -> None:
        self.in_rounds, self.asked = in_rounds, list[list[SampleRequest]]()
        self._speech, self._say = speech, say

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        self.asked.append(list(requests))
        futures: list[Future[Sampled | Failure]] = [Future() for _ in requests]

        def answer(future: Future, request: SampleRequest) -> None:
            future.set_result(self._one(request))

        for number, each in enumerate(reversed([*zip(futures, requests, strict=True)])):
            if self.in_rounds:
                answer(*each)
            else:  # the last one first, from threads
                threading.Timer(0.001 * number, answer, each).start()
        return futures

    def _one(self, request: SampleRequest) -> Sampled | Failure:
        said = self._say(self._speech.tokenizer.decode(request.ids))
        if isinstance(said, Failure):
            return said
        tokenizer = self._speech.tokenizer
        ids = [i for letter in said for i in tokenizer(letter, add_special_tokens=False).input_ids]
        ids = [*ids, self._speech.scaffold.stop_ids[0]][: request.most]
        finish = "stop" if ids[-1] == self._speech.scaffold.stop_ids[0] else "length"
        return Sampled(np.array(ids, np.int32), np.arange(len(ids), dtype=np.float32), finish)


def starts(tasks: Sequence[ToolTask], each: int = 1) -> list[TokenStart]:
    return [
        TokenStart(task, np.array([number, member], np.uint32))
        for number, task in enumerate(tasks)
        for member in range(each)
    ]


def expert(text: str) -> str:
    """The expert's next turn after a conversation."""
    (question,) = [each for each in QUESTIONS if each.question in text]
    shown = [part.partition("</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    return script(question).say(shown)


def script(question: Any) -> Demonstration:
    return Demonstration(question, draw_choices(EXPERT, 0, 0))


def rollout(speech: Speech, sampler: Any, agent: ToolAgent = AGENT, **options: Any) -> TokenRollout:
    library = options.pop("library", LIBRARY)
    return TokenRollout(
        agent, sampler, library, speech, stop=options.pop("stop", StopSignal()), **options
    )


@pytest.mark.parametrize("in_rounds", [True, False])
def test_sampled_ids_stay_as_they_are(speech: Speech, in_rounds: bool) -> None:
    sampler = Told(speech, expert, in_rounds=in_rounds)
    played = rollout(speech, sampler).play(starts(TASKS, 2))
    for start, episode in zip(starts(TASKS, 2), played, strict=True):
        assert isinstance(episode.ended, Closed)
        assert episode.ended.tally.searches == 2
        assert episode.status == DONE
        (segment,) = episode.segments
        question = next(q for q in QUESTIONS if q.question == start.task.question)
        talk = scripted_talk(AGENT, start.task, script(question), LIBRARY)
        assert talk.ended == episode.ended
        for number, (turn, (messages, text)) in enumerate(zip(segment, talk.turns, strict=True)):
            assert speech.text(turn.sampled) == text
            canonical = speech.tokenizer(text, add_special_tokens=False).input_ids
            assert turn.sampled.tolist()[:-1] != canonical  # and nobody changed them
            before = segment[number - 1].sampled
            scaffold = speech.scaffold
            observed = scaffold.after(before, messages) if number else scaffold.opening(messages)
            np.testing.assert_array_equal(turn.observed, observed)
            assert turn.version == "7"
    # The ids of each request are those of all turns before it.
    requests = [request for asked in sampler.asked for request in asked]
    whole = np.concatenate([np.r_[t.observed, t.sampled] for t in played[0].segments[0]])
    ours = [r for r in requests if r.key.tolist() == [0, 0]]
    assert len(ours) == 3
    for request in ours:
        np.testing.assert_array_equal(request.ids, whole[: len(request.ids)])
    if in_rounds:
        assert [len(asked) for asked in sampler.asked] == [8, 8, 8]


def test_a_script_is_encoded_as_a_tokenizer_does(speech: Speech) -> None:
    talk = scripted_talk(AGENT, TASKS[0], script(QUESTIONS[0]), LIBRARY)
    episode = encoded(talk, speech)
    ids = np.concatenate([np.r_[t.observed, t.sampled] for t in episode.segments[0]])
    messages = [
        {"role": role, "content": content}
        for before, text in talk.turns
        for role, content in (*before, ("assistant", text))
    ]
    expected = speech.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    assert speech.tokenizer.decode(ids) == expected
    ((turn,),) = all_sampled(episode).segments
    np.testing.assert_array_equal(np.r_[turn.observed, turn.sampled], ids)
    assert len(turn.observed) == 1
    with pytest.raises(ValueError):
        encoded(talk, dataclasses.replace(speech, room=50))


def test_a_failure_is_played_again_and_ends_the_episode(speech: Speech) -> None:
    seen = list[str]()

    def fails_at_first(text: str) -> str | Failure:
        seen.append(text)
        first = QUESTIONS[0].question in text
        dead = QUESTIONS[1].question in text
        if dead or (first and sum(QUESTIONS[0].question in each for each in seen) == 1):
            return Failure("timeout", "no reply within 3 s.")
        return expert(text)

    sampler = Told(speech, fails_at_first, in_rounds=True)
    playing = rollout(speech, sampler)
    one, other, third, _ = playing.play(starts(TASKS))
    assert (one.attempts, one.status) == (2, DONE)
    assert (other.attempts, other.status) == (2, "timeout")
    assert isinstance(other.ended, Failed)
    assert not other.segments
    assert (third.attempts, third.status) == (1, DONE)
    assert playing.counts.failed == 3
    # Another attempt has other draws.
    keys = {
        request.key.tobytes()
        for together in sampler.asked
        for request in together
        if QUESTIONS[1].question in speech.tokenizer.decode(request.ids)
    }
    assert len(keys) == 2

    dead = types.SimpleNamespace(look=lambda asked: [Failure("server", "status 500")] * len(asked))
    sampler = Told(speech, expert, in_rounds=True)
    (episode,) = rollout(speech, sampler, library=dead, attempts=3).play(starts(TASKS[:1]))
    assert (episode.status, episode.attempts) == ("server", 3)


def test_searches_and_openings_share_a_thread(speech: Speech) -> None:
    agent = ToolAgent(prompts.load("bare_question"), tools=(RETRIEVE, GET, COMPLETE))

    def both(text: str) -> str:
        if "Document ID: 4" in text:
            return write_call(ToolCall(COMPLETE, {"final_answer": "x"}), HERMES)
        calls = [ToolCall(GET, {"doc_id": "4"}), ToolCall(GET, {"doc_id": "none"})]
        return "\n".join(write_call(call, HERMES) for call in calls)

    (episode,) = rollout(speech, Told(speech, both, in_rounds=True), agent).play(starts(TASKS[:1]))
    assert isinstance(episode.ended, Closed)
    assert episode.ended.seen == ("4",)
    assert 'no document with the id "none"' in speech.text(episode.segments[0][1].observed)


def test_an_episode_ends_where_its_room_does(speech: Speech) -> None:
    (episode,) = rollout(speech, Told(speech, expert, in_rounds=True)).play(starts(TASKS[:1]))
    (first, second, _) = episode.segments[0]
    before = len(first.observed) + len(first.sampled)
    cases = {
        before - 3: (1, "length"),  # inside the first turn
        before + len(second.observed): (1, "stop"),  # no room for one token more
        before + len(second.observed) + 5: (2, "length"),
    }
    for room, (turns, finish) in cases.items():
        small = dataclasses.replace(speech, room=room)
        (cut,) = rollout(small, Told(small, expert, in_rounds=True)).play(starts(TASKS[:1]))
        assert cut.status == TRUNCATED
        (segment,) = cut.segments
        assert (len(segment), segment[-1].finish) == (turns, finish)
        assert sum(len(t.observed) + len(t.sampled) for t in segment) <= room
    speech = dataclasses.replace(speech, room=len(first.observed))
    with pytest.raises(InputError, match=r"config\.sampling\.room"):
        rollout(speech, Told(speech, expert, in_rounds=True)).play(starts(TASKS[:1]))


def test_a_rewritten_segment_has_other_draws(speech: Speech) -> None:
    """Its positions were drawn at before; the turns of one segment lie at others."""

    class Asks:
        def play(self, task: ToolTask) -> Play:
            yield Speak((("user", task.question),))
            yield Speak((("tool", "nothing"),))
            yield Speak((("user", "Again."),))
            return Closed("")

    speech = dataclasses.replace(
        speech, scaffold=dataclasses.replace(speech.scaffold, append_only=False)
    )
    sampler = Told(speech, lambda _: "x", in_rounds=True)
    (episode,) = rollout(speech, sampler, Asks()).play(starts(TASKS[:1]))  # type: ignore[arg-type]
    assert [len(segment) for segment in episode.segments] == [2, 1]
    first, second, third = (request.key.tolist() for (request,) in sampler.asked)
    assert first == second != third


def test_a_signal_ends_the_play(speech: Speech) -> None:
    stop = StopSignal()
    stop.requested = True
    with pytest.raises(Stopped):
        rollout(speech, Told(speech, expert, in_rounds=True), stop=stop).play(starts(TASKS))


# ---------------------------------------------------------------- demonstrations of query writing


def test_a_demonstration_is_what_a_policy_would_sample(speech: Speech) -> None:
    """Each hop is one turn; all of its query trains, and nothing else."""
    question = world(1)[0]
    prompt = QueryPrompt(prompts.load("bare_query"), style_variants())
    start = Start(world_state(question), question, (Style(BRIDGE, True), Style(PASSAGE, False)))
    (hops,) = play_styled(WorldSearch(world(4)), [start])
    episodes = [styled_episode(hop, prompt, speech) for hop in hops]
    for hop, episode in zip(hops, episodes, strict=True):
        ((turn,),) = episode.segments
        opening = speech.scaffold.opening(prompt.messages(hop.state))
        np.testing.assert_array_equal(turn.observed, opening)
        ids = speech.tokenizer(hop.query, add_special_tokens=False).input_ids
        assert turn.sampled.tolist() == [*ids, speech.scaffold.stop_ids[0]]
    marked, bare = (speech.tokenizer.decode(e.segments[0][0].observed) for e in episodes)
    assert "style: bridge" in marked
    assert "style:" not in bare
    for wrong, named in (({"room": 60}, "room"), ({"turn": 5}, r"config\.styles\.most_words")):
        with pytest.raises(InputError, match=named):
            [styled_episode(hop, prompt, dataclasses.replace(speech, **wrong)) for hop in hops]
