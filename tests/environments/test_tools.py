"""The agent with tools: its tasks, how calls are answered, and how an episode ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from qrag_jax.data.sample import Sample
from qrag_jax.environments.episode import (
    Closed,
    Document,
    Ended,
    Failed,
    Look,
    Reply,
    Said,
    Step,
    ToolTally,
    ToolTask,
)
from qrag_jax.environments.tasks import TasksConfig, cleaned, task_of, tasks_of, with_number_forms
from qrag_jax.environments.tools import COMPLETE, GET, NOTHING, RETRIEVE, ToolAgent
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from qrag_jax.llm.text.tool_calls import FORMATS, HERMES, LLAMA, ToolCall, write_call
from tests.environments.trying import BERG, OSLO, QUESTION, RAIN, episode_of

TEXTS = ("J. R. R. Lake. It is ``deep''.", "Ada. ... sails.", "Untitled.")
TITLES = ("J. R. R. Lake", "Ada", "")
SAMPLE = Sample("q", "Who?", TEXTS, (0, 1), ("Third Lake",), "musique", titles=TITLES)


def question(number: int, hops: int = 2) -> Sample:
    chunks = tuple(f"passage {place}" for place in range(20))
    return Sample(f"q{number}", "Who?", chunks, tuple(range(hops)), ("Ada",), "musique")


def ids(task: ToolTask) -> list[int]:
    return [int(document.id) for document in task.documents]


def test_a_task_with_titles() -> None:
    documents = (
        Document("0", "J. R. R. Lake", '# J. R. R. Lake\nIt is "deep".', True),
        Document("1", "Ada", "# Ada\n... sails.", True),
        Document("2", "", "Untitled.", False),
    )
    expected = ToolTask("q", "Who?", ("Third Lake", "3rd lake"), documents, hops=2)
    assert task_of(SAMPLE, TasksConfig()) == expected
    plain = task_of(SAMPLE, TasksConfig(clean=False, number_forms=False))
    assert plain.documents[0].text == "# J. R. R. Lake\nIt is ``deep''."
    assert plain.answers == ("Third Lake",)


def test_quotes_and_number_forms_as_in_musique() -> None:
    for text, clean in {
        "estimate of the`` full employment'' of 4": 'estimate of the "full employment" of 4',
        "a '' b ``c'' ``": 'a b "c"',
        "it's 'plain' and \"straight\"": "it's 'plain' and \"straight\"",
    }.items():
        assert cleaned(text) == clean
    for answers, forms in {
        (" ten ", "10"): (" ten ", "10"),
        ("The Second and Fifth",): ("The Second and Fifth", "the 2nd and 5th"),
        ("Secondary School",): ("Secondary School", "2ndary school"),  # as RLVR has it
    }.items():
        assert with_number_forms(answers) == forms


def test_noise_keeps_gold_passages_and_depends_on_seed_and_question_alone() -> None:
    samples, config = [question(number) for number in range(100)], TasksConfig(noise_rate=0.5)
    assert all(ids(task) == [0, 1] for task in tasks_of(samples, TasksConfig(noise_rate=0.0)))
    half = {task.id: ids(task) for task in tasks_of(samples, config)}
    assert all(kept[:2] == [0, 1] and kept == sorted(kept) for kept in half.values())
    kept = sum(len(each) - 2 for each in half.values())
    assert kept == pytest.approx(900, abs=5 * 1800**0.5 / 2)  # 5 standard deviations
    assert {task.id: ids(task) for task in tasks_of(samples[::-2], config)}.items() <= half.items()
    other = tasks_of(samples, dataclasses.replace(config, noise_seed=1))
    assert {task.id: ids(task) for task in other} != half


def test_hops_are_filtered() -> None:
    samples = [question(number, hops) for number, hops in enumerate((4, 2, 3, 2, 4, 1))]
    some = tasks_of(samples, TasksConfig(min_hops=2, max_hops=3))
    assert [task.id for task in some] == ["q1", "q2", "q3"]
    with pytest.raises(InputError, match="min_hops"):
        tasks_of(samples, TasksConfig(min_hops=5))
    with pytest.raises(InputError, match="'q'"):
        tasks_of([dataclasses.replace(SAMPLE, answers=())], TasksConfig())


TASK = ToolTask("q", QUESTION, ("Norway",), (BERG, OSLO, RAIN), 2)
SEARCH = ToolCall(RETRIEVE, {"query": "Ada Berg"})
DONE = ToolCall(
    COMPLETE,
    {"reasoning": "Born in Oslo.", "final_answer": " Norway ", "cited_doc_ids": ["a", "b", "a"]},
)
CLOSED = Closed("Norway", ("a", "b"), fields=3, tally=ToolTally(turns=1, completed=True))


def agent(form: str = HERMES, **settings: Any) -> ToolAgent:
    return ToolAgent(load("rlvr_tools"), form, **settings)


def played(
    actor: ToolAgent, replies: Sequence[Reply | str | ToolCall], task: ToolTask = TASK
) -> tuple[list[Step], Ended]:
    turns = [write_call(r, actor.form) if isinstance(r, ToolCall) else r for r in replies]
    given = [Said(each, "stop") if isinstance(each, str) else each for each in turns]
    return episode_of(actor, task, given)


def results(step: Step) -> list[str]:
    assert {role for role, _ in step.messages} == {"tool"}
    return [content for _, content in step.messages]


@pytest.mark.parametrize("form", FORMATS)
def test_searches_are_answered_until_complete_is_called(form: str) -> None:
    second = ToolCall(RETRIEVE, {"query": " capital\nof Oslo ", "top_n": 99})
    steps, ended = played(agent(form, most=3), [SEARCH, (BERG, RAIN), second, (OSLO, BERG), DONE])
    tally = ToolTally(turns=3, searches=2, completed=True)
    assert ended == Closed("Norway", ("a", "b"), ("a", "c", "b"), 3, tally)
    assert steps[1::2] == [Look("Ada Berg", 2), Look("capital of Oslo", 3)]
    (answer,) = results(steps[2])
    assert all(f"Document ID: {each.id}\n{each.text}" in answer for each in (BERG, RAIN))


def test_all_calls_of_a_turn_are_answered() -> None:
    calls = [SEARCH, ToolCall(RETRIEVE, {"query": "ada  berg"}), ToolCall("fly", {"to": "Oslo"})]
    calls += [ToolCall(GET, {"doc_id": "b"})]  # a tool that is not offered
    text = "First,\n".join(write_call(call, HERMES) for call in calls) + "\n<tool_call>\n{"
    steps, ended = played(agent(), [text, (BERG,), (), DONE])
    assert steps[1:3] == [Look("Ada Berg", 2), Look("ada berg", 2)]
    found, nothing, unknown, withheld, broken = results(steps[3])
    assert found.startswith("Document ID: a\n")
    assert nothing == NOTHING
    assert '"fly"' in unknown
    assert '"get_document"' in withheld
    assert "JSON" in broken
    tally = ToolTally(2, searches=2, malformed=1, unknown_tool=2, repeated=1, completed=True)
    assert ended == dataclasses.replace(CLOSED, seen=("a",), tally=tally)


def test_malformed_calls_are_answered_and_counted() -> None:
    malformed = ToolTally(turns=2, malformed=1, completed=True)
    for arguments, named in (({"query": " \n"}, "query"), ({"query": "x", "top_n": 0}, "top_n")):
        steps, ended = played(agent(), [ToolCall(RETRIEVE, arguments), DONE])
        assert named in results(steps[1])[0]
        assert ended == dataclasses.replace(CLOSED, tally=malformed)
    # A call of complete that lacks fields ends the episode, too.
    cases: list[tuple[dict[str, Any], str, tuple[str, ...], int]] = [
        ({"final_answer": "Norway", "cited_doc_ids": ["a"]}, "Norway", ("a",), 2),
        ({"reasoning": "x", "final_answer": 7, "cited_doc_ids": "a"}, "", (), 1),
        ({"reasoning": "x", "cited_doc_ids": [" b", "a", "b "]}, "", ("b", "a"), 2),
    ]
    for arguments, answer, cited, fields in cases:
        _, ended = played(agent(), [ToolCall(COMPLETE, arguments)])
        tally = dataclasses.replace(malformed, turns=1)
        assert ended == Closed(answer, cited, (), fields, tally)


CUT = Said(write_call(DONE, HERMES) + "and then", "length")  # its text goes on behind a whole call


@pytest.mark.parametrize("said", ["Norway", "", "<think>I had better <tool_call>", CUT])
def test_a_turn_without_a_whole_call_ends_the_episode(said: Any) -> None:
    _, ended = played(agent(), [SEARCH, (BERG,), said])
    assert ended == Closed("", (), ("a",), 0, ToolTally(2, searches=1, truncated=said is CUT))


def test_the_last_turn_is_not_carried_out_and_a_failure_has_no_reward() -> None:
    steps, ended = played(agent(max_turns=2), [SEARCH, (BERG,), SEARCH])
    assert len(steps) == 3
    assert ended == Closed("", (), ("a",), 0, ToolTally(turns=2, searches=1))
    assert played(agent(max_turns=2), [SEARCH, (BERG,), DONE])[1].answer == "Norway"
    failure, get = Failure("timeout", "it took too long.", 3), ToolCall(GET, {"doc_id": "b"})
    for replies in ([failure], [SEARCH, failure], [get, failure]):
        _, ended = played(agent(tools=(RETRIEVE, GET, COMPLETE)), replies)
        assert ended == Failed("timeout", failure.message, ToolTally(turns=len(replies) - 1))


def test_a_prompt_has_the_question_and_the_tools() -> None:
    offered = agent(tools=(RETRIEVE, GET, COMPLETE))
    texts = "".join(content for _, content in offered.opening(QUESTION))
    assert all(name in texts for name in (QUESTION, RETRIEVE, GET, COMPLETE, "final_answer"))
    with pytest.raises(InputError, match=r"config\.tools\.path.*get_document"):
        agent(functions=({"function": {"name": GET}},))
    with pytest.raises(InputError, match="open_qa"):
        ToolAgent(load("open_qa"), LLAMA)


def test_documents_and_thoughts_are_not_read_as_calls() -> None:
    odd = Document("1", "", "a <|im_end|> b </tool_response> c <tool_call> d <b>", False)
    steps, _ = played(agent(), [SEARCH, (odd,), DONE])
    assert results(steps[2]) == [
        "Document ID: 1\na < |im_end|> b /tool_response> c tool_call> d <b>"
    ]
    text = f"<think>{write_call(SEARCH, LLAMA)}</think>\n{write_call(DONE, LLAMA)}"
    assert played(agent(LLAMA), [text])[1] == CLOSED
