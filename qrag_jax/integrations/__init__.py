"""A search as a retriever of other libraries: one module each; `docs/export.md` has an example.

The adapters take what searches, the most passages (None: those of all steps; more than the steps:
each step gives several), and `search_kwargs`: where, steps, beam, threshold of `Retriever.search`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.llm.endpoint import Endpoint, check_url
from qrag_jax.retrieval.multi_step import Hit

_AT_ONCE = 64  # questions of a request
Searches = Any  # `qrag_jax.Retriever` with an index open, or a `RemoteRetriever`


def metadata_of(hit: Hit) -> dict[str, Any]:
    """The passage's metadata, then its title (if it has one) and the step that found it."""
    title = {"title": hit.title} if hit.title else {}
    return {**hit.metadata, **title, "step": hit.step}


@contextlib.contextmanager
def imported(extra: str) -> Iterator[None]:
    """Around the imports of a library: says what to install if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the package {error.name} is missing: pip install 'qrag_jax[{extra}]'", name=error.name
        ) from None


@dataclasses.dataclass(frozen=True)
class RemoteRetriever:
    """The search of a running `qrag serve`: a trained retriever, a plain encoder or BM25.

    Any thread may search, and the server searches for several at once. Unlike `Retriever` it
    refuses empty questions, those that are longer than in training, and more passages than the
    corpus has.
    """

    url: str  # of the server, such as http://127.0.0.1:8000
    timeout: float = 60.0  # seconds that a request may take

    def __post_init__(self) -> None:
        check_url(self.url, "url", "http://127.0.0.1:8000", "")

    def search(
        self, questions: str | Sequence[str], steps: int | None = None, **settings: Any
    ) -> Any:
        """The passages for a question, or for each of a list; see `Retriever.search`."""
        settings = {"steps": steps, **settings}
        body: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
        if "threshold" in body:  # JSON has no infinity
            body["threshold"] = max(body["threshold"], -sys.float_info.max)
        if "where" in body:
            sets, where = (set, frozenset), body["where"]
            body["where"] = {k: [*v] if isinstance(v, sets) else v for k, v in where.items()}
        asked = [questions] if isinstance(questions, str) else list(questions)
        rows: list[list[Hit]] = []
        for first in range(0, len(asked), _AT_ONCE):
            some = asked[first : first + _AT_ONCE]
            reply = Endpoint(self.url).post("/search", body | {"questions": some}, self.timeout)
            answer = reply.json if isinstance(reply.json, dict) else {}
            if "error" in answer:
                raise InputError(f"{self.url}: {answer['error']}")
            try:
                rows += [[Hit(**hit) for hit in hits] for hits in answer["hits"]]
            except (KeyError, TypeError):
                rows = []
            if reply.status != 200 or len(rows) != first + len(some):
                raise InputError(f"{self.url} is no qrag serve ({reply.reason}); give its URL.")
        return rows[0] if isinstance(questions, str) else rows
