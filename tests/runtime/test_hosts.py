"""Two hosts that fail, stop and tell each other numbers; one host alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.errors import FeedbackLost, InputError
from qrag_jax.llm.outcomes import Counters
from qrag_jax.runtime import hosts
from qrag_jax.runtime.hosts import AgreedStop
from qrag_jax.runtime.interrupt import Stopped
from tests.devices import environment_of, run_two_processes
from tests.entry_points import ROOT, free_address
from tests.runtime.failing_hosts import LAST, asked

FAILS = """
import os, signal, sys
import jax
from orbax.checkpoint import multihost
from qrag_jax.runtime import hosts
with hosts.joined(sys.argv[1]):
    hosts.together("all are here")
    if jax.process_index() == int(sys.argv[2]):
        if sys.argv[3] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if sys.argv[3] == "interrupted" else ValueError("of its own")
    multihost.get_barrier_sync_fn()(key="a checkpoint", timeout_ms=600_000)
"""


def test_two_hosts_fail_and_stop_together(tmp_path: Path) -> None:
    run_two_processes("tests.runtime.failing_hosts", str(tmp_path))
    first, second = (json.loads((tmp_path / f"{n}.json").read_text()) for n in (0, 1))
    every = Counters.of_all(asked(host).as_text() for host in (0, 1)).as_metrics()
    assert (every["llm/answers"], every["llm/failures_timeout"]) == (10, 2)
    for found in (first, second):
        assert found["none"] == []
        assert found["first"] == ["InputError", "no such file."]
        assert found["lost"] == ["FeedbackLost", "the model is gone."]
        assert found["stopped"] == ["Stopped", "SIGTERM"]
        assert found["exact"] == [True, True]
        assert found["asked"] == every
        assert found["failures"] == {"own": 2, "of 0": 2, "of 1": 3}
    # Each tells its own failure, if it has one.
    assert [found["both"][1] for found in (first, second)] == ["host 0.", "host 1."]
    assert 5 < first["step"] == second["step"] < LAST


@pytest.mark.parametrize(
    ("victim", "how", "status"),
    [
        (0, "fails", 1),
        (0, "interrupted", 130),
        pytest.param(1, "killed", -signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_host_that_ends_ends_those_that_wait_for_it(victim: int, how: str, status: int) -> None:
    """A barrier for a checkpoint alone would hold the other one for 10 minutes."""
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FAILS, f"{address},2,{number}", str(victim), how],
            cwd=ROOT,
            env=environment_of(1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    try:
        told = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[victim].returncode == status, told
    assert processes[1 - victim].returncode not in (0, 2), told
    assert ("ValueError: of its own" in told[victim]) == (how == "fails")


def test_one_host_is_alone() -> None:
    hosts.fail_together(None, InputError)
    with pytest.raises(FeedbackLost, match="gone"):
        hosts.fail_together(FeedbackLost("gone"), InputError)
    with pytest.raises(InputError, match="mine"):
        hosts.first_does(lambda: hosts.fail_together(InputError("mine"), FeedbackLost))
    rows = np.array([[0.1, np.nan]])
    assert hosts.of_each(rows).tobytes() == rows.tobytes()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_host_stops_at_once(number: signal.Signals) -> None:
    with AgreedStop() as stop:
        stop.before_step(1)
        signal.raise_signal(number)
        with pytest.raises(Stopped, match=number.name):
            stop.before_step(2)
    assert stop.name == number.name
