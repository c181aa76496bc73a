"""PubMed, by ESearch of NCBI's E-utilities (NCBI Bookshelf NBK25499, "The E-utilities In-Depth").

A search is one POST: the key and long queries stay out of URLs. ESearch gives the first 9,999
records of a query and no more, so one page is all there is.

What an answer means:

| answer | it is |
|---|---|
| `idlist` with as many ids as `count` and `retmax` let expect | the page; it may be empty |
| `ERROR` that the term is empty | a query that cannot be read: an empty page |
| any other `ERROR`, also with HTTP 200 | `Refused`, see below |
| `error` in place of `esearchresult` | a failure, mostly of the rate limit |
| HTML, half a list, wrong fields | a failure |
| `errorlist`, `warninglist` | of the query; the ids beside them count, also where there are none |

`Refused`: a query with open parentheses, such as "((", is answered with HTTP 200 and "Search
Backend failed: … Search is temporarily unavailable", which is also what an outage looks like. The
text does not tell them apart, and another query does: see `asking`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qrag_jax.llm.client.replies import shorten
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.config import MOST, PUBMED, RELEVANCE, RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.sending import POST, Received, Request
from qrag_jax.retrieval.remote_engines.service import Page, Part, Refused, read_object

_NO_LIMIT = "3000"  # ESearch takes both limits or none; this is its own way to leave one open


class PubMed:
    """See `service.Service`. The date is that of publication (`datetype=pdat`)."""

    title = "PubMed"
    url = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
    page_size = MOST[PUBMED]
    date = "pdat"
    takes_key = True

    def __init__(self, config: RemoteEngineConfig) -> None:
        self._contact = {"tool": config.tool, "email": config.email}
        self._sort = {"sort": "relevance"} if config.sort == RELEVANCE else {}

    def per_second(self, has_key: bool) -> float:
        """NCBI's limits, of an address or of a key."""
        return 10.0 if has_key else 3.0

    def request(self, part: Part) -> Request:
        """See `service.Service`."""
        fields = {
            "db": "pubmed",
            "term": part.query,
            "retmode": "json",
            "retmax": str(part.size),
            "datetype": self.date,
            "mindate": part.since.replace("-", "/"),
            "maxdate": part.until.replace("-", "/") or _NO_LIMIT,
            **self._sort,
            **{name: value for name, value in self._contact.items() if value},
        }
        return Request(POST, "/esearch.fcgi", fields)

    def read(self, received: Received, part: Part) -> Page | Failure:
        """See `service.Service`."""
        found = read_object(received.text)
        if isinstance(found, Failure):
            return found
        if "error" in found:
            message = shorten(str(found["error"]))
            limited = "rate limit" in message.lower()
            return Failure("rate_limit" if limited else "server", message)
        result = found.get("esearchresult")
        if not isinstance(result, dict):
            return Failure(
                "malformed", f"the answer has no esearchresult: {shorten(received.text)}"
            )
        if "ERROR" in result:
            message = shorten(str(result["ERROR"]))
            empty = message.lower().startswith("empty term")
            return Page((), unreadable=True) if empty else Refused("server", message)
        return _page(result, part.size)


def _page(result: Mapping[str, Any], size: int) -> Page | Failure:
    ids, count = result.get("idlist"), str(result.get("count"))
    if not isinstance(ids, list) or not all(_digits(each) for each in ids) or not _digits(count):
        return Failure("malformed", f"the answer has no count and idlist: {shorten(str(result))}")
    expected = min(int(count), size)
    if len(ids) < expected:
        return Failure("malformed", f"the answer has {len(ids)} of {expected} ids")
    return Page(tuple(ids))


def _digits(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20
