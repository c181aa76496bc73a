"""Signals set a flag, a second Ctrl-C ends; the handlers from before come back."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from qrag_jax.runtime.interrupt import Stopped, StopSignal

HEARD: list[int] = []


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    HEARD.clear()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: HEARD.append(n)) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_only_sets_the_flag(number: signal.Signals) -> None:
    with StopSignal() as stop:
        stop.check()
        signal.raise_signal(number)
        assert (stop.requested, stop.name, HEARD) == (True, number.name, [])
        with pytest.raises(Stopped, match=number.name):
            stop.check()
    signal.raise_signal(number)
    assert [number] == HEARD


def test_a_hang_up_that_nohup_had_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested


def test_the_second_interrupt_ends_at_once() -> None:
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.name == "SIGINT"
