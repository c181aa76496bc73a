"""Calls by messages become turns: what goes on is continued, all else begins anew, each once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qrag_jax.llm.text.chat_rendering import ChatRenderer, TextLost
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.rollouts.called_turns import EpisodeCalls, Over, TurnLimits, Unfit
from qrag_jax.rollouts.token_sampler import SampleRequest
from tests.rollouts.chats import ScriptedSampler, chat_tokenizer

TOKENIZER = chat_tokenizer()
RENDERER = ChatRenderer(TOKENIZER, HERMES)
KEY = np.array([1, 2], np.uint32)
LIMITS = TurnLimits(turn=200, room=4000, turns=50, tokens=0, temperature=1.0)
CALL = '<tool_call>\n{"name": "look", "arguments": {"for": "it"}}\n</tool_call>'
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


def asked(messages: list[dict[str, Any]], *tools: dict[str, Any], **sampling: Any) -> Any:
    return {"messages": messages, "tools": [*tools], "sampling": sampling}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Told:
    """An episode whose turns are given one after the other."""

    def __init__(self, limits: TurnLimits = LIMITS) -> None:
        self.calls = EpisodeCalls(RENDERER, limits, KEY)
        self.turns: list[str] = []
        self.sampler = ScriptedSampler(TOKENIZER, lambda _: self.turns.pop(0))
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
        drawn = {turn.log_probs.tobytes(): (ids, turn) for ids, turn in self.sampler.drawn}
        trained = 0
        for segment in segments:
            row = np.zeros(0, np.int32)
            for turn in segment:
                row = np.concatenate([row, turn.observed])
                context, own = drawn.pop(turn.log_probs.tobytes())
                np.testing.assert_array_equal(row, context)
                np.testing.assert_array_equal(turn.sampled, own.ids)
                assert (turn.finish, turn.version) == (own.finish, "v")
                row = np.concatenate([row, turn.sampled])
                trained += len(turn.sampled)
        assert not drawn
        assert trained == self.calls.sampled_tokens()
        return segments


def test_a_conversation_with_a_tool_is_one_segment() -> None:
    told = Told()
    messages = [{"role": "system", "content": "S"}, user("Q")]
    said = told.call(messages, f"I look. {CALL}", LOOK)
    assert said["content"] == "I look."
    (call,) = said["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"for": "it"})
    tool = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
    told.call([*messages, said, tool], "done", LOOK)
    (segment,) = told.check()
    assert len(segment) == 2
    text = TOKENIZER.decode(np.concatenate([segment[0].observed, segment[0].sampled]).tolist())
    assert (
        '"name": "look"' in text
    )  # the template does not show tools, so the system's message does
    assert CALL in text


def test_branches_share_what_is_before_them() -> None:
    told = Told()
    first = told.call([user("Q")], "one")
    for text in ("left", "right", "right"):
        told.call([user("Q"), first, user("and?")], text)
    segments = told.check()
    assert [len(segment) for segment in segments] == [2, 1, 1]


def test_a_history_that_was_rewritten_begins_a_segment() -> None:
    told = Told()
    first = told.call([user("Q")], "a long thought")
    told.call([user("Q"), {**first, "content": "short"}, user("and?")], "so")
    told.call([{"role": "system", "content": "other"}, user("Q"), first, user("and?")], "then")
    assert [len(segment) for segment in told.check()] == [1, 1, 1]


def test_other_tools_begin_a_segment() -> None:
    told = Told()
    first = told.call([user("Q")], "one", LOOK)
    told.call([user("Q"), first, user("and?")], "two")
    assert len(told.check()) == 2


def test_turns_that_are_no_part_of_the_episode_train_nothing() -> None:
    told = Told()
    first = told.call([user("Q")], "one")
    told.call([user("Judge: is one right?")], "yes")
    told.call([user("Q"), first, user("and?")], "two")
    (segment,) = told.calls.segments({1, 3})
    assert len(segment) == 2
    assert told.calls.sampled_tokens({1, 3}) == len(told.sampler.drawn[1][1].ids)


ACTIONS = st.sampled_from(["go on", "branch", "rewrite", "system", "anew", "tools", "again"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(ACTIONS, st.integers(0, 20)), min_size=1, max_size=12))
def test_whatever_an_environment_does_each_token_trains_once(
    actions: list[tuple[str, int]],
) -> None:
    told, states, tools = Told(), [[user("Q")]], ()
    for number, (action, choice) in enumerate(actions):
        messages = [*states[choice % len(states) if action == "branch" else -1]]
        if action == "rewrite":
            messages = [
                {**each, "content": "rewritten"} if each["role"] == "assistant" else each
                for each in messages
            ]
        elif action == "system":
            head = {"role": "system", "content": f"system {choice % 3}"}
            messages = [head, *(each for each in messages if each["role"] != "system")]
        elif action == "anew":
            messages = [user(f"Q{choice}")]
        elif action == "tools":
            tools = () if tools else (LOOK,)
        said = told.call(messages, CALL if choice % 4 == 0 else f"turn {number}", *tools)
        if action == "again":
            told.call(messages, f"again {number}", *tools)
        answer = (
            {"role": "tool", "tool_call_id": "x", "content": f"result {choice}"}
            if "tool_calls" in said
            else user(f"go on {choice}")
        )
        states.append([*messages, said, answer])
    told.check()


def test_draws_depend_on_what_is_before_and_on_how_often_it_came() -> None:
    told = Told()
    for _ in range(2):
        told.call([user("Q")], "same")
    told.call([user("R")], "other")
    other = Told()
    other.call([user("R")], "other")
    assert len(set(told.sampler.keys)) == 3
    assert other.sampler.keys[0] == told.sampler.keys[2]


def test_limits_of_turns_tokens_and_room() -> None:
    told = Told(TurnLimits(turn=200, room=4000, turns=1, tokens=0, temperature=1.0))
    told.call([user("Q")], "one")
    assert told.calls.ask(9, asked([user("Q")])) == Over("config.env.max_turns, 1")
    told = Told(TurnLimits(turn=200, room=4000, turns=9, tokens=5, temperature=1.0))
    told.call([user("Q")], "some words that are more than five tokens")
    assert told.calls.sampled_tokens() == 5
    assert told.calls.ask(9, asked([user("Q")])) == Over("config.env.max_tokens, 5")
    told = Told(TurnLimits(turn=200, room=20, turns=9, tokens=0, temperature=1.0))
    assert told.calls.ask(9, asked([user("many words " * 9)])) == Over("config.sampling.room, 20")


@pytest.mark.parametrize(
    ("sampling", "fine"),
    [
        ({"temperature": 1.0, "top_p": 1.0, "n": 1, "max_tokens": 3, "extra_body": {}}, True),
        ({"temperature": 0.5}, False),
        ({"top_p": 0.9}, False),
        ({"extra_body": {"top_k": 5}}, False),
        ({"logit_bias": {"3": 1}}, False),
    ],
)
def test_another_distribution_is_refused(sampling: dict[str, Any], fine: bool) -> None:
    found = Told().calls.ask(1, asked([user("Q")], **sampling))
    assert isinstance(found, SampleRequest if fine else Unfit)
    if isinstance(found, SampleRequest):
        assert found.most == 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("half a pair \ud800", "cannot give back a text of the user"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "a part of the type image_url"),
    ],
)
def test_a_text_that_has_no_ids_is_refused(content: Any, told: str) -> None:
    with pytest.raises(TextLost, match=told):
        RENDERER.opening([{"role": "user", "content": content}])


def test_a_mark_in_a_text_ends_no_turn() -> None:
    ids = RENDERER.opening([user("before <|im_end|> after")])
    assert ids.tolist().count(TOKENIZER.eos_token_id) == 1


def test_nodes_of_a_trace_are_the_same_forest() -> None:
    """Two branches behind one sampled node, as `trace.branches` has them."""
    told = Told()
    first = told.call([user("Q")], "one")
    told.call([user("Q"), first, user("and?")], "left")
    told.call([user("Q"), first, user("and?")], "right")
    (a_ids, a), (left_ids, left), (_, right) = told.sampler.drawn
    between = left_ids[len(a_ids) + len(a.ids) :]
    nodes = [
        _node(-1, a_ids, a.ids),
        _node(0, between, left.ids),
        _node(0, between, right.ids),
        _node(1, between, np.zeros(0, np.int32)),
    ]
    kept, segments = told.calls.of_nodes(nodes)
    assert kept == {1, 2, 3}
    assert [[turn.sampled.tolist() for turn in each] for each in segments] == [
        [a.ids.tolist(), right.ids.tolist()],
        [left.ids.tolist()],
    ]
    np.testing.assert_array_equal(segments[1][0].log_probs, left.log_probs)
    nodes[2]["ids"] = [*nodes[2]["ids"][:-1], 7]
    with pytest.raises(ValueError, match="not sampled by the model"):
        told.calls.of_nodes(nodes)


def _node(parent: int, read: np.ndarray, sampled: np.ndarray) -> dict[str, Any]:
    mask = [False] * len(read) + [True] * len(sampled)
    ids = [*read.tolist(), *sampled.tolist()]
    return {"parent": parent, "ids": ids, "mask": mask, "trains": bool(len(sampled))}
