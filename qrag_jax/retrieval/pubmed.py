"""PubMed and ClinicalTrials.gov: a query goes out, ranked ids of documents or a failure come back.

A failure is never an empty list, and an empty list is never a failure: it says that the service
read the query and found nothing, or that it cannot read the query. Live services change; the same
query may find other documents tomorrow.

PubMed is searched by ESearch of NCBI's E-utilities (NCBI Bookshelf NBK25499), one POST a search, so
that the key and long queries stay out of URLs. A query with open parentheses, such as "((", gets
HTTP 200 and "Search Backend failed: … temporarily unavailable", as in an outage. So an ordinary
query is asked as well: if that one is answered and ours is refused again, twice over, ours cannot
be read.

ClinicalTrials.gov is searched by `/studies` of its API, version 2. Its date is `StartDate`: the day
on which the study began or, where it is in the future, is to begin; of a month, its first day. The
service ignores filters where a query is a list of NCT numbers and nothing else; each study's date
is therefore compared once more here.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.llm.endpoint import LONGEST_REPLY, check_url, is_local, read_key, without_key
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.replies import read_error, retry_after, shorten
from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.retrieval.ranking import check_k

VERSION = 1  # of what is asked and how answers are read; another one finds other documents
PUBMED, CLINICAL_TRIALS = "pubmed", "clinical_trials"
RELEVANCE, DEFAULT = "relevance", "default"
KEY_VARIABLE = "NCBI_API_KEY"
_SECTION = "engine"
_CONTACT = re.compile(r"[!-~]*")  # NCBI wants no spaces
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATE = re.compile(r"(\d{4}-\d{2})(-\d{2})?")
_NUMBER = re.compile(r"NCT\d{8}")
_LONGEST_PAUSE = 30.0
_LONGEST_WAIT = 60.0  # seconds that a service may ask to wait; if more, the search fails
_ORDINARY = "cancer"  # a query that any service of medical texts can read
_SHORTEST_KEY = 16  # a shorter one could be part of an honest answer; NCBI's have 36
_SPARE_PAGES = 20  # that may be without a new document
# Causes that may pass, so that the same request is sent again.
_PASSING = ("timeout", "connection", "server", "rate_limit", "malformed")


class _Service(NamedTuple):
    """What differs between the services.

    most: results that a search can give; PubMed's ESearch reaches the first 9,999 of a query.
    page: results of a page at most.
    date: the field that days are compared with.
    per_second: requests that the service allows, of an address and of a key.
    """

    title: str
    url: str
    most: int
    page: int
    date: str
    per_second: tuple[float, float]


SERVICES = {
    PUBMED: _Service(
        "PubMed", "https://eutils.ncbi.nlm.nih.gov/entrez/eutils", 9_999, 9_999, "pdat", (3.0, 10.0)
    ),
    CLINICAL_TRIALS: _Service(
        "ClinicalTrials.gov",
        *("https://clinicaltrials.gov/api/v2", 50_000, 1_000, "StartDate", (0.8, 0.8)),
    ),
}


@dataclasses.dataclass(frozen=True)
class RemoteEngineConfig:
    """Section `engine`: a search service on the web.

    An NCBI API key for PubMed is read from the environment variable NCBI_API_KEY alone.
    """

    service: str = PUBMED  # pubmed, or clinical_trials (ClinicalTrials.gov)
    url: str = ""  # of another server with the same interface; "": the official one
    # Of this process; several processes must share them out. 0: the service's own limit, which is
    # 3 for PubMed without a key, 10 with one, and 0.8 for ClinicalTrials.gov
    requests_per_second: float = 0.0
    at_once: int = 3  # searches side by side
    most: int = 3_000  # most documents that a search gives; of PubMed 9,999 at most
    # relevance puts the best match first; default is the order in which the service gives documents
    sort: str = RELEVANCE
    first_year: int = 1970  # documents of earlier years are not searched
    timeout: float = 30.0  # seconds for one request
    # To get one page, at most; below 3, a query that PubMed cannot read is a failure
    attempts: int = 4
    pause: float = 1.0  # seconds before the second attempt; doubles, with jitter, up to 30 s
    # Seconds without a single answer after which all searches that are left fail
    patience: float = 300.0
    tool: str = "qrag_jax"  # name of the program, which NCBI asks for
    email: str = ""  # address at which NCBI may reach whoever runs the program; "": not sent

    def __post_init__(self) -> None:
        check_known(_SECTION, self, "service", SERVICES)
        check_known(_SECTION, self, "sort", (RELEVANCE, DEFAULT))
        check_least(_SECTION, self, requests_per_second=0, at_once=1, most=1, attempts=1)
        check_least(_SECTION, self, pause=0, patience=0, first_year=1000)
        if self.first_year > 9999:
            raise InputError(
                f"config.engine.first_year is {self.first_year}; use a year of four digits."
            )
        if not self.timeout > 0:
            raise InputError(f"config.engine.timeout is {self.timeout}; use seconds above 0.")
        if self.most > (most := SERVICES[self.service].most):
            raise InputError(
                f"config.engine.most is {self.most}; {self.service} gives {most} documents at most."
            )
        for name in ("tool", "email"):
            if not _CONTACT.fullmatch(getattr(self, name)):
                raise InputError(
                    f"config.engine.{name} has a space or another character that NCBI does not "
                    "take; use printable ASCII characters without spaces."
                )
        if self.url:
            parts = check_url(
                self.url, "config.engine.url", "https://eutils.ncbi.nlm.nih.gov", KEY_VARIABLE
            )
            plain = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
            object.__setattr__(self, "url", plain)


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


class Part(NamedTuple):
    """A page of results that is wanted; `cursor` is `Page.following` of the page before, or ""."""

    query: str
    since: str
    until: str
    size: int
    cursor: str = ""


class Page(NamedTuple):
    """A page of results: ids, best first, and the cursor of the next page, "" if there is none."""

    ids: tuple[str, ...]
    following: str = ""


@dataclasses.dataclass(frozen=True)
class Refused(Failure):
    """The service's answer does not tell whether the query is at fault or the service is broken."""


def pubmed_request(config: RemoteEngineConfig, part: Part) -> tuple[str, str, dict[str, str]]:
    """Method, path and fields. ESearch takes both days or none; 3000 leaves one open."""
    fields = {
        "db": "pubmed",
        "term": part.query,
        "retmode": "json",
        "retmax": str(part.size),
        "datetype": SERVICES[PUBMED].date,
        "mindate": part.since.replace("-", "/"),
        "maxdate": part.until.replace("-", "/") or "3000",
        "sort": "relevance" if config.sort == RELEVANCE else "",
        "tool": config.tool,
        "email": config.email,
    }
    return "POST", "/esearch.fcgi", {name: value for name, value in fields.items() if value}


def read_pubmed(status: int, text: str, part: Part) -> Page | Failure:
    """What an answer of ESearch means; `errorlist` and `warninglist` are of the query."""
    found = _object(text)
    if isinstance(found, Failure):
        return found if status == 200 else read_error(status, text)
    if status != 200 and "esearchresult" not in found:
        return read_error(status, text)
    if "error" in found:
        message = shorten(str(found["error"]))
        return Failure("rate_limit" if "rate limit" in message.lower() else "server", message)
    result = found.get("esearchresult")
    if not isinstance(result, dict):
        return Failure("malformed", f"the answer has no esearchresult: {shorten(text)}")
    if "ERROR" in result:
        message = shorten(str(result["ERROR"]))
        return Page(()) if message.lower().startswith("empty term") else Refused("server", message)
    if status != 200:  # a body may then tell of a bad query, and of nothing else
        return read_error(status, text)
    ids, count = result.get("idlist"), str(result.get("count"))
    if not isinstance(ids, list) or not all(map(_digits, [*ids, count])):
        return Failure("malformed", f"the answer has no count and idlist: {shorten(text)}")
    if len(ids) < (expected := min(int(count), part.size)):
        return Failure("malformed", f"the answer has {len(ids)} of {expected} ids")
    return Page(tuple(ids))


def trials_request(config: RemoteEngineConfig, part: Part) -> tuple[str, str, dict[str, str]]:
    """Method, path and fields. Without the field sort, studies come in no order at all."""
    fields = {
        "query.term": part.query,
        "filter.advanced": f"AREA[StartDate]RANGE[{part.since},{part.until or 'MAX'}]",
        "fields": "NCTId,StartDate",
        "format": "json",
        "pageSize": str(part.size),
        "sort": "@relevance" if config.sort == RELEVANCE else "",
        "pageToken": part.cursor,
    }
    return "GET", "/studies", {name: value for name, value in fields.items() if value}


def read_trials(status: int, text: str, part: Part) -> Page | Failure:
    """What an answer of `/studies` means.

    The status 400 means a bad query only where the text says so of "Other terms", the service's
    name of `query.term`; any other 400 may be due to our own fields.
    """
    if status == 400:
        bad_query = text.strip().lower().startswith("error parsing query in other terms")
        return Page(()) if bad_query else read_error(400, text)
    found = _object(text)
    if isinstance(found, Failure):
        return found
    studies, following = found.get("studies"), found.get("nextPageToken") or ""
    if not isinstance(studies, list) or not isinstance(following, str):
        return Failure("malformed", f"the answer has no studies: {shorten(text)}")
    try:
        dated = [_study(each["protocolSection"]) for each in studies]
    except (LookupError, TypeError, AttributeError, ValueError):
        return Failure("malformed", f"a study has no NCT number: {shorten(text)}")
    if dated and not any(day for _, day in dated):  # then all would be dropped
        return Failure("malformed", f"no study has a StartDate: {shorten(text)}")
    until = part.until or "9999-12-31"
    return Page(tuple(name for name, day in dated if part.since <= day <= until), following)


def _study(section: Any) -> tuple[str, str]:
    """The id of a study and its date, "YYYY-MM-DD" or "" if it has none."""
    number = section["identificationModule"]["nctId"]
    if not _NUMBER.fullmatch(number):
        raise ValueError(number)
    began = section.get("statusModule", {}).get("startDateStruct", {})
    match = _DATE.fullmatch(began.get("date", ""))
    return number, match[1] + (match[2] or "-01") if match else ""


def _object(text: str) -> dict[str, Any] | Failure:
    try:
        # strict=False: PubMed puts raw line breaks into texts of errors.
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return Failure("malformed", f"the answer is no JSON: {shorten(text)}")
    if not isinstance(found, dict):
        return Failure("malformed", f"the answer is no JSON object: {shorten(text)}")
    return found


def _digits(value: object) -> bool:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20


class RemoteEngine:
    """A search service. Any thread may search.

    Attributes:
        config: as given.
        title: the service's name, for people.
    """

    def __init__(self, config: RemoteEngineConfig) -> None:
        import httpx2

        self.config, self._service = config, SERVICES[config.service]
        self.title, self._url = self._service.title, config.url or self._service.url
        self._key = _key() if config.service == PUBMED else ""
        if self._key and len(self._key) < _SHORTEST_KEY:
            raise InputError(
                f"the key in {KEY_VARIABLE} has fewer than {_SHORTEST_KEY} characters; export it "
                "again, whole."
            )
        if self._key and not self._url.startswith("https:") and not is_local(self._url):
            raise InputError(
                f"the key in {KEY_VARIABLE} would go to {self._url} unencrypted; give an https "
                "address, or unset the variable."
            )
        allowed = self._service.per_second[bool(self._key)]
        host = urllib.parse.urlsplit(self._url).netloc
        self._limit = _shared_limit(host, config.requests_per_second or allowed)
        # A redirect is not followed, so that the key goes nowhere else.
        self._client = httpx2.Client(
            timeout=config.timeout, follow_redirects=False, trust_env=not is_local(self._url)
        )
        self._answered = time.monotonic()

    def __repr__(self) -> str:
        return f"RemoteEngine({self.digest})"

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
        """
        most: dict[tuple[str, str], int] = {}
        for each in wanted:
            check_k(each.most)
            check_day(each.until, f"the last day of the search for {each.query!r}")
            name = (each.query, each.until)
            most[name] = max(most.get(name, 0), min(each.most, self.config.most))
        self._answered = time.monotonic()
        pool = ThreadPoolExecutor(self.config.at_once, thread_name_prefix="engine")
        try:
            searches = [RemoteSearch(query, k, until) for (query, until), k in most.items()]
            found = dict(zip(most, pool.map(self._search, searches), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
        return [_cut(found[each.query, each.until], each.most) for each in wanted]

    @property
    def _since(self) -> str:
        return f"{self.config.first_year}-01-01"

    def _search(self, wanted: RemoteSearch) -> tuple[str, ...] | Failure:
        """All pages of a search, one after the other."""
        query = well_formed(wanted.query)
        out_of_time = wanted.until and wanted.until < self._since
        # ClinicalTrials.gov would give all studies for an empty query.
        if out_of_time or not any(map(str.isalnum, query)):
            return ()
        ids, cursor = dict[str, None](), ""
        for _ in range(wanted.most // self._service.page + _SPARE_PAGES):
            size = min(self._service.page, wanted.most - len(ids))
            page = self._page(Part(query, self._since, wanted.until, size, cursor))
            if isinstance(page, Failure):
                return dataclasses.replace(page, message=f"{self.title}: {page.message}")
            ids |= dict.fromkeys(page.ids)
            cursor = page.following
            if not cursor or len(ids) >= wanted.most:
                return tuple(ids)[: wanted.most]
        return Failure("malformed", f"{self.title}: page after page has no new document")

    def _page(self, part: Part) -> Page | Failure:
        """The page, or the failure of the last attempt."""
        config, proofs = self.config, 0
        for attempt in range(1, config.attempts + 1):
            if time.monotonic() - self._answered > config.patience:
                silent = f"no answer for {config.patience:g} s (config.engine.patience)"
                return Failure("connection", silent, attempt - 1)
            outcome, wait = self._ask(part)
            if isinstance(outcome, Page):
                return outcome
            if isinstance(outcome, Refused):
                if proofs == 2:
                    return Page(())
                control = part._replace(query=_ORDINARY, size=1, cursor="")
                proofs += isinstance(self._ask(control)[0], Page)
            final = attempt == config.attempts or outcome.cause not in _PASSING
            if final or wait > _LONGEST_WAIT:
                return dataclasses.replace(outcome, attempts=attempt)
            longest = min(config.pause * 2 ** (attempt - 1), _LONGEST_PAUSE)
            pause = max(wait, longest * random.uniform(0.5, 1.0))
            if outcome.cause == "rate_limit" or wait:
                self._limit.hold(pause)  # for all threads
            else:
                time.sleep(pause)
        raise AssertionError("there is one attempt at least")

    def _ask(self, part: Part) -> tuple[Page | Failure, float]:
        """What one request gives, and the seconds that the service asks to wait."""
        pubmed = self.config.service == PUBMED
        request, read = (pubmed_request, read_pubmed) if pubmed else (trials_request, read_trials)
        self._limit.wait()
        reply = self._send(*request(self.config, part))
        if isinstance(reply, Failure):
            return reply, 0.0
        status, text, headers = reply
        if status in (200, 400):
            outcome = read(status, text, part)
        elif status == 408:
            outcome = Failure("timeout", "HTTP 408: the service waited too long for the request")
        else:
            outcome = read_error(status, text)
        if isinstance(outcome, Page):
            self._answered = time.monotonic()
        return outcome, retry_after(headers) if status in (429, 503) else 0.0

    def _send(
        self, method: str, path: str, fields: Mapping[str, str]
    ) -> tuple[int, str, Mapping[str, str]] | Failure:
        """Status, text and headers of an answer, which is bounded in size and in time."""
        import httpx2

        data, late = bytearray(), time.monotonic() + self.config.timeout
        headers = {"Accept-Encoding": "identity"}  # a small packed body could expand to a huge one
        secret = {"api_key": self._key} if self._key else {}
        sent = {"params": fields} if method == "GET" else {"data": {**fields, **secret}}
        try:
            with self._client.stream(method, self._url + path, headers=headers, **sent) as reply:
                for piece in reply.iter_raw():
                    data += piece
                    if time.monotonic() > late:
                        raise httpx2.ReadTimeout("the answer takes too long")
                    if len(data) > LONGEST_REPLY:
                        return Failure("malformed", "the answer is longer than 16 MiB")
        except httpx2.TimeoutException:
            return Failure("timeout", f"no whole answer within {self.config.timeout:.3g} s")
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            why = shorten(without_key(f"{type(error).__name__}: {error}", self._key))
            whole = isinstance(error, httpx2.RemoteProtocolError) and data
            return Failure("malformed" if whole else "connection", why)
        if reply.headers.get("content-encoding", "identity").lower() != "identity":
            return Failure("malformed", "the answer is packed, which was not asked for")
        text = without_key(data.decode("utf-8", "replace"), self._key)
        return reply.status_code, text, reply.headers


def check_day(day: str, what: str) -> None:
    """Checks a date; "" is no limit."""
    if not day:
        return
    try:
        usable = bool(_DAY.fullmatch(day)) and bool(datetime.date.fromisoformat(day))
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{what} is {day!r}; give a day such as 2015-03-31, or nothing.")


class _RateLimit:
    """Lets requests of all threads through one by one, at least `gap` seconds apart."""

    def __init__(self) -> None:
        self.gap, self._free, self._lock = 0.0, 0.0, threading.Lock()

    def wait(self) -> None:
        """Returns when a request may be sent; the caller must then send one."""
        while True:
            with self._lock:
                left = self._free - time.monotonic()
                if left <= 0:
                    self._free = time.monotonic() + self.gap
                    return
            time.sleep(left)

    def hold(self, seconds: float) -> None:
        """Lets nothing through for so long, as a service asks for that is asked too often."""
        with self._lock:
            self._free = max(self._free, time.monotonic() + seconds)


_limits: dict[str, _RateLimit] = {}
_making = threading.Lock()


def _shared_limit(host: str, per_second: float) -> _RateLimit:
    """The limit of a host, the same for the whole process; of several rates the lowest holds."""
    with _making:
        limit = _limits.setdefault(host, _RateLimit())
        limit.gap = max(limit.gap, 1.0 / per_second)
        return limit


def _cut(found: tuple[str, ...] | Failure, most: int) -> tuple[str, ...] | Failure:
    return found if isinstance(found, Failure) else found[:most]


def _key() -> str:
    exported = os.environ.get(KEY_VARIABLE, "").strip()
    return read_key(KEY_VARIABLE if exported else "", KEY_VARIABLE)
