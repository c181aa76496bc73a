"""The bodies of requests, and the bytes of answers.

`Retrieve` and its answer are those of the server of Search-R1 (Jin et al., 2025, arXiv 2503.09516;
`search_r1/search/retrieval_server.py`), which verl's tool for search asks in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from qrag_jax.retrieval.multi_step import Hit

_Value = str | int | FiniteFloat | bool | None


class Retrieve(BaseModel):
    """The body of `POST /retrieve`; unknown fields are ignored, as by Search-R1's server.

    Attributes:
        queries: texts.
        topk: passages of each; None: as the server is set.
        return_scores: whether documents come with scores.
    """

    model_config = ConfigDict(strict=True)

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class Search(BaseModel):
    """The body of `POST /search`; see `searcher.Ask`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    questions: list[str]
    topk: int | None = None
    steps: int | None = None
    beam: int | None = None
    threshold: FiniteFloat | None = None
    where: dict[str, _Value | list[_Value]] | None = None


def contents(title: str, text: str) -> str:
    """A passage as Search-R1's corpora have it: clients take the first line for the title."""
    return f'"{title}"\n{text}'


def retrieved(hits: Sequence[Hit], scored: bool) -> list[Mapping[str, Any]]:
    """The hits of one query in Search-R1's form: {"document", "score"}, or bare documents."""
    documents: list[Mapping[str, Any]]
    documents = [{"id": hit.id, "contents": contents(hit.title, hit.text)} for hit in hits]
    if not scored:
        return documents
    pairs = zip(documents, hits, strict=True)
    return [{"document": document, "score": hit.score} for document, hit in pairs]


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8; in ASCII where a text holds half a surrogate pair, which UTF-8 has not."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False).encode()


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first of pydantic's errors in one sentence, without what the client sent.

    Args:
        errors: as `ValidationError.errors` gives them for a body.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return 'the body is no JSON; send an object such as {"queries": ["…"]}.'
    _, *place = first["loc"]
    if isinstance(first.get("input"), bytes):  # what FastAPI leaves unread
        return "the body is not said to be JSON; send the header Content-Type: application/json."
    if not place:
        return 'the body is no JSON object; send one such as {"queries": ["…"]}.'
    name = re.sub(r"\.(\d+)", r"[\1]", ".".join(map(str, place[:2])))
    if first["type"] == "missing":
        return f"the field {name} is missing; send it."
    if first["type"] == "extra_forbidden":
        return f"the field {name} is unknown; use {', '.join(Search.model_fields)}."
    message = str(first["msg"])
    return f"{name}: {message[:1].lower()}{message[1:]}."
