"""The digest of an RLVR run's questions: what it depends on."""

from __future__ import annotations

import dataclasses

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.documents import bridge_task
from qrag_jax.systems.rlvr_inputs import fingerprint

TASKS = [bridge_task(bridge_question(0, "train", index)) for index in range(3)]


def changed(**fields) -> list:
    return [TASKS[0], dataclasses.replace(TASKS[1], **fields), TASKS[2]]


def test_every_part_of_a_task_counts() -> None:
    first, *others = TASKS[1].documents
    other_text = (first._replace(text=f"{first.text} It is old."), *others)
    other_gold = (first._replace(is_supporting=not first.is_supporting), *others)
    found = {
        fingerprint(tasks)
        for tasks in (
            TASKS,
            TASKS[:2],
            TASKS[::-1],
            changed(answers=("1931",)),
            changed(question="Who?"),
            changed(documents=other_text),
            changed(documents=other_gold),
            changed(documents=tuple(reversed(TASKS[1].documents))),
        )
    }
    assert len(found) == 8
    assert fingerprint(list(TASKS)) in found


def test_it_stays_that_of_earlier_runs() -> None:
    # Taken from the code before documents had scores: a run of then goes on now.
    assert fingerprint(TASKS) == "f5abe477aa331619"
    scored = tuple(each._replace(score=1.0) for each in TASKS[1].documents)
    assert fingerprint(changed(documents=scored)) == "f5abe477aa331619"
