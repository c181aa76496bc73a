"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BAD_REQUEST, TOO_LARGE, BUSY, INTERNAL, GONE = KINDS = (
    "bad_request",
    "too_large",
    "busy",
    "internal",
    "client_gone",
)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Measures:
    """The counters of one server.

    Args:
        waiting: gives the number of questions in the queue.
    """

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = own = CollectorRegistry()
        self._requests = Counter(
            "qrag_requests", "Requests answered.", ("endpoint", "status"), registry=own
        )
        self._errors = Counter("qrag_errors", "Requests that failed.", ("kind",), registry=own)
        for kind in KINDS:
            self._errors.labels(kind)
        self._seconds = Histogram(
            "qrag_request_seconds",
            "From a request's arrival to its answer.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=own,
        )
        self._sizes = Histogram(
            "qrag_batch_questions", "Questions of one search.", buckets=_SIZES, registry=own
        )
        queue = Gauge("qrag_queue_questions", "Questions that wait.", registry=own)
        queue.set_function(waiting)

    def batch(self, size: int) -> None:
        """Counts a search of so many questions."""
        self._sizes.observe(size)

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Counts a request that was answered."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def error(self, kind: str) -> None:
        """Counts a failure; `kind` is one of `KINDS`."""
        self._errors.labels(kind).inc()

    def text(self) -> bytes:
        """All counters."""
        return generate_latest(self._registry)
