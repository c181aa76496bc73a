"""PubMed and ClinicalTrials.gov: a query goes out, ranked ids of documents or a failure come back.

A failure is never an empty list, and an empty list is never a failure: it says that the service
read the query and found nothing, or that it cannot read the query. Live services change; the same
query may find other documents tomorrow.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from qrag_jax.errors import Count, InputError, Positive, least, one_of
from qrag_jax.llm.endpoint import check_url, http_options, is_local, read_key, without_key
from qrag_jax.llm.outcomes import Failure, read_error, retry_after, shorten, well_formed

VERSION = 2  # of what is asked and how answers are read; another one finds other documents
PUBMED, CLINICAL_TRIALS = "pubmed", "clinical_trials"
KEY_VARIABLE = "NCBI_API_KEY"
TRIALS_PAGE = 1_000  # studies of a page at most
PAUSE = 1.0  # seconds before a request that failed is sent again, once
_MOST = {PUBMED: 9_999, CLINICAL_TRIALS: 50_000}  # documents that a search can reach
_LONGEST_WAIT = 60.0  # seconds that a service may ask to wait
_AT_ONCE = 3  # searches side by side
_NCBI = "https://eutils.ncbi.nlm.nih.gov/entrez/eutils"
_TRIALS = "https://clinicaltrials.gov/api/v2"
RATES = {PUBMED: (3.0, 10.0), CLINICAL_TRIALS: (0.8, 0.8)}  # a second, without and with a key


@dataclasses.dataclass(frozen=True)
class RemoteEngineConfig:
    """Section `engine`: a search service on the web.

    An NCBI API key for PubMed is read from the environment variable NCBI_API_KEY alone.
    """

    # pubmed, or clinical_trials (ClinicalTrials.gov)
    service: Annotated[str, one_of(_MOST)] = PUBMED
    url: str = ""  # of another server with the same interface; "": the official one
    most: Count = 3_000  # most documents that a search gives; of PubMed 9,999 at most
    first_year: Annotated[int, least(1000)] = 1970  # documents of earlier years are not searched
    timeout: Positive = 30.0  # seconds for one request
    email: str = ""  # address at which NCBI may reach whoever runs the program; "": not sent

    def __post_init__(self) -> None:
        if self.url:
            check_url(self.url, "config.engine.url", _NCBI, KEY_VARIABLE)


class _Failed(Exception):
    """There is no answer; the arguments are those of a `Failure`."""


Ids = tuple[str, ...]
Ask = Callable[[dict[str, str]], dict[str, Any]]  # fields → what the JSON of the answer says


def search_pubmed(ask: Ask, config: RemoteEngineConfig, query: str, most: int, until: str) -> Ids:
    """ESearch of NCBI's E-utilities (NCBI Bookshelf NBK25499), one POST a search.

    So the key and long queries stay out of URLs.
    """
    fields = {"db": "pubmed", "retmode": "json", "sort": "relevance", "tool": "qrag_jax"}
    fields |= {"email": config.email} if config.email else {}
    # ESearch takes both days or none; 3000 leaves one open.
    last = until.replace("-", "/") or "3000"
    fields |= {"datetype": "pdat", "mindate": f"{config.first_year}/01/01", "maxdate": last}

    def esearch(term: str, most: int) -> Ids | None:
        result = ask(fields | {"term": term, "retmax": str(most)})["esearchresult"]
        if "ERROR" in result:
            return () if result["ERROR"].lower().startswith("empty term") else None
        ids = tuple(map(str, result["idlist"]))
        if len(ids) < min(int(result["count"]), most) or not all(map(str.isdecimal, ids)):
            raise ValueError(f"{len(ids)} ids")
        return ids

    ids = esearch(query, most)
    if ids is None:
        # A query with open parentheses, such as "((", gets HTTP 200 and "Search Backend failed: …
        # temporarily unavailable", as in an outage. So an ordinary query is asked as well.
        control, ids = esearch("cancer", 1), esearch(query, most)
        if ids is None and control is None:
            raise _Failed("server", "the service refuses all queries")
    return ids or ()


def search_trials(ask: Ask, config: RemoteEngineConfig, query: str, most: int, until: str) -> Ids:
    """`/studies` of the API of ClinicalTrials.gov, version 2, page by page.

    The date is `StartDate`: the day on which the study began or, where it is in the future, is to
    begin; of a month, its first day. The service ignores filters where a query is a list of NCT
    numbers and nothing else; each study's date is therefore compared once more here.
    """
    since = f"{config.first_year}-01-01"
    days = f"AREA[StartDate]RANGE[{since},{until or 'MAX'}]"
    fields = {"query.term": query, "filter.advanced": days}
    # Without `sort`, studies come in no order at all.
    fields |= {"fields": "NCTId,StartDate", "format": "json", "sort": "@relevance"}
    ids = dict[str, None]()
    for _ in range(most // TRIALS_PAGE + 20):  # some pages may be without a new study
        reply = ask(fields | {"pageSize": str(min(TRIALS_PAGE, most - len(ids)))})
        studies = [study["protocolSection"] for study in reply["studies"]]
        began = [study.get("statusModule", {}).get("startDateStruct", {}) for study in studies]
        if studies and not any(began):  # then all would be dropped
            raise ValueError("no study has a StartDate")
        for study, date in zip(studies, began, strict=True):
            name, day = study["identificationModule"]["nctId"], f"{date.get('date', '')}-01"[:10]
            if since <= day <= (until or "9999"):
                ids[name] = None
        fields["pageToken"] = reply.get("nextPageToken", "")
        if not fields["pageToken"] or len(ids) >= most:
            return tuple(ids)
    raise ValueError("page after page has no new study")


# URL → `time.monotonic()` at which the next request may go: one limit for the whole process.
_FREE: dict[str, float] = {}
_TURN = threading.Lock()


class RemoteEngine:
    def __init__(self, config: RemoteEngineConfig) -> None:
        import httpx2

        self.config, self._pubmed, self._key = config, config.service == PUBMED, ""
        self.title = "PubMed" if self._pubmed else "ClinicalTrials.gov"
        self._url = config.url.rstrip("/") or (_NCBI if self._pubmed else _TRIALS)
        if self._pubmed and os.environ.get(KEY_VARIABLE, "").strip():
            self._key = read_key(KEY_VARIABLE, KEY_VARIABLE)
        if self._key and not self._url.startswith("https:") and not is_local(self._url):
            raise InputError(f"{KEY_VARIABLE} would go to {self._url}; unset it, or give https.")
        self._gap = 1 / RATES[config.service][bool(self._key)]
        options = http_options(self._url, "", httpx2.HTTPTransport)  # the key is a field
        self._client = httpx2.Client(timeout=config.timeout, **options)
        # Names all that decides what a query finds, but for the last day, which searches have.
        self.digest = (
            f"{config.service} client={VERSION} url={self._url} since={config.first_year} "
            f"most={config.most}"
        )

    def search(self, wanted: Sequence[tuple[str, int, str]]) -> list[Ids | Failure]:
        """The ids that each search finds, best first, each once; or why there are none.

        Args:
            wanted: queries, how many ids of each, and the last day of a document's date,
                "YYYY-MM-DD", or "". For a query without a letter or digit nothing is sent.
        """
        pool = ThreadPoolExecutor(_AT_ONCE)
        try:
            return list(pool.map(lambda search: self._search(*search), wanted))
        finally:
            pool.shutdown(cancel_futures=True)  # for Ctrl-C

    def _search(self, query: str, most: int, until: str) -> Ids | Failure:
        query, most = well_formed(query), min(most, self.config.most, _MOST[self.config.service])
        # ClinicalTrials.gov would give all studies for an empty query.
        if not any(map(str.isalnum, query)) or "" < until < str(self.config.first_year):
            return ()
        find = search_pubmed if self._pubmed else search_trials
        for attempts in (1, 2):  # a second one if that may help
            time.sleep(PAUSE if attempts > 1 else 0)
            try:
                ids = find(self._ask, self.config, query, most, until)
                return tuple(dict.fromkeys(ids))[:most]
            except _Failed as failed:
                cause, message = failed.args
            except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                why = shorten(f"{type(error).__name__}: {error}")
                cause, message = "malformed", f"the answer cannot be read ({why})"
            if cause in ("request", "too_long"):
                break
        return Failure(cause, f"{self.title}: {message}", attempts)

    def _ask(self, fields: dict[str, str]) -> dict[str, Any]:
        """The answer of one request; messages of failures are without the key."""
        import httpx2

        with _TURN:
            time.sleep(max(_FREE.get(self._url, 0.0) - time.monotonic(), 0.0))
            _FREE[self._url] = time.monotonic() + self._gap
        try:
            if self._pubmed:
                form = fields | ({"api_key": self._key} if self._key else {})
                reply = self._client.post(f"{self._url}/esearch.fcgi", data=form)
            else:
                reply = self._client.get(f"{self._url}/studies", params=fields)
        except httpx2.TimeoutException:
            raise _Failed("timeout", f"no answer within {self.config.timeout:.3g} s") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = without_key(f"{type(error).__name__}: {error}", self._key)
            raise _Failed("connection", shorten(why)) from None
        text = without_key(reply.content.decode(errors="replace"), self._key)
        if reply.status_code in (429, 503):  # asked too often
            time.sleep(min(retry_after(reply.headers), _LONGEST_WAIT))
        if reply.status_code == 400 and "error parsing query in other terms" in text.lower():
            return {"studies": []}  # "Other terms" is the name of `query.term`: a bad query
        if reply.status_code != 200:
            failure = read_error(reply.status_code, text)
            raise _Failed(failure.cause, failure.message)
        # strict=False: PubMed puts raw line breaks into texts of errors.
        said = dict(json.loads(text, strict=False))
        if "rate limit" in str(said.get("error")).lower():  # PubMed's, with the status 200
            raise _Failed("rate_limit", shorten(str(said["error"])))
        return said
