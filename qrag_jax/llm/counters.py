"""The client's counters: calls, failures by cause, latency and tokens."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterable

from qrag_jax.llm.outcomes import CAUSES, Failure, Outcome


class Latencies(collections.Counter[int]):
    """A histogram of seconds. Its buckets grow by 2 %, so percentiles are accurate to 1 %.

    The buckets cover 0.1 ms to one day. The first and the last one also count what lies beyond.
    """

    _SHORTEST, _LONGEST, _GROWTH = 1e-4, 86_400.0, math.log(1.02)

    def add(self, seconds: float) -> None:
        """Counts one duration."""
        seconds = min(max(seconds, self._SHORTEST), self._LONGEST)
        self[int(math.log(seconds / self._SHORTEST) / self._GROWTH)] += 1

    def percentile(self, percent: float) -> float:
        """The duration in seconds that `percent` % of all do not exceed; 0 if there are none."""
        rank = math.ceil(self.total() * percent / 100)
        for bucket in sorted(self):
            rank -= self[bucket]
            if rank <= 0:
                return self._SHORTEST * math.exp((bucket + 0.5) * self._GROWTH)
        return 0.0


@dataclasses.dataclass
class Counters:
    """Sums since the client was made; only the client's thread changes them.

    Attributes:
        tokens_in, tokens_out: tokens of answered prompts and of answers, as the server counts them.
    """

    # requests for the server, without those answered by the cache or by an identical request in
    # flight
    calls: int = 0
    answers: int = 0  # calls that got an answer
    # calls that failed, by cause
    failures: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    retries: int = 0  # attempts after the first one of each call
    # seconds from a call's first attempt to its answer, without the time spent waiting for a server
    # that was down
    latency: Latencies = dataclasses.field(default_factory=Latencies)
    tokens_in: int = 0
    tokens_out: int = 0
    cache_hits: int = 0  # answers from the cache on disk
    # answers not looked up or kept because another process held the cache's file
    cache_skipped: int = 0
    shared: int = 0  # requests that got the answer of an identical one in flight
    unread: int = 0  # answers, cached ones too, that the asker could not read (`Sampling.reads`)
    unmarked: int = 0  # answers without the mark that the prompt asks for, whose last line was read
    waited_seconds: float = 0.0  # seconds of outages, during which calls waited

    def called(self, outcome: Outcome, seconds: float, attempts: int) -> None:
        """Counts a call that has ended."""
        self.calls += 1
        self.retries += max(attempts - 1, 0)
        if isinstance(outcome, Failure):
            self.failures[outcome.cause] += 1
            return
        self.answers += 1
        self.latency.add(seconds)
        self.tokens_in += outcome.usage.prompt_tokens
        self.tokens_out += outcome.usage.completion_tokens

    def as_text(self) -> str:
        """All counters, for `of_all`."""
        return json.dumps(vars(self))

    @classmethod
    def of_all(cls, texts: Iterable[str]) -> Counters:
        """The counters of several clients, such as those of all hosts, together."""
        together = cls()
        for fields in map(json.loads, texts):
            together.latency.update({int(k): n for k, n in fields.pop("latency").items()})
            for cause, count in fields.pop("failures").items():
                together.failures[cause] += count
            for name, value in fields.items():
                setattr(together, name, getattr(together, name) + value)
        return together

    def as_metrics(self) -> dict[str, float]:
        """All counters, under names for the metric writers; times in seconds."""
        metrics = vars(self) | {"failures": sum(self.failures.values())}
        metrics |= {f"failures_{cause}": count for cause, count in self.failures.items()}
        metrics |= {f"latency_p{p}": self.latency.percentile(p) for p in (50, 90, 99)}
        del metrics["latency"]
        return {f"llm/{name}": float(value) for name, value in metrics.items()}
