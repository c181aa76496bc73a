"""Reads the query from what a model wrote.

Two forms are asked for (DeepRetrieval, arXiv 2503.00223, has the first):

- "tagged": `<think>…</think><answer>{"query": "…"}</answer>`. The prompt may have opened the
  thinking, so `<think>` may be missing. Each other tag stands there once, in this order. The answer
  is a JSON object whose only name is `query`, with a text.
- "bare": the whole text is the query.

What is tolerated: white space anywhere, raw line breaks in the JSON text, one code fence around the
answer, and in the tagged form any text outside the tags, which counts for nothing. A bare text may
have what a reasoning model adds: only what is behind the last `</think>` is read, tags of an answer
are taken off, and if that is JSON, it is read as in the tagged form.

What is not tolerated, and what it is called:

| outcome | what |
|---|---|
| `rewritten` | there is a query |
| `query_too_long` | the text was cut off, wherever |
| `unclosed_tags` | a tag is missing, there twice or out of order, or is in the query |
| `broken_json` | the answer is no JSON object, or one with other names, or no text is its query |
| `several_queries` | several answers, objects, names `query` or a list of queries |
| `no_query` | there is nothing, or nothing with a letter or digit |

A wrong format is the policy's own doing, so it is an outcome and not a failure. What is read as a
query has one line, none of the tags, no control character, no half of a surrogate pair, and is no
JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from qrag_jax.llm.text.extraction import well_formed
from qrag_jax.llm.text.prompts import one_line

TAGGED, BARE = FORMS = ("tagged", "bare")
# What an episode came to. `read_output` tells all but the last, which depends on the search.
REWRITTEN, NO_QUERY, TOO_LONG, UNCLOSED, BROKEN, SEVERAL, UNREADABLE = OUTCOMES = (
    "rewritten",
    "no_query",
    "query_too_long",
    "unclosed_tags",
    "broken_json",
    "several_queries",
    "unreadable_query",  # there is a query, but the search cannot read its syntax
)

_END_OF_THINK = "</think>"
_TAG = re.compile(r"</?(?:think|answer)>")
_LIKE_A_TAG = re.compile(r"</?\s*(?:think|answer)\s*>", re.IGNORECASE)
_ANSWER = ["<answer>", "</answer>"]
_LIKE_JSON = re.compile(r"(?:\[\s*)?\{")
_FENCE = "```"
# After the opening fence: it ends its line, or JSON follows it.
_LANGUAGE = re.compile(r"[\w+-]*(?=[^\S\r\n]*[\r\n{\[])")
_BETWEEN = re.compile(r"\s*,?\s*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# Objects as their (name, value) pairs, so that a name may be there twice; lists stay lists.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple, strict=False)


class Parsed(NamedTuple):
    """What was read; `query` is "" unless `outcome` is "rewritten"."""

    query: str
    outcome: str


def read_output(text: str, form: str, *, cut_off: bool) -> Parsed:
    """Reads the query in one of the `FORMS`. No text makes it raise.

    Args:
        text: what the model wrote.
        form: one of `FORMS`.
        cut_off: whether the text ended at the limit of its length.
    """
    if cut_off:
        return Parsed("", TOO_LONG)
    return _tagged(text) if form == TAGGED else _bare(text)


def _tagged(text: str) -> Parsed:
    if not text.strip():
        return Parsed("", NO_QUERY)
    tags = [*_TAG.finditer(text)]
    if tags and tags[0][0] == "<think>":
        del tags[0]
    if not tags or tags[0][0] != _END_OF_THINK:
        return Parsed("", UNCLOSED)
    answer = _answer(text, tags[1:])
    return answer if isinstance(answer, Parsed) else _from_json(answer)


def _bare(text: str) -> Parsed:
    answer: str | Parsed = text.rpartition(_END_OF_THINK)[2]
    assert isinstance(answer, str)
    if tags := [*_TAG.finditer(answer)]:
        answer = _answer(answer, tags)
        if isinstance(answer, Parsed):
            return answer
    answer = _unfenced(answer)
    # Not asked for, but a model that has learned to write JSON may go on doing so.
    return _from_json(answer) if _LIKE_JSON.match(answer) else _from_words(answer)


def _answer(text: str, tags: list[re.Match[str]]) -> str | Parsed:
    """What stands between the tags of the answer, which are all the tags that there should be."""
    names = [each[0] for each in tags]
    if names != _ANSWER:
        several = len(names) > 2 and names == _ANSWER * (len(names) // 2)
        return Parsed("", SEVERAL if several else UNCLOSED)
    return text[tags[0].end() : tags[1].start()]


def _unfenced(text: str) -> str:
    """The text without white space and one code fence around it."""
    text = text.strip()
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    inner = text[len(_FENCE) : -len(_FENCE)]
    language = _LANGUAGE.match(inner)
    return inner[language.end() if language else 0 :].strip()


def _from_json(text: str) -> Parsed:
    text = _unfenced(text)
    if not text:
        return Parsed("", NO_QUERY)
    values = _values(text)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0] if len(values[0]) > 1 else []
    if not values or not all(isinstance(each, tuple) for each in values):
        return Parsed("", BROKEN)
    if len(values) > 1:
        return Parsed("", SEVERAL)
    (pairs,) = values
    if not pairs or any(name != "query" for name, _ in pairs):
        return Parsed("", BROKEN)
    _, query = pairs[0]
    if len(pairs) > 1 or isinstance(query, list):
        return Parsed("", SEVERAL)
    return _from_words(query) if isinstance(query, str) else Parsed("", BROKEN)


def _values(text: str) -> list[Any]:
    """The JSON values that a stripped text is made of; none if anything else is in it."""
    values: list[Any] = []
    at = 0
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()
        if between[0] and at == len(text):
            return []  # a comma that nothing follows
    return values


def _from_words(text: str) -> Parsed:
    query = one_line(_CONTROL.sub(" ", well_formed(text)))
    if _LIKE_A_TAG.search(query):
        return Parsed("", UNCLOSED)
    if _LIKE_JSON.match(query):
        return Parsed("", BROKEN)
    if not any(map(str.isalnum, query)):
        return Parsed("", NO_QUERY)
    return Parsed(query, REWRITTEN)
