"""What a search service is to the engine: how a page of results is asked for and how it is read."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from typing import Any, NamedTuple, Protocol

from qrag_jax.errors import InputError
from qrag_jax.llm.client.replies import shorten
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.sending import Received, Request

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class Part(NamedTuple):
    """A page of results that is wanted.

    Attributes:
        query: as the model wrote it.
        since, until: the days between which a document's date must lie, both included, as
            "YYYY-MM-DD"; until "": no limit.
        size: results of the page, at most the service's `page_size`.
        cursor: what the page before gave as `following`; "": the first page.
    """

    query: str
    since: str
    until: str
    size: int
    cursor: str = ""


class Page(NamedTuple):
    """A page of results.

    Attributes:
        ids: of documents, best first.
        following: the cursor of the next page; "": there is none.
        unreadable: the service cannot read the query, so that it finds nothing.
    """

    ids: tuple[str, ...]
    following: str = ""
    unreadable: bool = False


@dataclasses.dataclass(frozen=True)
class Refused(Failure):
    """The service's answer does not tell whether the query is at fault or the service is broken."""


class Service(Protocol):
    """A search service; it knows no connection and no clock.

    Attributes:
        title: its name, for people.
        url: the official one.
        page_size: most results of a page.
        date: the field that `since` and `until` are compared with.
        takes_key: whether an API key is sent.
    """

    title: str
    url: str
    page_size: int
    date: str
    takes_key: bool

    def per_second(self, has_key: bool) -> float:
        """Requests that the service allows in a second."""

    def request(self, part: Part) -> Request:
        """Asks for the page."""

    def read(self, received: Received, part: Part) -> Page | Failure:
        """The page that an answer is, or why it is none."""


def read_object(text: str) -> dict[str, Any] | Failure:
    """The JSON object of an answer."""
    try:
        # strict=False: PubMed puts raw line breaks into texts of errors.
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return Failure("malformed", f"the answer is no JSON: {shorten(text)}")
    if not isinstance(found, dict):
        return Failure("malformed", f"the answer is no JSON object: {shorten(text)}")
    return found


def check_day(day: str, what: str) -> None:
    """Checks a date; "" is no limit.

    Raises:
        InputError: it is none of the form YYYY-MM-DD; the message begins with `what`.
    """
    if not day:
        return
    try:
        usable = bool(_DAY.fullmatch(day)) and bool(datetime.date.fromisoformat(day))
    except ValueError:
        usable = False
    if not usable:
        raise InputError(f"{what} is {day!r}; give a day such as 2015-03-31, or nothing.")
