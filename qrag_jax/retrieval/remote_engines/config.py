"""Settings of a search service on the web: which one, how it is asked, and how patiently."""

from __future__ import annotations

import dataclasses
import re

from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.llm.server_url import check_url

PUBMED, CLINICAL_TRIALS = "pubmed", "clinical_trials"
# Results that a search can give. PubMed's ESearch reaches the first 9,999 records of a query.
MOST = {PUBMED: 9_999, CLINICAL_TRIALS: 50_000}
RELEVANCE, DEFAULT = "relevance", "default"
KEY_VARIABLE = "NCBI_API_KEY"
_SECTION = "engine"
_CONTACT = re.compile(r"[!-~]*")  # NCBI wants no spaces


@dataclasses.dataclass(frozen=True)
class RemoteEngineConfig:
    """Section `engine`: a search service on the web.

    An NCBI API key for PubMed is read from the environment variable NCBI_API_KEY alone.

    Raises:
        InputError: a field cannot be used.
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
    timeout: float = 30.0  # seconds for one request, from the connection to the last byte
    # To get one page, at most; below 3, a query that PubMed cannot read is a failure
    attempts: int = 4
    pause: float = 1.0  # seconds before the second attempt; doubles, with jitter, up to 30 s
    longest_wait: float = (
        60.0  # seconds that the service may ask to wait; if more, the search fails
    )
    # Seconds without a single answer after which all searches that are left fail
    patience: float = 300.0
    tool: str = "qrag_jax"  # name of the program, which NCBI asks for
    email: str = ""  # address at which NCBI may reach whoever runs the program; "": not told

    def __post_init__(self) -> None:
        check_known(_SECTION, self, "service", MOST)
        check_known(_SECTION, self, "sort", (RELEVANCE, DEFAULT))
        check_least(_SECTION, self, requests_per_second=0, at_once=1, most=1, attempts=1)
        check_least(_SECTION, self, pause=0, longest_wait=0, patience=0, first_year=1000)
        if self.first_year > 9999:
            raise InputError(
                f"config.engine.first_year is {self.first_year}; use a year of four digits."
            )
        if not self.timeout > 0:
            raise InputError(f"config.engine.timeout is {self.timeout}; use seconds above 0.")
        if self.most > MOST[self.service]:
            raise InputError(
                f"config.engine.most is {self.most}; {self.service} gives {MOST[self.service]} "
                "documents at most."
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
