"""Environments that call their model: turns by ids, a server of turns, and lost processes."""

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
from transformers import PreTrainedTokenizerFast

from qrag_jax.environments.episode import Failed
from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessLost
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.scaffolds import ChatRenderer, TextLost
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.models.first_language_model import CHAT_TEMPLATE, END, trained_tokenizer
from qrag_jax.rollouts import environment_play
from qrag_jax.rollouts.environment_play import (
    SESSION,
    Call,
    EnvironmentPlay,
    EnvironmentStart,
    EpisodeCalls,
    GenerateServer,
    PlaySettings,
    Scored,
    Wanted,
    hands_over,
)
from qrag_jax.rollouts.schedule import Counts
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import LENGTH, STOP, Sampled, SampleRequest
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


# ---------------------------------------------------------------- the turns of an episode

LIMITS = PlaySettings(turn=200, room=4000, turns=50, tokens=0, temperature=1.0)
KEY = np.array([1, 2], np.uint32)


def said(calls: EpisodeCalls, before: Sequence[int], *drawn: int) -> Call:
    """A turn of these tokens behind those."""
    call = calls.ask(np.array(before, np.int32), {})
    assert isinstance(call, Call)
    log_probs = -np.arange(1, len(drawn) + 1, dtype=np.float32) / drawn[0]
    call.sampled = Sampled(np.array(drawn, np.int32), log_probs, STOP)
    return call


def node(parent: int, read: Sequence[int], *sampled: int, trains: bool = True) -> dict[str, Any]:
    mask = [False] * len(read) + [True] * len(sampled)
    return {"parent": parent, "ids": [*read, *sampled], "mask": mask, "trains": trains}


def test_nodes_of_a_trace_become_segments() -> None:
    """Two branches behind one sampled node; a judge that asks the same model trains nothing."""
    calls = EpisodeCalls(LIMITS, KEY)
    said(calls, [1, 2], 20, 21)
    left, _ = said(calls, [1, 2, 20, 21, 3], 30), said(calls, [9], 50, 51, 52)
    said(calls, [1, 2, 20, 21, 3], 30)  # the same ids were drawn twice, and train twice
    nodes = [node(-1, [1, 2], 20, 21), node(0, [3], 30), node(0, [3], 30), node(1, [4])]
    nodes.append(node(-1, [9], 50, 51, 52, trains=False))
    segments, outside = calls.of_nodes(nodes)
    assert outside == 3
    found = [[(t.observed.tolist(), t.sampled.tolist()) for t in item] for item in segments]
    assert found == [[([1, 2, 20, 21, 3], [30])], [([1, 2], [20, 21]), ([3], [30])]] or found == [
        [([1, 2], [20, 21]), ([3], [30])],
        [([1, 2, 20, 21, 3], [30])],
    ]
    assert left.sampled is not None
    np.testing.assert_array_equal(segments[1][-1].log_probs, left.sampled.log_probs)
    nodes[2] = node(0, [3], 7)  # not sampled by the model
    with pytest.raises(ValueError):
        calls.of_nodes(nodes)
    # Of an episode without nodes each turn is a segment.
    assert [len(segment) for segment in calls.segments()] == [1, 1, 1, 1]


def test_draws_depend_on_what_is_before_and_on_how_often_it_came() -> None:
    calls, other = EpisodeCalls(LIMITS, KEY), EpisodeCalls(LIMITS, KEY)
    keys = [said(calls, before, 5).request.key.tolist() for before in ([1], [1], [2])]
    assert len({*map(tuple, keys)}) == 3
    assert said(other, [2], 6).request.key.tolist() == keys[2]


@pytest.mark.parametrize("limit", [{"turns": 1}, {"tokens": 3}, {"room": 25}])
def test_limits_of_turns_tokens_and_room(limit: dict[str, int]) -> None:
    calls = EpisodeCalls(dataclasses.replace(LIMITS, **limit), KEY)
    call = said(calls, [1] * 20, 4, 5, 6)
    assert call.request.most == {"turns": 200, "tokens": 3, "room": 5}[next(iter(limit))]
    assert isinstance(calls.ask(np.ones(25, np.int32), {}), Failure)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.5}, {"extra_body": {"top_k": 5}}, {"logit_bias": {"3": 1}}]
)
def test_another_distribution_is_refused(sampling: dict[str, Any]) -> None:
    calls, ids = EpisodeCalls(LIMITS, KEY), np.ones(2, np.int32)
    same = {"temperature": 1.0, "top_p": 1.0, "n": 1, "max_tokens": 3, "extra_body": {}}
    call = calls.ask(ids, same)
    assert isinstance(call, Call)
    assert call.request.most == 3
    assert isinstance(calls.ask(ids, sampling), Failure)


def test_texts_that_have_no_ids_are_refused_and_a_mark_in_a_text_ends_no_turn() -> None:
    for content in ("half a pair \ud800", [{"type": "image_url", "image_url": {"url": "x"}}]):
        with pytest.raises(TextLost):
            RENDERER.opening([{"role": "user", "content": content}])
    ids = RENDERER.opening([{"role": "user", "content": "before <|im_end|> after"}])
    assert ids.tolist().count(TOKENIZER.eos_token_id) == 1


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


def test_a_turn_has_the_shape_that_verifiers_checks_or_is_refused(turns: Turns) -> None:
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
    del turns.wanted[1:]
    for changes, headers, status in (
        ({"model": "another"}, {}, 404),
        ({"token_ids": [1, -2]}, {}, 400),
        ({"token_ids": [1] * 64}, {}, 400),
        ({"sampling_params": {"stop_token_ids": [3]}}, {}, 400),
        ({}, {SESSION: "ab"}, 400),
        ({}, {"Authorization": "Bearer wrong"}, 401),
    ):
        given = {"model": "policy", "token_ids": [1], **changes}
        assert turns.ask(GENERATE, given, **headers)[0] == status
    assert turns.wanted == [wanted]


def test_messages_become_ids(turns: Turns) -> None:
    messages = [{"role": "user", "content": "Q"}]
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


def starts(*tasks: int) -> list[EnvironmentStart]:
    return [EnvironmentStart("train", task, np.array([task, 0], np.uint32)) for task in tasks]


class Plays:
    """The scripted environment, and a scripted sampler."""

    def __init__(self, folder: Path, does: str, **more: Any) -> None:
        arguments = {"does": does, "marks": str(folder / "mark")}
        script = str(Path(__file__).with_name("scripted_environment.py"))
        fields = {"id": "scripted", "arguments": arguments}
        self.process = EnvironmentProcess(script, folder / "log", fields)
        self.sampler: Any = ScriptedSampler(lambda text: f"said {len(text)}")
        limits: dict[str, Any] = {"turn": 50, "room": 400, "turns": 4, "tokens": 0}
        options = {"temperature": 1.0, "attempts": 2, "side_by_side": 8, **more}
        self.counts, self.settings = Counts(), PlaySettings(**limits, **options)

    def play(self, *tasks: int, **more: Any) -> list[TokenEpisode]:
        with GenerateServer("policy", 400, RENDERER, hands_over(self.process)) as server:
            served = {"url": server.url, "key": server.key}
            settings = dataclasses.replace(self.settings, served=served, **more)
            playing = EnvironmentPlay(self.process, settings, self.counts)
            return playing.play(starts(*tasks), self.sampler, NoStop())


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
    for task, episode in enumerate(result):
        assert isinstance(episode.ended, Scored)
        (segment,) = episode.segments
        assert len(segment) == 2
        reward = (len(segment[1].sampled) + task) % 5 / 4
        assert (episode.ended.reward, episode.ended.parts) == (reward, {"half": reward / 2})
        assert f"result {task}" in TOKENIZER.decode(segment[1].observed.tolist())
    plays.sampler.check(tuple(segment for episode in result for segment in episode.segments))
    assert plays.counts.turns == 8
    assert plays.counts.batches <= 6  # at best 2
    assert plays.process.starts == 1
    # A draw does not depend on what is played beside it.
    keys = set(plays.sampler.keys)
    plays.sampler.keys.clear()
    plays.play(3, 2, 1, 0, side_by_side=2)
    assert set(plays.sampler.keys) == keys
    assert len(keys) == 8
    # A turn that cannot be sampled fails its episode.
    plays.sampler.sampled = lambda request: Failure("server", "it is down")
    assert plays.play(0)[0].ended == Failed("connection", "it is down")


@doing("fail", "die")
def test_what_failed_is_played_again(plays: Plays, request: pytest.FixtureRequest) -> None:
    result = plays.play(0, 1)
    assert all(isinstance(episode.ended, Scored) for episode in result)
    if request.node.callspec.id == "die":  # with its process
        assert (plays.process.starts, plays.counts.lost) == (2, 1)
    else:
        assert [episode.attempts for episode in result] == [2, 2]
        assert plays.counts.failed == 2


@doing("endless", "raised", "no_number", ("hang", {"seconds": 0.2}))
def test_a_failure_is_a_value(
    plays: Plays, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_play, "_GRACE", 0.2)
    (episode,) = plays.play(0)
    assert isinstance(episode.ended, Failed)
    name = request.node.callspec.id
    assert episode.ended.cause == {"endless": "connection", "plays3": "timeout"}.get(name, name)
    assert ("config.env.max_turns" in episode.ended.message) == (name == "endless")
    assert episode.attempts == 2


@doing(("late", {"seconds": 0.2, "attempts": 1}))
def test_the_models_time_is_no_environments(
    plays: Plays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks as soon as it is asked, also while it samples for others and hears nothing; and
    a program that is compiled, or a large model, may take longer than an environment may."""
    monkeypatch.setattr(environment_play, "_GRACE", 1.0)
    heard = []

    def submit(requests: Any) -> Any:
        ends = time.monotonic() + 10
        while len([*tmp_path.glob("mark*")]) < 2 and time.monotonic() < ends:
            time.sleep(0.01)
        heard.append(len([*tmp_path.glob("mark*")]))
        time.sleep(1.5 * (len(heard) == 1))
        return ScriptedSampler.submit(plays.sampler, requests)

    plays.sampler.submit = submit
    assert all(isinstance(episode.ended, Scored) for episode in plays.play(0, 1))
    assert heard[0] == 2
    assert plays.counts.lost == 0


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
    nothing = EnvironmentProcess(str(tmp_path / "nothing"), tmp_path / "log", {})
    with pytest.raises(InputError, match="nothing"):
        nothing.start(lambda: None)


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
    process = EnvironmentProcess(PYTHON, tmp_path / "verifiers.log", fields)
    counts = Counts()

    def play(say: Callable[[str], str], *tasks: int) -> tuple[list[TokenEpisode], ScriptedSampler]:
        sampler = ScriptedSampler(say)
        turns = PlaySettings(turn=200, room=1500, turns=5, tokens=0, temperature=1.0)
        with GenerateServer("policy", 1500, RENDERER, hands_over(process)) as server:
            served = {"url": server.url, "key": server.key, "temperature": 1.0}
            served["tokenizer"] = str(tmp_path / "tokenizer")
            served["stop_ids"] = [*RENDERER.stop_ids()]
            settings = dataclasses.replace(turns, seconds=60.0, side_by_side=8, served=served)
            playing = EnvironmentPlay(process, settings, counts)
            result = playing.play(starts(*tasks), sampler, NoStop())
            # The server has a thread for each open connection; they do not grow with episodes.
            names = [thread.name for thread in threading.enumerate()]
            assert sum("process_request_thread" in name for name in names) <= 8
            return result, sampler

    try:
        result, sampler = play(counts_letters, 0, 3)
        sampler.check(tuple(s for episode in result for s in episode.segments))
        for episode in result:
            assert isinstance(episode.ended, Scored), episode.ended
            assert (episode.ended.reward, episode.ended.parts["right"]) == (1.0, 1.0)
            assert not episode.ended.tally.truncated
            assert [len(segment) for segment in episode.segments] == [2]
        assert counts.outside == 0
        # A wrong answer, many times; and an agent that always calls is stopped.
        for episode in play(lambda text: "I do not know", *range(40))[0]:
            assert episode.ended.reward == 0.0
        ((episode,), _) = play(lambda text: counts_letters("How many letters has abc?"), 0)
        assert episode.ended.tally.truncated
        assert sum(len(segment) for segment in episode.segments) == 5
    finally:
        process.end()
