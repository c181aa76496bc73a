"""Searches a service on the web: queries go out side by side, ranked ids or failures come back.

A failure is never an empty list, and an empty list is never a failure: it says that the service
read the query and found nothing, or that it cannot read the query (see `pubmed` and
`clinical_trials`). Live services change; the same query may find other documents tomorrow.
"""

from __future__ import annotations

import os
import threading
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from qrag_jax.llm.client.api_key import read_key
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.well_formed import well_formed
from qrag_jax.retrieval.ranking import check_k
from qrag_jax.retrieval.remote_engines.asking import Asker, Patience
from qrag_jax.retrieval.remote_engines.clinical_trials import ClinicalTrials
from qrag_jax.retrieval.remote_engines.config import KEY_VARIABLE, PUBMED, RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.pubmed import PubMed
from qrag_jax.retrieval.remote_engines.rate_limit import RateLimit, Timing, shared_limit
from qrag_jax.retrieval.remote_engines.sending import Sender
from qrag_jax.retrieval.remote_engines.service import Part, Service, check_day

VERSION = 1  # of what is asked and how answers are read; another one finds other documents
_SPARE_PAGES = 20  # that may be without a new document


class RemoteSearch(NamedTuple):
    """A search.

    Attributes:
        query: sent as it is; without a letter or digit it finds nothing, and nothing is sent.
        most: documents wanted, at least 1; `config.engine.most` caps it.
        until: last day that a document's date may be, "YYYY-MM-DD"; "": no limit.
    """

    query: str
    most: int
    until: str = ""


class RemoteEngine:
    """A search service. Any thread may search.

    Args:
        config: which service, and how it is asked.
        timing: a clock other than the process's own; the rate limit is then not shared.

    Attributes:
        config: as given.
        unreadable: queries so far that the service could not read.

    Raises:
        InputError: the API key cannot be one, or would go unencrypted over the network.
    """

    def __init__(self, config: RemoteEngineConfig, timing: Timing | None = None) -> None:
        self.config, self.unreadable = config, 0
        self._service: Service
        self._service = PubMed(config) if config.service == PUBMED else ClinicalTrials(config)
        self._url = config.url or self._service.url
        key = _key() if self._service.takes_key else ""
        rate = config.requests_per_second or self._service.per_second(bool(key))
        host = urllib.parse.urlsplit(self._url).netloc
        limit = shared_limit(host, rate) if timing is None else RateLimit(rate, timing)
        self._timing = timing or Timing()
        sender = Sender(self._url, config.timeout, key)
        self._asker = Asker(self._service, sender, limit, config=config, timing=self._timing)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RemoteEngine({self.digest})"

    @property
    def title(self) -> str:
        """The service's name, for people."""
        return self._service.title

    @property
    def digest(self) -> str:
        """Names all that decides what a query finds, but for the last day, which searches have."""
        config = self.config
        return (
            f"{config.service} client={VERSION} url={self._url} sort={config.sort} "
            f"date={self._service.date} since={self._since} most={config.most}"
        )

    def search(self, wanted: Sequence[RemoteSearch]) -> list[tuple[str, ...] | Failure]:
        """The ids that each search finds, best first, each once; or why there are none.

        Equal queries are asked once, with the largest number wanted. Ctrl-C ends it when the
        requests in flight have ended.

        Raises:
            InputError: fewer than 1 document is wanted, or a last day is no date.
        """
        most: dict[tuple[str, str], int] = {}
        for each in wanted:
            check_k(each.most)
            check_day(each.until, f"the last day of the search for {each.query!r}")
            name = (each.query, each.until)
            most[name] = max(most.get(name, 0), min(each.most, self.config.most))
        found = self._side_by_side(most)
        return [_cut(found[each.query, each.until], each.most) for each in wanted]

    @property
    def _since(self) -> str:
        return f"{self.config.first_year}-01-01"

    def _side_by_side(
        self, most: dict[tuple[str, str], int]
    ) -> dict[tuple[str, str], tuple[str, ...] | Failure]:
        patience = Patience(self.config.patience, self._timing.now)
        pool = ThreadPoolExecutor(self.config.at_once, thread_name_prefix="engine")
        try:
            futures = {
                name: pool.submit(self._search, RemoteSearch(name[0], k, name[1]), patience)
                for name, k in most.items()
            }
            return {name: future.result() for name, future in futures.items()}
        except BaseException:  # Ctrl-C
            patience.end(Failure("connection", "interrupted"))
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _search(self, wanted: RemoteSearch, patience: Patience) -> tuple[str, ...] | Failure:
        """All pages of a search, one after the other."""
        query = well_formed(wanted.query)
        out_of_time = wanted.until and wanted.until < self._since
        # ClinicalTrials.gov would give all studies for an empty query.
        if out_of_time or not any(map(str.isalnum, query)):
            return ()
        whole, ids, cursor = self._service.page_size, dict[str, None](), ""
        for _ in range(wanted.most // whole + _SPARE_PAGES):
            size = min(whole, wanted.most - len(ids))
            page = self._asker.ask(Part(query, self._since, wanted.until, size, cursor), patience)
            if isinstance(page, Failure):
                return page
            if page.unreadable:
                with self._lock:
                    self.unreadable += 1
            ids |= dict.fromkeys(page.ids)
            cursor = page.following
            if not cursor or len(ids) >= wanted.most:
                return tuple(ids)[: wanted.most]
        return Failure("malformed", f"{self.title}: page after page has no new document")


def _cut(found: tuple[str, ...] | Failure, most: int) -> tuple[str, ...] | Failure:
    return found if isinstance(found, Failure) else found[:most]


def _key() -> str:
    exported = os.environ.get(KEY_VARIABLE, "").strip()
    return read_key(KEY_VARIABLE if exported else "", KEY_VARIABLE)
