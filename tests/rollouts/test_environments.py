"""Environments that call their model: turns by messages, a server of turns, and lost processes."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost, ProcessSpec
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.chat_rendering import ChatRenderer, TextLost
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.models.tiny_lm import CHAT_TEMPLATE, END, trained_tokenizer
from qrag_jax.rollouts import environment_play
from qrag_jax.rollouts.called_turns import EpisodeCalls, Over, TurnLimits
from qrag_jax.rollouts.environment_play import (
    EnvironmentPlay,
    Lost,
    PlayedUnit,
    PlaySettings,
    Scored,
    Unit,
    hands_over,
)
from qrag_jax.rollouts.generate_server import SESSION, GenerateServer, Wanted
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_sampler import LENGTH, STOP, Sampled, SampleRequest
from tests.environments.verifiers_pythons import PACKAGES, PYTHON, needs_verifiers

TOKENIZER = PreTrainedTokenizerFast(
    tokenizer_object=trained_tokenizer(
        ["system user assistant tool_response a few words to learn from, and numbers 0 1 2"], 400
    ),
    eos_token=END,
    chat_template=CHAT_TEMPLATE,
    clean_up_tokenization_spaces=False,
)
RENDERER = ChatRenderer(TOKENIZER, HERMES)


class ScriptedSampler:
    """Says what a function makes of the text so far; every token has a log-probability of its own.

    Attributes:
        drawn: the ids before each turn, and the turn.
    """

    in_rounds = True
    version = "v"

    def __init__(self, say: Callable[[str], str]) -> None:
        self.drawn: list[tuple[np.ndarray, Sampled]] = []
        self.keys: list[tuple[int, ...]] = []
        self._say, self._count = say, 0

    def sampled(self, request: SampleRequest) -> Sampled:
        before = TOKENIZER.decode(request.ids.tolist(), skip_special_tokens=False)
        text = self._say(before) + END
        ids = np.array(TOKENIZER(text, add_special_tokens=False).input_ids, np.int32)
        finish = STOP if len(ids) <= request.most else LENGTH
        ids = ids[: request.most]
        first = self._count
        self._count += len(ids)
        log_probs = -(np.arange(first, self._count, dtype=np.float32) + 1) / 1000
        turn = Sampled(ids, log_probs, finish)
        self.drawn.append((request.ids, turn))
        self.keys.append(tuple(request.key.tolist()))
        return turn

    def submit(self, requests: Sequence[SampleRequest]) -> list[Future[Sampled | Failure]]:
        futures: list[Future[Sampled | Failure]] = [Future() for _ in requests]
        for future, request in zip(futures, requests, strict=True):
            future.set_result(self.sampled(request))
        return futures

    def check(self, segments: tuple) -> None:
        """What trains is what was drawn, each turn once, behind the ids that the sampler saw."""
        drawn = {turn.log_probs.tobytes(): (ids, turn) for ids, turn in self.drawn}
        for segment in segments:
            row = np.zeros(0, np.int32)
            for turn in segment:
                row = np.concatenate([row, turn.observed])
                context, ours = drawn.pop(turn.log_probs.tobytes())
                np.testing.assert_array_equal(row, context)
                np.testing.assert_array_equal(turn.sampled, ours.ids)
                assert (turn.finish, turn.version) == (ours.finish, "v")
                row = np.concatenate([row, turn.sampled])
        assert not drawn


# ---------------------------------------------------------------- calls by messages become turns

LIMITS = TurnLimits(turn=200, room=4000, turns=50, tokens=0, temperature=1.0)
CALL = '<tool_call>\n{"name": "look", "arguments": {"for": "it"}}\n</tool_call>'
FUNCTION = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
LOOK = {"type": "function", "function": FUNCTION}


def asked(messages: list[dict[str, Any]], *tools: dict[str, Any], **sampling: Any) -> Any:
    return {"messages": messages, "tools": [*tools], "sampling": sampling}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Conversation:
    """An episode whose turns are given one after the other."""

    def __init__(self, **limits: int) -> None:
        key = np.array([1, 2], np.uint32)
        self.calls = EpisodeCalls(RENDERER, dataclasses.replace(LIMITS, **limits), key)
        self.turns: list[str] = []
        self.sampler = ScriptedSampler(lambda _: self.turns.pop(0))
        self._number = 0

    def call(self, messages: list[dict[str, Any]], text: str, *tools: Any) -> dict[str, Any]:
        """Asks, samples, and gives the assistant's message as an environment keeps it."""
        self._number += 1
        request = self.calls.ask(self._number, asked(messages, *tools))
        assert isinstance(request, SampleRequest)
        self.turns.append(text)
        reply = self.calls.take(self._number, self.sampler.sampled(request), "v")
        message: dict[str, Any] = {"role": "assistant", "content": reply["content"]}
        if reply["tool_calls"]:
            message["tool_calls"] = reply["tool_calls"]
        return message

    def check(self) -> tuple[Any, ...]:
        """Each turn trains once, behind the ids that the sampler saw; returns the segments."""
        segments = self.calls.segments()
        self.sampler.check(segments)
        trained = sum(len(turn.sampled) for segment in segments for turn in segment)
        assert trained == self.calls.sampled_tokens()
        return segments


def test_a_conversation_with_a_tool_is_one_segment() -> None:
    talk = Conversation()
    messages = [{"role": "system", "content": "S"}, user("Q")]
    said = talk.call(messages, f"I look. {CALL}", LOOK)
    assert said["content"] == "I look."
    (call,) = said["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"for": "it"})
    tool = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
    talk.call([*messages, said, tool], "done", LOOK)
    (segment,) = talk.check()
    assert len(segment) == 2
    text = TOKENIZER.decode(np.concatenate([segment[0].observed, segment[0].sampled]).tolist())
    assert '"name": "look"' in text  # the template shows no tools, so the system's message does
    assert CALL in text


def test_which_calls_begin_a_segment() -> None:
    branched = Conversation()
    first = branched.call([user("Q")], "one")
    for text in ("left", "right", "right"):
        branched.call([user("Q"), first, user("and?")], text)
    assert [len(segment) for segment in branched.check()] == [2, 1, 1]
    # Turns that are no part of the episode train nothing.
    judged = Conversation()
    first = judged.call([user("Q")], "one")
    judged.call([user("Judge: is one right?")], "yes")
    judged.call([user("Q"), first, user("and?")], "two")
    (segment,) = judged.calls.segments({1, 3})
    assert len(segment) == 2
    assert judged.calls.sampled_tokens({1, 3}) == len(judged.sampler.drawn[1][1].ids)


ACTIONS = st.sampled_from(["go on", "branch", "rewrite", "system", "fresh", "tools", "again"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 20)), min_size=1, max_size=12))
def test_whatever_an_environment_does_each_token_trains_once(
    actions: list[tuple[str, int]],
) -> None:
    talk, states, tools = Conversation(), [[user("Q")]], ()
    for number, (action, choice) in enumerate(actions):
        messages = [*states[choice % len(states) if action == "branch" else -1]]
        if action == "rewrite":
            messages = [
                {**item, "content": "rewritten"} if item["role"] == "assistant" else item
                for item in messages
            ]
        elif action == "system":
            head = {"role": "system", "content": f"system {choice % 3}"}
            messages = [head, *(item for item in messages if item["role"] != "system")]
        elif action == "fresh":
            messages = [user(f"Q{choice}")]
        elif action == "tools":
            tools = () if tools else (LOOK,)
        said = talk.call(messages, CALL if choice % 4 == 0 else f"turn {number}", *tools)
        if action == "again":
            talk.call(messages, f"again {number}", *tools)
        answer = (
            {"role": "tool", "tool_call_id": "x", "content": f"result {choice}"}
            if "tool_calls" in said
            else user(f"go on {choice}")
        )
        states.append([*messages, said, answer])
    talk.check()


def test_draws_depend_on_what_is_before_and_on_how_often_it_came() -> None:
    talk, other = Conversation(), Conversation()
    for question in "QQR":
        talk.call([user(question)], "same")
    other.call([user("R")], "other")
    assert len(set(talk.sampler.keys)) == 3
    assert other.sampler.keys[0] == talk.sampler.keys[2]


@pytest.mark.parametrize("limit", [{"turns": 1}, {"tokens": 5}, {"room": 25}])
def test_limits_of_turns_tokens_and_room(limit: dict[str, int]) -> None:
    talk = Conversation(**limit)
    talk.call([user("Q")], "more than five tokens are said")
    assert ("tokens" in limit) <= (talk.calls.sampled_tokens() == 5)
    assert isinstance(talk.calls.ask(9, asked([user("Q " * 20)])), Over)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.5}, {"extra_body": {"top_k": 5}}, {"logit_bias": {"3": 1}}]
)
def test_another_distribution_is_refused(sampling: dict[str, Any]) -> None:
    same = {"temperature": 1.0, "top_p": 1.0, "n": 1, "max_tokens": 3, "extra_body": {}}
    request = Conversation().calls.ask(1, asked([user("Q")], **same))
    assert isinstance(request, SampleRequest)
    assert request.most == 3
    assert isinstance(Conversation().calls.ask(1, asked([user("Q")], **sampling)), Failure)


def test_texts_that_have_no_ids_are_refused_and_a_mark_in_a_text_ends_no_turn() -> None:
    for content in ("half a pair \ud800", [{"type": "image_url", "image_url": {"url": "x"}}]):
        with pytest.raises(TextLost):
            RENDERER.opening([{"role": "user", "content": content}])
    ids = RENDERER.opening([user("before <|im_end|> after")])
    assert ids.tolist().count(TOKENIZER.eos_token_id) == 1


def test_nodes_of_a_trace_are_the_same_forest() -> None:
    """Two branches behind one sampled node, as `trace.branches` has them."""
    talk = Conversation()
    first = talk.call([user("Q")], "one")
    talk.call([user("Q"), first, user("and?")], "left")
    talk.call([user("Q"), first, user("and?")], "right")
    (a_ids, a), (left_ids, left), (_, right) = talk.sampler.drawn
    between = left_ids[len(a_ids) + len(a.ids) :]

    def node(parent: int, read: np.ndarray, sampled: np.ndarray) -> dict[str, Any]:
        mask = [False] * len(read) + [True] * len(sampled)
        ids = [*read.tolist(), *sampled.tolist()]
        return {"parent": parent, "ids": ids, "mask": mask, "trains": bool(len(sampled))}

    nodes = [node(-1, a_ids, a.ids), node(0, between, left.ids), node(0, between, right.ids)]
    nodes.append(node(1, between, np.zeros(0, np.int32)))
    kept, segments = talk.calls.of_nodes(nodes)
    assert kept == {1, 2, 3}
    assert [[turn.sampled.tolist() for turn in item] for item in segments] == [
        [a.ids.tolist(), right.ids.tolist()],
        [left.ids.tolist()],
    ]
    np.testing.assert_array_equal(segments[1][0].log_probs, left.log_probs)
    nodes[2]["ids"] = [*nodes[2]["ids"][:-1], 7]  # not sampled by the model
    with pytest.raises(ValueError):
        talk.calls.of_nodes(nodes)


# ---------------------------------------------------------------- the server of turns

ROOM = 64
DRAWN = Sampled(np.array([5, 9, 311], np.int32), np.array([-0.25, -1.5, -0.1], np.float32), STOP)
GENERATE = "/inference/v1/generate"


class Turns:
    """A server, and what it was asked for."""

    def __init__(self) -> None:
        self.wanted: list[Wanted] = []
        self.answer: Sampled | Failure = DRAWN

    def want(self, wanted: Wanted) -> None:
        self.wanted.append(wanted)
        wanted.turn.set_result(self.answer)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        root = self.server.url.removesuffix("/v1")
        ours = {"Authorization": f"Bearer {self.server.key}", SESSION: "7-ab", **headers}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{root}{path}", data=data, headers=ours)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:  # noqa: S310
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture
def turns() -> Iterator[Turns]:
    result = Turns()
    with GenerateServer("policy", ROOM, RENDERER, result.want) as result.server:
        yield result


def test_a_turn_has_the_shape_that_verifiers_checks(turns: Turns) -> None:
    sampling = {"temperature": 1.0, "max_tokens": 3, "stop_token_ids": [*RENDERER.stop_ids()]}
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": sampling}
    status, reply = turns.ask(GENERATE, body)
    (choice,) = reply["choices"]
    assert (status, reply["model"], choice["finish_reason"]) == (200, "policy", "stop")
    assert choice["token_ids"] == DRAWN.ids.tolist()
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    tokens, log_probs = zip(*((e["token"], e["logprob"]) for e in choice["logprobs"]["content"]))
    assert tokens == ("token_id:5", "token_id:9", "token_id:311")
    np.testing.assert_array_equal(np.array(log_probs, np.float32), DRAWN.log_probs)
    (wanted,) = turns.wanted
    assert (wanted.episode, wanted.ids.tolist()) == (7, [1, 2, 3])
    assert wanted.sampling == {"temperature": 1.0, "max_tokens": 3}
    _, reply = turns.ask("/v1/models")
    assert [(card["id"], card["max_model_len"]) for card in reply["data"]] == [("policy", ROOM)]
    turns.answer = Failure("server", "the sampler is down")
    assert turns.ask(GENERATE, {"model": "policy", "token_ids": [1]})[0] == 503
    assert turns.ask("/nothing", {})[0] == 404


@pytest.mark.parametrize(
    ("changes", "headers", "status"),
    [
        ({"model": "another"}, {}, 404),
        ({"token_ids": []}, {}, 400),
        ({"token_ids": [1, -2]}, {}, 400),
        ({"token_ids": [1] * 64}, {}, 400),
        ({"sampling_params": {"stop_token_ids": [3]}}, {}, 400),
        ({}, {SESSION: "ab"}, 400),
        ({}, {"Authorization": "Bearer wrong"}, 401),
    ],
)
def test_what_cannot_be_sampled_is_refused(
    turns: Turns, changes: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    body = {"model": "policy", "token_ids": [1], **changes}
    assert turns.ask(GENERATE, body, **headers)[0] == status
    assert not turns.wanted


def test_messages_become_ids_as_for_v0(turns: Turns) -> None:
    messages = [user("Q")]
    _, reply = turns.ask("/render/opening", {"messages": messages, "tools": None})
    assert reply["token_ids"] == RENDERER.opening(messages).tolist()
    said = TOKENIZER("yes<|im_end|>", add_special_tokens=False).input_ids
    follows = [{"role": "tool", "tool_call_id": "x", "content": "found"}]
    _, reply = turns.ask("/render/after", {"token_ids": said, "messages": follows})
    after = RENDERER.after(np.array(said, np.int32), follows)
    assert after is not None
    assert reply["token_ids"] == after.tolist()
    assert turns.ask("/render/spoken", {"token_ids": said})[1] == {"content": "yes", "calls": []}
    broken = {"messages": [{"role": "user", "content": [{}]}]}
    assert turns.ask("/render/opening", broken)[0] == 400


# ---------------------------------------------------------------- an environment's process


class NoStop:
    def check(self) -> None:
        return None


def units(*tasks: int, members: int = 1) -> list[Unit]:
    return [
        Unit("train", task, tuple(np.array([task, n], np.uint32) for n in range(members)))
        for task in tasks
    ]


class Plays:
    """The scripted environment, and a scripted sampler."""

    def __init__(self, folder: Path, does: str, **more: Any) -> None:
        arguments = {"does": does, "marks": str(folder / "mark")}
        script = str(Path(__file__).with_name("scripted_environment.py"))
        spec = ProcessSpec(script, folder / "log", {"id": "scripted", "arguments": arguments})
        self.process = EnvironmentProcess(spec)
        self.sampler: Any = ScriptedSampler(lambda text: f"said {len(text)}")
        limits = TurnLimits(turn=50, room=400, turns=4, tokens=0, temperature=1.0)
        options = {"seconds": 0.0, "attempts": 2, "side_by_side": 8, **more}
        self.counts, self.settings = Counts(), PlaySettings(limits, **options)

    def play(self, *tasks: int, members: int = 1, **more: Any) -> list[PlayedUnit]:
        ours = dataclasses.replace(self.settings, **more)
        playing = EnvironmentPlay(self.process, RENDERER, ours, self.counts)
        return playing.play(units(*tasks, members=members), self.sampler, NoStop())


@pytest.fixture
def plays(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Plays]:
    does, more = request.param if isinstance(request.param, tuple) else (request.param, {})
    result = Plays(tmp_path, does, **more)
    yield result
    result.process.end()


def doing(*names: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("plays", names, indirect=True)


@doing("chat")
def test_episodes_are_played_side_by_side(plays: Plays) -> None:
    result = plays.play(0, 1, 2, 3)
    for task, unit in enumerate(result):
        (episode,) = unit.episodes
        assert isinstance(episode.ended, Scored)
        (segment,) = episode.segments
        assert len(segment) == 2
        reward = (len(segment[1].sampled) + task) % 5 / 4
        assert (episode.ended.reward, episode.ended.parts) == (reward, {"half": reward / 2})
        assert f"result {task}" in TOKENIZER.decode(segment[1].observed.tolist())
    assert plays.counts.turns == 8
    assert plays.counts.batches <= 4  # at best 2
    assert plays.process.starts == 1
    # A draw does not depend on what is played beside it.
    keys = set(plays.sampler.keys)
    plays.sampler.keys.clear()
    plays.play(3, 2, 1, 0, side_by_side=2)
    assert set(plays.sampler.keys) == keys
    assert len(keys) == 8
    # A turn that cannot be sampled fails its episode.
    plays.sampler.sampled = lambda request: Failure("server", "it is down")
    assert plays.play(0)[0].ended == Lost("server", "it is down")


@doing("fail", "die", "grouped")
def test_what_failed_is_played_again(plays: Plays, request: pytest.FixtureRequest) -> None:
    does = request.node.callspec.id
    if does == "grouped":  # a group is one unit
        (unit,) = plays.play(2, members=3)
        assert (type(unit.ended), len(unit.episodes)) == (Scored, 3)
        return
    result = plays.play(0, 1)
    assert all(isinstance(unit.ended, Scored) for unit in result)
    if does == "die":  # with its process
        assert (plays.process.starts, plays.counts.lost) == (2, 1)
    else:
        assert [unit.episodes[0].attempts for unit in result] == [2, 2]
        assert plays.counts.failed == 2


@doing("endless", "raised", "no_number", ("hang", {"seconds": 0.2}))
def test_a_failure_is_a_value(
    plays: Plays, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_play, "_GRACE", 0.2)
    (unit,) = plays.play(0)
    assert isinstance(unit.ended, Lost)
    causes = {"plays3": "timeout"}
    assert unit.ended.cause == causes.get(request.node.callspec.id, request.node.callspec.id)
    assert unit.episodes[0].attempts == 2


@doing(("chat", {"seconds": 0.2, "attempts": 1}))
def test_a_sampler_that_takes_long_is_no_silence(
    plays: Plays, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is compiled, or a large model, may take longer than an environment may."""
    monkeypatch.setattr(environment_play, "_GRACE", 1.0)

    def submit(requests: Any) -> Any:
        time.sleep(1.5)
        return ScriptedSampler.submit(plays.sampler, requests)

    plays.sampler.submit = submit
    (unit,) = plays.play(0)
    assert isinstance(unit.ended, Scored)
    assert plays.counts.lost == 0


@doing("served")
def test_the_model_speaks_as_soon_as_it_is_asked(plays: Plays, tmp_path: Path) -> None:
    """Its time is no environment's, also while it samples for others and hears nothing."""
    heard = []

    def submit(requests: Any) -> Any:
        ends = time.monotonic() + 10
        while len([*tmp_path.glob("mark*")]) < 2 and time.monotonic() < ends:
            time.sleep(0.01)
        heard.append(len([*tmp_path.glob("mark*")]))
        return ScriptedSampler.submit(plays.sampler, requests)

    plays.sampler.submit = submit
    with GenerateServer("policy", 400, RENDERER, hands_over(plays.process)) as server:
        result = plays.play(0, 1, served={"url": server.url, "key": server.key})
    assert all(isinstance(unit.ended, Scored) for unit in result)
    assert heard[0] == 2


@doing("refuse", "changes")
def test_an_environment_that_cannot_be_used_is_refused(
    plays: Plays, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id == "changes":  # other tasks at another start
        plays.play(0)
        plays.process.end()
    with pytest.raises(InputError):
        plays.play(0)


def test_a_process_that_cannot_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(ProcessLost, match="it ends at once"):
        Plays(tmp_path, "end").process.start(lambda: None)
    spec = ProcessSpec(str(tmp_path / "nothing"), tmp_path / "log", {})
    with pytest.raises(InputError, match="nothing"):
        EnvironmentProcess(spec).start(lambda: None)


# ---------------------------------------------------------------- verifiers itself


def counts_letters(text: str) -> str:
    """A model that calls the tool, then answers with what it said."""
    if "tool_response" in text.rpartition("<|im_end|>\n<|im_start|>user")[2]:
        said = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        return f"It has {said} letters."
    word = text.rpartition("How many letters has ")[2].partition("?")[0]
    call = f'{{"name": "count_letters", "arguments": {{"word": "{word}"}}}}'
    return f"I count.\n<tool_call>\n{call}\n</tool_call>"


@needs_verifiers
def test_a_tool_of_verifiers_is_called_and_the_rubric_is_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    limits = {"seconds": 60.0, "turns": 5, "tokens": 0, "turn_tokens": 200}
    fields = {"id": "made-v1", "arguments": {"size": 40}, "model": "policy", "limits": limits}
    fields |= {"tasks": 100, "harness": "direct", "renderer": None}
    process = EnvironmentProcess(ProcessSpec(PYTHON, tmp_path / "verifiers.log", fields))
    counts = Counts()

    def play(say: Callable[[str], str], *tasks: int) -> tuple[list[PlayedUnit], ScriptedSampler]:
        sampler = ScriptedSampler(say)
        turns = TurnLimits(turn=200, room=1500, turns=5, tokens=0, temperature=1.0)
        with GenerateServer("policy", 1500, RENDERER, hands_over(process)) as server:
            served = {"url": server.url, "key": server.key, "temperature": 1.0}
            served["tokenizer"] = str(tmp_path / "tokenizer")
            served["stop_ids"] = [*RENDERER.stop_ids()]
            playing = EnvironmentPlay(
                process, RENDERER, PlaySettings(turns, 60.0, 1, 8, served), counts
            )
            result = playing.play(units(*tasks), sampler, NoStop())
            # The server has a thread for each open connection; they do not grow with episodes.
            names = [thread.name for thread in threading.enumerate()]
            assert sum("process_request_thread" in name for name in names) <= 8
            return result, sampler

    try:
        result, sampler = play(counts_letters, 0, 3)
        sampler.check(tuple(s for unit in result for s in unit.episodes[0].segments))
        for unit in result:
            (episode,) = unit.episodes
            assert isinstance(episode.ended, Scored), episode.ended
            assert (episode.ended.reward, episode.ended.parts["right"]) == (1.0, 1.0)
            assert not episode.ended.truncated
            assert [len(segment) for segment in episode.segments] == [2]
        assert counts.outside == 0
        # A wrong answer, many times; and an agent that always calls is stopped.
        for unit in play(lambda text: "I do not know", *range(40))[0]:
            assert unit.ended.reward == 0.0
        ((unit,), _) = play(lambda text: counts_letters("How many letters has abc?"), 0)
        assert unit.ended.truncated
        assert sum(len(segment) for segment in unit.episodes[0].segments) == 5
    finally:
        process.end()
