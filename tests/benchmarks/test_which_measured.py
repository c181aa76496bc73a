"""Lists of passages as they were read, and what steps of a row cost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.which_cases.found import COUNTS, MOST, Asking, Found, Training, read_list
from benchmarks.which_cases.measured import Cost, costs_of, once, per_question, timed
from benchmarks.which_cases.row import TRAINED, Result, training_of


def test_a_list_has_each_passage_where_it_was_read_first() -> None:
    assert read_list(["a", "b", "b", "c", "a", "d"]) == ("a", "b", "c", "d")
    assert read_list(str(n) for n in range(MOST + 5)) == tuple(map(str, range(MOST)))
    assert read_list([]) == ()
    assert COUNTS == (2, 4, 6, 10)


def test_results_are_kept_as_they_are() -> None:
    found = Found({"q": ("a", "b"), "r": ()}, Asking(1.5, read_tokens=3.0), 12, "a note")
    result = Result({TRAINED: {"2wiki": found}}, Training(1.0, 2.0, 3.0), "chosen")
    assert Result.of_json(json.loads(json.dumps(result.to_json()))) == result
    plain = Result({TRAINED: {"2wiki": Found({}, Asking())}})
    assert Result.of_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_a_step_that_has_ended_is_not_done_again(tmp_path: Path) -> None:
    given: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        given.append(words)

    first = once(tmp_path, "train", "module", Path("a"), run=run)
    assert first.ended
    assert once(tmp_path, "train", "module", Path("a"), run=run) == first
    assert given == [("module", "a")]
    # Other words are another step, whose costs begin anew.
    other = once(tmp_path, "train", "module", "b", run=run)
    assert given[1:] == [("module", "b")]
    assert (other.starts, other.given) == (1, ("module", "b"))


def test_costs_of_a_step_that_was_broken_off_add_up(tmp_path: Path) -> None:
    def broken(*words: str) -> None:
        time.sleep(0.02)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path, "train", run=broken)
    before = costs_of(tmp_path)["train"]
    assert not before.ended
    assert before.seconds >= 0.02
    with timed(tmp_path, "train") as is_needed:
        assert is_needed
        time.sleep(0.02)
    after = costs_of(tmp_path)["train"]
    assert after.ended
    assert after.starts == 2
    assert after.seconds >= before.seconds + 0.02
    with timed(tmp_path, "train") as is_needed:
        assert not is_needed
    assert costs_of(tmp_path)["train"] == after


def test_a_start_that_was_killed_is_counted(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from benchmarks.which_cases.measured import timed\n"
        "with timed(Path(sys.argv[1]), 'train'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert killed.returncode == -signal.SIGKILL
    cost = costs_of(tmp_path)["train"]
    assert (cost.starts, cost.untold, cost.ended) == (1, 1, False)
    with timed(tmp_path, "train") as is_needed:
        assert is_needed
    cost = costs_of(tmp_path)["train"]
    assert (cost.starts, cost.untold, cost.ended) == (2, 1, True)
    assert training_of(cost).untold == 1


def test_processor_time_of_other_processes_counts(tmp_path: Path) -> None:
    code = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    with timed(tmp_path, "train"):
        subprocess.run([sys.executable, "-c", code], check=True)
    cost = costs_of(tmp_path)["train"]
    assert cost.cpu_seconds >= 0.2
    assert training_of(cost).cpu_minutes == pytest.approx(cost.cpu_seconds / 60)


def test_starting_is_not_in_the_time_of_a_question() -> None:
    warm, full = Cost(10.0, starts=1), Cost(14.0, starts=1)
    assert per_question(warm, full, 16, 216) == pytest.approx(20.0)
    assert per_question(warm, full, 16, 16) is None
    assert per_question(full, warm, 16, 216) is None
    # What was broken off was begun twice, so the clock says nothing.
    assert per_question(warm, Cost(14.0, starts=2), 16, 216) is None
