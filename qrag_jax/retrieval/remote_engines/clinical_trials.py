"""ClinicalTrials.gov, by `/studies` of its API, version 2 (https://clinicaltrials.gov/data-api/api).

The query goes into `query.term`, in the service's own syntax (Essie), and the limits of the date
into `filter.advanced`, which does not change the order. A page has up to 1,000 studies; a token
leads to the next one.

The date is `StartDate`: the day on which the study began or, where it is in the future, is to
begin. It is not the day on which the registry showed the study first. Where only the month is
known, the registry takes its first day. The service ignores filters where a query is a list of NCT
numbers and nothing else; each study's date is therefore compared once more here.

The status 400 tells of a bad query only where the text says "Error parsing query in Other terms"
(the service's name of `query.term`): this is an empty page. Any other 400 is a failure, for it may
be due to our own fields.
"""

from __future__ import annotations

import re
from typing import Any

from qrag_jax.llm.client.replies import read_error, shorten
from qrag_jax.llm.outcomes import Failure
from qrag_jax.retrieval.remote_engines.config import RELEVANCE, RemoteEngineConfig
from qrag_jax.retrieval.remote_engines.sending import GET, Received, Request
from qrag_jax.retrieval.remote_engines.service import Page, Part, read_object

_NUMBER = re.compile(r"NCT\d{8}")
_DATE = re.compile(r"(\d{4}-\d{2})(-\d{2})?")
_LAST = "9999-12-31"
_BAD_QUERY = "error parsing query in other terms"


class ClinicalTrials:
    """See `service.Service`."""

    title = "ClinicalTrials.gov"
    url = "https://clinicaltrials.gov/api/v2"
    page_size = 1_000
    date = "StartDate"
    takes_key = False

    def __init__(self, config: RemoteEngineConfig) -> None:
        # Without it, studies come in no order at all.
        self._sort = {"sort": "@relevance"} if config.sort == RELEVANCE else {}

    def per_second(self, has_key: bool) -> float:
        """About 50 requests in a minute from one address."""
        return 0.8

    def request(self, part: Part) -> Request:
        """See `service.Service`. All pages of a search must have the same fields but the size."""
        fields = {
            "query.term": part.query,
            "filter.advanced": f"AREA[{self.date}]RANGE[{part.since},{part.until or 'MAX'}]",
            "fields": f"NCTId,{self.date}",
            "format": "json",
            "pageSize": str(part.size),
            **self._sort,
            **({"pageToken": part.cursor} if part.cursor else {}),
        }
        return Request(GET, "/studies", fields)

    def read(self, received: Received, part: Part) -> Page | Failure:
        """See `service.Service`."""
        if received.status == 400:
            if received.text.strip().lower().startswith(_BAD_QUERY):
                return Page((), unreadable=True)
            return read_error(400, received.text)
        found = read_object(received.text)
        if isinstance(found, Failure):
            return found
        studies, following = found.get("studies"), found.get("nextPageToken") or ""
        if not isinstance(studies, list) or not isinstance(following, str):
            return Failure("malformed", f"the answer has no studies: {shorten(received.text)}")
        try:
            dated = [(_number(each), _day(each)) for each in studies]
        except (LookupError, TypeError, AttributeError, ValueError):
            return Failure("malformed", f"a study has no NCT number: {shorten(received.text)}")
        if dated and not any(day for _, day in dated):  # then all would be dropped
            return Failure("malformed", f"no study has a {self.date}: {shorten(received.text)}")
        until = part.until or _LAST
        return Page(tuple(number for number, day in dated if part.since <= day <= until), following)


def _number(study: Any) -> str:
    """The id of a study.

    Raises:
        LookupError, TypeError, ValueError: it has none.
    """
    number = study["protocolSection"]["identificationModule"]["nctId"]
    if not _NUMBER.fullmatch(number):
        raise ValueError(number)
    return number


def _day(study: Any) -> str:
    """The date of a study, "YYYY-MM-DD"; "" if it has none.

    Raises:
        LookupError, TypeError, AttributeError: its fields are not those of a study.
    """
    began = study["protocolSection"].get("statusModule", {}).get("startDateStruct", {})
    match = _DATE.fullmatch(began.get("date", ""))
    return match[1] + (match[2] or "-01") if match else ""
