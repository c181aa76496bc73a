from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qrag_jax.runtime.interrupt import StopSignal

WAITS_FOR_STOP = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
from qrag_jax.runtime.interrupt import StopSignal
with StopSignal() as stop:
    print("ready", stop.requested, stop.name, flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("stopping", stop.name, flush=True)
print("done", flush=True)
"""

NEVER_STOPS = """
import time
from qrag_jax.runtime.interrupt import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    said = False
    while True:
        time.sleep(0.01)
        if stop.requested and not said:
            print("heard", stop.name, flush=True)
            said = True
"""

LEFT = """
import time
from qrag_jax.runtime.interrupt import StopSignal
with StopSignal() as stop:
    pass
print("ready", flush=True)
time.sleep(30)
"""


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    with started(WAITS_FOR_STOP) as process:
        assert line(process) == "ready False None"
        process.send_signal(number)
        assert line(process) == f"stopping {number.name}"
        assert line(process) == "done"
        assert process.wait(timeout=20) == 0


def test_a_hang_up_that_nohup_had_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_interrupt_ends_the_process_at_once() -> None:
    with started(NEVER_STOPS) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert line(process) == "heard SIGINT"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert "KeyboardInterrupt" in errors
        assert process.returncode == -signal.SIGINT


def test_after_leaving_a_signal_kills_again() -> None:
    with started(LEFT) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM


def test_earlier_handlers_come_back_even_after_an_error() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    interrupt = signal.getsignal(signal.SIGINT)

    def interrupted_and_failing() -> None:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert stop.requested
            assert heard == []
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            interrupted_and_failing()
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is interrupt
    finally:
        signal.signal(signal.SIGTERM, before)
