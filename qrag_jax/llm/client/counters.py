"""The client's counters: calls, failures by cause, latency and tokens."""

from __future__ import annotations

import collections
import copy
import json
import math
import threading
from collections.abc import Iterable

from qrag_jax.llm.outcomes import CAUSES, UNMARKED, UNREAD, Answer, Failure, Outcome


class LatencyHistogram:
    """A histogram of durations. Its buckets grow by 2 %, so percentiles are accurate to 1 %.

    The buckets cover 0.1 ms to one day, in fixed memory. The first and the last bucket also count
    shorter and longer durations.
    """

    _SHORTEST, _LONGEST, _GROWTH = 1e-4, 86_400.0, math.log(1.02)

    def __init__(self) -> None:
        self._counts: collections.Counter[int] = collections.Counter()
        self._total = 0

    def add(self, seconds: float) -> None:
        """Counts one duration."""
        seconds = min(max(seconds, self._SHORTEST), self._LONGEST)
        self._counts[int(math.log(seconds / self._SHORTEST) / self._GROWTH)] += 1
        self._total += 1

    def percentile(self, percent: float) -> float:
        """The duration in seconds that `percent` % of all do not exceed; 0 if there are none."""
        rank = math.ceil(self._total * percent / 100)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return self._SHORTEST * math.exp((bucket + 0.5) * self._GROWTH)
        return 0.0

    @property
    def counts(self) -> dict[int, int]:
        """Durations by bucket."""
        return dict(self._counts)

    def join(self, counts: dict[int, int]) -> None:
        """Adds the durations of another histogram."""
        self._counts.update(counts)
        self._total += sum(counts.values())


class Counters:
    """Sums since the client was made; safe to read while it works.

    Attributes:
        calls: requests for the server, without those answered by the cache or by an identical
            request in flight.
        answers: calls that got an answer.
        failures: calls that failed, by cause.
        retries: attempts after the first one of each call.
        latency: seconds from a call's first attempt to its answer, without the time spent waiting
            for a server that was down.
        tokens_in: tokens of the prompts that got an answer, as the server counted them.
        tokens_out: tokens of the answers, as the server counted them.
        cache_hits: answers from the cache on disk.
        cache_skipped: requests not looked up in the cache because another process held its file.
        shared: requests that got the answer of an identical one in flight.
        unread: answers, cached ones too, that the asker could not read (`Sampling.reads`).
        unmarked: answers without the mark that the prompt asks for, whose last line was read.
        waited_seconds: seconds of outages, during which calls waited.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.answers = 0
        self.failures: dict[str, int] = dict.fromkeys(CAUSES, 0)
        self.retries = 0
        self.latency = LatencyHistogram()
        self.tokens_in = 0
        self.tokens_out = 0
        self.cache_hits = 0
        self.cache_skipped = 0
        self.shared = 0
        self.unread = 0
        self.unmarked = 0
        self.waited_seconds = 0.0
        self._lock = threading.Lock()

    def called(self, outcome: Outcome, seconds: float, attempts: int) -> None:
        """Counts a call that has ended."""
        with self._lock:
            self.calls += 1
            self.retries += max(attempts - 1, 0)
            if isinstance(outcome, Failure):
                self.failures[outcome.cause] += 1
                return
            self.answers += 1
            self.latency.add(seconds)
            self.tokens_in += outcome.usage.prompt_tokens
            self.tokens_out += outcome.usage.completion_tokens

    def found(self, answers: int) -> None:
        """Counts answers from the cache on disk."""
        with self._lock:
            self.cache_hits += answers

    def read(self, how: Iterable[str]) -> None:
        """Counts how answers were read."""
        with self._lock:
            counts = collections.Counter(how)
            self.unread += counts[UNREAD]
            self.unmarked += counts[UNMARKED]

    def skipped(self, requests: int) -> None:
        """Sets the number of requests that were not looked up so far."""
        with self._lock:
            self.cache_skipped = requests

    def joined(self, outcome: Outcome) -> None:
        """Counts a request that got the answer of an identical one; failures are not counted."""
        with self._lock:
            self.shared += isinstance(outcome, Answer)

    def waited(self, seconds: float) -> None:
        """Adds time spent waiting for a server that is down."""
        with self._lock:
            self.waited_seconds += seconds

    def snapshot(self) -> Counters:
        """A copy that does not change any more."""
        taken = Counters()
        with self._lock:
            for name, value in vars(self).items():
                if name != "_lock":
                    setattr(taken, name, copy.deepcopy(value))
        return taken

    def as_text(self) -> str:
        """All counters, for `of_all`."""
        taken = vars(self.snapshot())
        plain = {name: value for name, value in taken.items() if name not in ("_lock", "latency")}
        return json.dumps(plain | {"latency": [*taken["latency"].counts.items()]})

    @classmethod
    def of_all(cls, texts: Iterable[str]) -> Counters:
        """The counters of several clients, such as those of all hosts, together."""
        found = cls()
        for each in map(json.loads, texts):
            found.latency.join({bucket: count for bucket, count in each.pop("latency")})
            for cause, count in each.pop("failures").items():
                found.failures[cause] += count
            for name, value in each.items():
                setattr(found, name, getattr(found, name) + value)
        return found

    def as_metrics(self) -> dict[str, float]:
        """All counters, under names for the metric writers; times in seconds."""
        with self._lock:
            metrics = {
                "llm/calls": self.calls,
                "llm/answers": self.answers,
                "llm/failures": sum(self.failures.values()),
                **{f"llm/failures_{cause}": count for cause, count in self.failures.items()},
                "llm/retries": self.retries,
                **{f"llm/latency_p{p}": self.latency.percentile(p) for p in (50, 90, 99)},
                "llm/tokens_in": self.tokens_in,
                "llm/tokens_out": self.tokens_out,
                "llm/cache_hits": self.cache_hits,
                "llm/cache_skipped": self.cache_skipped,
                "llm/shared": self.shared,
                "llm/unread": self.unread,
                "llm/unmarked": self.unmarked,
                "llm/waited_seconds": self.waited_seconds,
            }
        return {name: float(value) for name, value in metrics.items()}
