"""The suite which: how trainings went on, and what they had reached at equal cost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.which_cases import contrast, course, equal_cost
from benchmarks.which_cases.contrast import Tried
from benchmarks.which_cases.found import Course, Training
from benchmarks.which_cases.measured import Cost
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Result, training_of
from benchmarks.which_cases.rows import ROWS
from benchmarks.which_cases.settings import HOTPOTQA, TWO_WIKI
from benchmarks.which_cases.table import Scored
from qrag_jax.runtime.saved_config import CONFIG_NAME
from qrag_jax.runtime.writers import METRICS_NAME, MetricWriter

BY_NAME = {row.name: row for row in ROWS}


def run(folder: Path, scores: dict[int, float], name: str = "recall") -> Path:
    """A run of 40 steps, each of 2 seconds by its clock."""
    folder.mkdir()
    (folder / CONFIG_NAME).write_text(json.dumps({"eval": {"best_by": "recall"}}))
    with MetricWriter(folder) as writer:
        for step in range(10, 41, 10):
            writer.write(step, {"train/loss": 1.0, "speed/seconds": 2.0 * step})
            if step in scores:
                writer.write(step, {f"eval/{name}": scores[step], "eval/em": 0.0})
    return folder


def test_minutes_are_the_share_of_the_clock(tmp_path: Path) -> None:
    made = run(tmp_path / "run", {20: 0.5, 40: 0.75})
    cost, before = Cost(cpu_seconds=600.0), Cost(cpu_seconds=60.0)
    assert course.of_run(made, cost) == Course("recall", ((5.0, 0.5), (10.0, 0.75)))
    after = course.of_run(made, cost, before, before)
    assert after == Course("recall", ((7.0, 0.5), (12.0, 0.75)))
    assert course.of_run(run(tmp_path / "never", {}), cost) is None
    hops = run(tmp_path / "hops", {40: 0.75}, "hop2/recall")
    assert course.of_run(hops, cost, part="hop2/") == Course("hop2/recall", ((10.0, 0.75),))


def test_a_training_of_no_step_has_no_course(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"eval": {"best_by": "recall"}}))
    (tmp_path / METRICS_NAME).write_text("")
    assert course.of_run(tmp_path, Cost()) is None


def test_all_rates_are_in_the_course_of_contrastive_training() -> None:
    tried = [Tried(5e-5, 80, 0.9, 4), Tried(2e-5, 80, 0.8, 2), Tried(5e-5, 40, 0.7, 3)]
    tried.append(Tried(2e-5, 40, 0.6, 1))
    points = ((2.0, 0.6), (4.0, 0.8), (6.0, 0.7), (8.0, 0.9))
    assert contrast.course(tried, 8.0) == Course("recall", points)


def test_the_course_is_kept_with_the_costs() -> None:
    cost = Cost(120.0, 600.0)
    went = Course("recall", ((5.0, 0.5), (10.0, 0.75)))
    for given in (went, None):
        result = Result({}, training_of(cost, course=given, tokens=3.0), "about")
        read = Result.of_json(json.loads(json.dumps(result.to_json())))
        assert read == result
        assert read.training is not None
        assert read.training.course == given


def test_trainings_are_compared_at_equal_cost() -> None:
    first = Training(10.0, 6.0, course=Course("recall", ((4.0, 0.5), (6.0, 0.4), (9.5, 0.7))))
    second = Training(10.0, 6.0, course=Course("recall", ((4.0, 0.3), (8.0, 0.5), (9.0, 0.2))))
    line = Scored(TWO_WIKI, BY_NAME["q_rag"], TRAINED, training=[first, second])
    untrained = dataclasses.replace(line, way=UNTRAINED, training=[])
    other = Scored(HOTPOTQA, BY_NAME["q_rag"], TRAINED, training=[Training(10.0, 6.0)])
    (text,) = equal_cost.tables([line, untrained, other])
    assert text.startswith("### 2wiki: what a training has reached at equal cost\n")
    row = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    # Nothing by 2.5 minutes; then means of 0.5 and 0.3, and of 0.7 and 0.5; after 10 it has ended.
    assert row[1:] == ["recall", "0.400", "", "0.400", "0.600", "", "", "0.600", "10", "0.88"]
    assert row[0] == line.title


@pytest.mark.parametrize("minutes", equal_cost.MINUTES)
def test_a_training_that_has_ended_reaches_no_more(minutes: float) -> None:
    made = Training(minutes - 0.1, 1.0, course=Course("recall", ((0.1, 0.5),)))
    assert equal_cost._reached(made, made.course, minutes) is None
    longer = dataclasses.replace(made, cpu_minutes=minutes)
    assert equal_cost._reached(longer, longer.course, minutes) == 0.5
