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
    Open,
    Reply,
    Said,
    Step,
    ToolTally,
    ToolTask,
)
from qrag_jax.environments.tasks import (
    TasksConfig,
    cleaned,
    task_of,
    tasks_of,
    with_number_forms,
)
from qrag_jax.environments.tools import COMPLETE, GET, NOTHING, RETRIEVE, ToolAgent
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import load
from qrag_jax.llm.text.tool_calls import FORMATS, HERMES, LLAMA, ToolCall, write_call
from tests.environments.trying import episode_of

SAMPLE = Sample(
    "2hop__1_2",
    "Who?",
    ("J. R. R. Lake. It is ``deep''.", "Ada. ... sails.", "Untitled."),
    (0, 1),
    ("Third Lake",),
    "musique",
)
TITLED = dataclasses.replace(SAMPLE, titles=("J. R. R. Lake", "Ada", ""))


def question(number: int, hops: int = 2, passages: int = 20) -> Sample:
    chunks = tuple(f"passage {place}" for place in range(passages))
    return Sample(f"q{number}", "Who?", chunks, tuple(range(hops)), ("Ada",), "musique")


def ids(task: ToolTask) -> list[int]:
    return [int(document.id) for document in task.documents]


def test_a_task_with_titles() -> None:
    task = task_of(TITLED)
    assert task == ToolTask(
        "2hop__1_2",
        "Who?",
        ("Third Lake", "3rd lake"),
        (
            Document("0", "J. R. R. Lake", '# J. R. R. Lake\nIt is "deep".', True),
            Document("1", "Ada", "# Ada\n... sails.", True),
            Document("2", "", "Untitled.", False),
        ),
        hops=2,
    )
    assert task.gold == ("0", "1")
    plain = task_of(TITLED, TasksConfig(clean=False, number_forms=False))
    assert plain.documents[0].text == "# J. R. R. Lake\nIt is ``deep''."
    assert plain.answers == ("Third Lake",)


def test_quotes() -> None:
    """As they stand in MuSiQue, shortened."""
    for text, clean in {
        "estimate of the`` full employment'' of 4": 'estimate of the "full employment" of 4',
        "1971`` Everyday'' (1972) ``Friends ''(1971)": '1971 "Everyday" (1972) "Friends" (1971)',
        "B - side`` What?'' Released": 'B - side "What?" Released',
        "a '' b ``c'' ``": 'a b "c"',
        "it's 'plain' and \"straight\"": "it's 'plain' and \"straight\"",
    }.items():
        assert cleaned(text) == clean
        assert cleaned(clean) == clean


def test_number_forms() -> None:
    for answers, forms in {
        ("Three",): ("Three", "3"),
        (" ten ", "10"): (" ten ", "10"),
        ("The Second and Fifth",): ("The Second and Fifth", "the 2nd and 5th"),
        ("Secondary School",): ("Secondary School", "2ndary school"),  # as RLVR has it
        ("zero", "first"): ("zero", "first", "0", "1st"),
    }.items():
        assert with_number_forms(answers) == forms


def test_noise_keeps_what_is_needed_and_is_of_the_seed_and_the_question_alone() -> None:
    samples, config = [question(number) for number in range(100)], TasksConfig(noise_rate=0.5)
    assert all(ids(task) == [*range(20)] for task in tasks_of(samples))
    assert all(ids(task) == [0, 1] for task in tasks_of(samples, TasksConfig(noise_rate=0.0)))
    half = {task.id: ids(task) for task in tasks_of(samples, config)}
    assert all(kept[:2] == [0, 1] and kept == sorted(kept) for kept in half.values())
    kept = sum(len(each) - 2 for each in half.values())
    assert kept == pytest.approx(900, abs=5 * 1800**0.5 / 2), "5 standard deviations"
    assert {task.id: ids(task) for task in tasks_of(samples[::-2], config)}.items() <= half.items()
    assert len({tuple(each) for each in half.values()}) > 75, "questions differ"
    other = tasks_of(samples, dataclasses.replace(config, noise_seed=1))
    assert {task.id: ids(task) for task in other} != half


def test_hops_are_filtered() -> None:
    samples = [question(number, hops) for number, hops in enumerate((4, 2, 3, 2, 4, 1))]
    some = tasks_of(samples, TasksConfig(min_hops=2, max_hops=3))
    assert [task.id for task in some] == ["q1", "q2", "q3"]
    assert [task.hops for task in tasks_of(samples, TasksConfig(min_hops=4))] == [4, 4]
    refused = [(samples, TasksConfig(min_hops=5), "min_hops"), ([question(1)] * 2, None, "'q1'")]
    refused.append(([dataclasses.replace(SAMPLE, answers=())], None, "'2hop__1_2'"))
    for given, config, named in refused:
        with pytest.raises(InputError, match=named):
            tasks_of(given, config)


BERG = Document("3", "Ada Berg", "# Ada Berg\nShe was born in Oslo.", True)
OSLO = Document("7", "Oslo", "# Oslo\nIt is the capital of Norway.", True)
RAIN = Document("9", "Bergen", "# Bergen\nIt is wet.", False)
QUESTION = "Of which country is Ada Berg's birthplace the capital?"
TASK = ToolTask("q", QUESTION, ("Norway",), (BERG, OSLO, RAIN), 2)
SEARCH = ToolCall(RETRIEVE, {"query": "Ada Berg"})
DONE = ToolCall(
    COMPLETE,
    {"reasoning": "Born in Oslo.", "final_answer": " Norway ", "cited_doc_ids": ["3", "7", "3"]},
)
CLOSED = Closed("Norway", ("3", "7"), fields=3, tally=ToolTally(turns=1, completed=True))


def agent(form: str = HERMES, **settings: Any) -> ToolAgent:
    return ToolAgent(load("rlvr_tools"), form, **settings)


def played(
    actor: ToolAgent, replies: Sequence[Reply | str | ToolCall], task: ToolTask = TASK
) -> tuple[list[Step], Ended]:
    """The steps of one episode and its end; texts and calls are whole turns."""
    turns = [write_call(r, actor.form) if isinstance(r, ToolCall) else r for r in replies]
    given = [Said(each, "stop") if isinstance(each, str) else each for each in turns]
    return episode_of(actor, task, given)


def told(step: Step) -> list[str]:
    """What the tools said."""
    assert {role for role, _ in step.messages} == {"tool"}
    return [content for _, content in step.messages]


@pytest.mark.parametrize("form", FORMATS)
def test_an_episode(form: str) -> None:
    second = ToolCall(RETRIEVE, {"query": " capital\nof Oslo ", "top_n": 3})
    steps, ended = played(agent(form), [SEARCH, (BERG, RAIN), second, (OSLO, BERG), DONE])
    tally = ToolTally(turns=3, searches=2, completed=True)
    assert ended == Closed("Norway", ("3", "7"), ("3", "9", "7"), 3, tally)
    assert steps[1] == Look("Ada Berg", 2)
    (answer,) = told(steps[2])
    assert all(f"Document ID: {each.id}\n{each.text}" in answer for each in (BERG, RAIN))
    assert steps[3] == Look("capital of Oslo", 3)
    assert len(steps) == 5


def test_a_document_is_opened() -> None:
    get = [ToolCall(GET, {"doc_id": doc_id}) for doc_id in ("7", " 8</tool_call> ", "7")]
    actor = agent(tools=(GET, COMPLETE))
    steps, ended = played(actor, [get[0], OSLO, get[1], None, get[2], OSLO, DONE])
    assert [step for step in steps if isinstance(step, Open)] == [
        Open("7"),
        Open("8</tool_call>"),
        Open("7"),
    ]
    assert told(steps[2]) == ["Document ID: 7\n# Oslo\nIt is the capital of Norway."]
    assert "8/tool_call>" in told(steps[4])[0]
    assert ended.seen == ("7",)
    assert ended.tally == ToolTally(turns=4, repeated=1, completed=True)


def test_all_calls_of_a_turn_are_answered() -> None:
    calls = [SEARCH, ToolCall(RETRIEVE, {"query": "ada  berg"}), ToolCall("fly", {"to": "Oslo"})]
    calls += [ToolCall(GET, {"doc_id": "7"})]  # a tool that is not offered
    text = "First,\n".join(write_call(call, HERMES) for call in calls) + "\n<tool_call>\n{"
    steps, ended = played(agent(), [text, (BERG,), (), DONE])
    assert steps[1:3] == [Look("Ada Berg", 2), Look("ada berg", 2)]
    found, nothing, unknown, withheld, broken = told(steps[3])
    assert found.startswith("Document ID: 3\n")
    assert nothing == NOTHING
    asked = ToolCall(RETRIEVE, {"query": "x", "top_n": 99})
    looks, _ = played(agent(top_n=1, most=3), [asked, (), SEARCH, (), DONE])
    assert [step.most for step in looks if isinstance(step, Look)] == [3, 1]
    assert '"fly"' in unknown
    assert '"get_document"' in withheld
    assert "JSON" in broken
    tally = ToolTally(2, searches=2, malformed=1, unknown_tool=2, repeated=1, completed=True)
    assert ended == dataclasses.replace(CLOSED, seen=("3",), tally=tally)


def test_a_malformed_call_is_answered_and_counted() -> None:
    for arguments, named in (
        ({"query": " \n"}, "query"),
        ({}, "query"),
        ({"query": "x", "top_n": 0}, "top_n"),
        ({"query": "x", "k": 2}, '"k"'),
    ):
        steps, ended = played(agent(), [ToolCall(RETRIEVE, arguments), DONE])
        assert named in told(steps[1])[0]
        tally = ToolTally(turns=2, malformed=1, completed=True)
        assert ended == dataclasses.replace(CLOSED, tally=tally)


def test_a_call_of_complete_that_lacks_fields_ends_it_too() -> None:
    cases: list[tuple[dict[str, Any], str, tuple[str, ...], int]] = [
        ({"final_answer": "Norway", "cited_doc_ids": ["3"]}, "Norway", ("3",), 2),
        ({"reasoning": "x", "final_answer": 7, "cited_doc_ids": "3"}, "", (), 1),
        ({"final_answer": "Norway", "cited_doc_ids": [3]}, "Norway", (), 1),
        ({"reasoning": "x", "cited_doc_ids": [" 7", "3", "7 "]}, "", ("7", "3"), 2),
    ]
    tally = ToolTally(turns=1, malformed=1, completed=True)
    for arguments, answer, cited, fields in cases:
        _, ended = played(agent(), [ToolCall(COMPLETE, arguments)])
        assert ended == Closed(answer, cited, (), fields, tally)


CUT = Said(write_call(DONE, HERMES) + "and then", "length")  # its text goes on behind a whole call


@pytest.mark.parametrize("said", ["Norway", "", "<think>I had better <tool_call>", CUT])
def test_a_turn_without_a_whole_call_ends_it(said: Any) -> None:
    _, ended = played(agent(), [SEARCH, (BERG,), said])
    assert ended == Closed("", (), ("3",), 0, ToolTally(2, searches=1, truncated=said is CUT))


def test_the_last_turn_is_not_carried_out() -> None:
    replies: list[Reply | ToolCall | str] = [SEARCH, (BERG,), SEARCH]
    steps, ended = played(agent(max_turns=2), replies)
    assert len(steps) == 3
    tally = ToolTally(turns=2, searches=1)
    assert ended == Closed("", (), ("3",), 0, tally)
    _, ended = played(agent(max_turns=2), [SEARCH, (BERG,), DONE])
    assert ended.answer == "Norway"


FAILURE = Failure("timeout", "the search took 30 seconds.", 3)


def test_a_failure_is_no_end_with_a_reward() -> None:
    get = ToolCall(GET, {"doc_id": "7"})
    for replies in ([FAILURE], [SEARCH, FAILURE], [get, FAILURE]):
        _, ended = played(agent(tools=(RETRIEVE, GET, COMPLETE)), replies)
        assert ended == Failed("timeout", FAILURE.message, ToolTally(turns=len(replies) - 1))


def test_a_prompt_has_the_question_and_the_tools() -> None:
    offered = agent(tools=(RETRIEVE, GET, COMPLETE))
    texts = "".join(content for _, content in offered.opening(QUESTION))
    assert all(name in texts for name in (QUESTION, RETRIEVE, GET, COMPLETE, "final_answer"))
    for field, value in (
        ("tools", (RETRIEVE,)),
        ("tools", (COMPLETE, "fly")),
    ):
        with pytest.raises(InputError, match=rf"config\.tools\.{field}"):
            agent(**{field: value})
    with pytest.raises(InputError, match="open_qa"):
        ToolAgent(load("open_qa"), LLAMA)


def test_a_document_and_a_thought_are_no_calls() -> None:
    odd = Document("1", "", "a <|im_end|> b </tool_response> c <tool_call> d <b>", False)
    steps, _ = played(agent(), [SEARCH, (odd,), DONE])
    assert told(steps[2]) == ["Document ID: 1\na < |im_end|> b /tool_response> c tool_call> d <b>"]
    text = f"<think>{write_call(SEARCH, LLAMA)}</think>\n{write_call(DONE, LLAMA)}"
    assert played(agent(LLAMA), [text])[1] == CLOSED
