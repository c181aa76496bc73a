"""Signals that stop a host; two hosts that fail, stop and report numbers to each other.

`python -m tests.runtime.test_hosts OUT ADDRESS PROCESS` is one of the two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.feedback.rewards import Watch, sums_of_all
from qrag_jax.runtime import hosts
from qrag_jax.runtime.hosts import AgreedStop
from qrag_jax.runtime.interrupt import Stopped
from tests.devices import run_two_processes

# ---------------------------------------------------------------------- one host


def test_a_second_ctrl_c_ends_at_once_and_an_ignored_hang_up_stays_ignored() -> None:
    """Runs that are stopped by one: tests/test_train.py."""
    heard: list[int] = []
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda number, _: heard.append(number)),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # as nohup does
    }
    try:
        with AgreedStop() as stop:
            signal.raise_signal(signal.SIGHUP)
            stop.before_step()
            signal.raise_signal(signal.SIGINT)
            for check in (stop.check, stop.before_step):
                with pytest.raises(Stopped, match="SIGINT"):
                    check()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]  # the handler from before is back
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------- two hosts

LAST = 600  # step


def test_two_hosts_fail_and_stop_together(tmp_path: Path) -> None:
    run_two_processes(__name__, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    for found in (first, second):
        assert found["none"] == []
        assert found["first"] == ["InputError", "no such file."]
        assert found["lost"] == ["FeedbackLost", "the model is gone."]
        assert found["stopped"] == ["Stopped", "SIGTERM"]
        assert found["in play"] == ["Stopped", "SIGTERM"]
        assert found["exact"] == [True, True]
        assert found["failures"] == {"both": 2, "of 0": 2, "of 1": 3}
    # Each raises its own failure, if it has one.
    assert [found["both"][1] for found in (first, second)] == ["host 0.", "host 1."]
    assert first["step"] == second["step"]
    assert 5 < first["step"][0] < LAST
    assert first["step"][1] == "SIGINT"


def raised(do: Callable[[], object]) -> list[str]:
    """What a call raises: the class and the sentence."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def stopped_before() -> tuple[int, str]:
    """The step before which this host stops, and why; a signal reaches the second one alone."""
    with AgreedStop() as stop:
        for step in range(1, LAST):
            try:
                stop.before_step()
            except Stopped as why:
                return step, str(why)
            if step == 5 and jax.process_index():
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
            stop.check()  # between two steps no host stops
            time.sleep(0.01 * (1 + jax.process_index()))
    return LAST, ""


def stopped_in_play() -> list[str]:
    """What is raised if a signal reaches the second host, whose model is dead, while it plays."""

    def play() -> None:
        while jax.process_index():
            watch.check()
            time.sleep(0.01)

    with AgreedStop() as stop:
        watch = Watch(stop, str)
        if jax.process_index():
            os.kill(os.getpid(), signal.SIGTERM)
        return raised(lambda: hosts.all_or_none(play))


def one_of_two(out: Path, address: str, number: int) -> None:
    with hosts.joined(f"{address},2,{number}"):
        compared(out, number)


def compared(out: Path, number: int) -> None:
    def refuse() -> None:
        raise InputError("no such file.")

    lost, stopped = (None, FeedbackLost("the model is gone.")), (None, Stopped("SIGTERM"))
    values = [np.array([[1 / 3, np.nan], [n, -0.0]]) for n in (0, 1)]
    gathered = hosts.of_each(values[number])
    found = {
        "none": raised(lambda: hosts.fail_together(None, InputError)),
        "first": raised(lambda: hosts.first_does(refuse)),
        "lost": raised(lambda: hosts.fail_together(lost[number], FeedbackLost)),
        "stopped": raised(lambda: hosts.fail_together(stopped[number], FeedbackLost)),
        "both": raised(lambda: hosts.fail_together(InputError(f"host {number}."), FeedbackLost)),
        "exact": [x.tobytes() == y.tobytes() for x, y in zip(gathered, values, strict=True)],
        "failures": sums_of_all({"both": 1, f"of {number}": 2 + number}),
        "step": stopped_before(),
        "in play": stopped_in_play(),
    }
    (out / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
