"""Counts of what all hosts asked, for the log, which one of them writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

from qrag_jax.llm.client import counters
from qrag_jax.runtime import hosts


def metrics_of_all(own: counters.Counters) -> dict[str, float]:
    """The counters of all hosts' clients together, as metrics; all hosts call this together.

    Counts, tokens and seconds are sums; percentiles are those of all latencies.
    """
    return counters.Counters.of_all(hosts.texts_of_each(own.as_text())).as_metrics()


def sums_of_all(counts: Mapping[str, int]) -> dict[str, float]:
    """Sums over the hosts, each of which has names of its own; all hosts call this together."""
    total = Counter[str]()
    for text in hosts.texts_of_each(json.dumps(counts)):
        total.update(json.loads(text))
    return {name: float(count) for name, count in total.items()}
