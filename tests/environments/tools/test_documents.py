"""Questions as tasks: their documents, answers, noise, hops and order."""

from __future__ import annotations

import dataclasses

import pytest

from qrag_jax.data.dataset_parts import TitledSample
from qrag_jax.data.sample import Sample
from qrag_jax.environments.tools.documents import (
    TasksConfig,
    cleaned,
    task_of,
    tasks_of,
    with_number_forms,
)
from qrag_jax.environments.tools.episode import Document, ToolTask
from qrag_jax.errors import InputError

SAMPLE = Sample(
    "2hop__1_2",
    "Who?",
    ("J. R. R. Lake. It is ``deep''.", "Ada. ... sails.", "Untitled."),
    (0, 1),
    ("Third Lake",),
    "musique",
)
TITLED = TitledSample(SAMPLE, ("J. R. R. Lake", "Ada", ""))


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
        "the song ``Rudolph ''which was": 'the song "Rudolph" which was',
        "1971`` Everyday'' (1972) ``Friends ''(1971)": '1971 "Everyday" (1972) "Friends" (1971)',
        "B - side`` What?'' Released": 'B - side "What?" Released',
        "twice ``a'', ``b''.": 'twice "a", "b".',
        "only `` one": "only one",
        "a '' b ``c'' ``": 'a b "c"',
        "it's 'plain' and \"straight\"": "it's 'plain' and \"straight\"",
    }.items():
        assert cleaned(text) == clean
        assert cleaned(clean) == clean


def test_number_forms() -> None:
    for answers, forms in {
        ("Three",): ("Three", "3"),
        (" ten ", "10"): (" ten ", "10"),
        ("three men",): ("three men",),
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
    more = tasks_of(samples, TasksConfig(noise_rate=0.6))
    assert all(set(half[task.id]) <= set(ids(task)) for task in more)


def test_hops_are_filtered() -> None:
    samples = [question(number, hops) for number, hops in enumerate((4, 2, 3, 2, 4, 1))]
    some = tasks_of(samples, TasksConfig(min_hops=2, max_hops=3))
    assert [task.id for task in some] == ["q1", "q2", "q3"]
    assert [task.hops for task in tasks_of(samples, TasksConfig(min_hops=4))] == [4, 4]
    with pytest.raises(InputError, match="min_hops"):
        tasks_of(samples, TasksConfig(min_hops=5))


def test_what_cannot_be_a_task_is_refused() -> None:
    with pytest.raises(InputError, match="'q1'"):
        tasks_of([question(1), question(1)])
    with pytest.raises(InputError, match="'2hop__1_2'"):
        task_of(dataclasses.replace(SAMPLE, answers=()))
    one = Document("7", "", "text", True)
    with pytest.raises(InputError, match="'q' has two"):
        ToolTask("q", "Who?", ("Ada",), (one, one))
    with pytest.raises(InputError, match="has documents of its own"):
        ToolTask("q", "Who?", ("Ada",), (one,), gold_ids=("7",))
