"""Requests keep their distance, whoever sends them."""

from __future__ import annotations

import threading
import time

import pytest

from qrag_jax.retrieval.remote_engines.rate_limit import RateLimit, Timing, shared_limit
from tests.retrieval.remote_engines.scripted import FakeClock


def limit_of(clock: FakeClock, per_second: float) -> RateLimit:
    return RateLimit(per_second, Timing(clock.now, clock.sleep))


def passed(limit: RateLimit, clock: FakeClock, requests: int) -> list[float]:
    """When each of these requests may go."""
    times = []
    for _ in range(requests):
        limit.wait()
        times.append(clock.time)
    return times


@pytest.mark.parametrize("rate", [3.0, 10.0, 0.8])
def test_no_second_has_more_requests_than_the_rate(rate: float) -> None:
    clock = FakeClock()
    times = passed(limit_of(clock, rate), clock, 40)
    assert times[0] == 1000.0  # the first one waits for nothing
    for begin in times:  # by the definition: any window of 1 / rate seconds has one request
        assert sum(begin <= each < begin + 0.999 / rate for each in times) == 1
    assert times[-1] - times[0] == pytest.approx(39 / rate)  # and none waits longer than it must


def test_time_without_requests_is_not_saved_up() -> None:
    clock = FakeClock()
    limit = limit_of(clock, 2.0)
    limit.wait()
    clock.sleep(60.0)
    assert passed(limit, clock, 3) == [1060.0, 1060.5, 1061.0]


def test_a_hold_is_for_all_and_a_shorter_one_does_not_end_it() -> None:
    clock = FakeClock()
    limit = limit_of(clock, 2.0)
    limit.wait()
    limit.hold(30.0)
    limit.hold(1.0)
    assert passed(limit, clock, 2) == [1030.0, 1030.5]


def test_threads_share_one_limit() -> None:
    limit, times = RateLimit(200.0), list[float]()

    def ask() -> None:
        for _ in range(5):
            limit.wait()
            times.append(time.monotonic())

    began = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(times) == 40
    assert max(times) - began >= 39 / 200


def test_a_host_has_one_limit_and_the_lowest_rate_holds() -> None:
    one, other = shared_limit("a.invalid:1", 50.0), shared_limit("a.invalid:1", 20.0)
    assert one is other is shared_limit("a.invalid:1", 1e9)
    assert shared_limit("b.invalid:1", 50.0) is not one
    began = time.monotonic()
    for _ in range(3):
        one.wait()
    assert time.monotonic() - began >= 2 / 20
