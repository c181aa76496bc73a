"""What models write as queries: both forms, every outcome, and texts of all kinds."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest

from qrag_jax.environments.query_rewriting.output import (
    BARE,
    BROKEN,
    FORMS,
    NO_QUERY,
    OUTCOMES,
    REWRITTEN,
    SEVERAL,
    TAGGED,
    TOO_LONG,
    UNCLOSED,
    UNREADABLE,
    Parsed,
    read_output,
)

FENCED = '```json\n{"query": "Oslo"}\n```'


def tagged(answer: str) -> str:
    return f"<think>\nThe capital.\n</think>\n<answer>\n{answer}\n</answer>"


READ = [
    # The prompt may have opened the thinking.
    ('hm</think><answer>{"query": "Oslo"}</answer>', "Oslo"),
    (tagged('\t{ "query" :\n "  Oslo \\n  city\\u2028now " }'), "Oslo city now"),
    (tagged('```json {"query":\n"Oslo"} ```'), "Oslo"),
    ("Sure. " + tagged('{"query": "Oslo"}').replace("</think>", "</think> So:") + " OK?", "Oslo"),
    (tagged(r'{"query": "(\"Oslo city\" OR x) AND NOT <b>"}'), '("Oslo city" OR x) AND NOT <b>'),
    (tagged(r'{"query": "\u0141\u00f3d\u017a \ud83d\ude00 \ud800 \u0000"}'), "Łódź 😀 \ufffd"),
]
REFUSED = [
    ("", NO_QUERY),
    (tagged(r'{"query": " \n\u0000 (\"\") "}'), NO_QUERY),
    ('{"query": "Oslo"}', UNCLOSED),
    ('<think>hm</think><answer>{"query": "Oslo"}', UNCLOSED),
    ('<answer>{"query": "Oslo"}</answer><think>hm</think>', UNCLOSED),
    ('<think>an <answer> then</think><answer>{"query": "Oslo"}</answer>', UNCLOSED),
    (tagged(r'{"query": "a \u003c/answer> b"}'), UNCLOSED),
    (tagged("Oslo"), BROKEN),
    (tagged('{"query": "Oslo"} is it'), BROKEN),
    (tagged('{"query": "Oslo", "why": "capital"}'), BROKEN),
    (tagged('{"query": null}'), BROKEN),
    (tagged(r'{"query": "{\"query\": \"Oslo\"}"}'), BROKEN),
    (tagged('{"query": ["Oslo", "Bergen"]}'), SEVERAL),
    (tagged('{"query": "Oslo", "query": "Bergen"}'), SEVERAL),
    (tagged('{"query": "Oslo"}\n{"query": "Bergen"}'), SEVERAL),
    (tagged('{"query": "Oslo"}') + '<answer>{"query": "Bergen"}</answer>', SEVERAL),
]
BARELY = [
    (" Oslo\n and  Bergen\x00\u2029now ", "Oslo and Bergen now"),
    ("```text\nOslo city\n```", "Oslo city"),
    ("[Oslo] {city}", "[Oslo] {city}"),
    ("hm <answer> or so</think>\n\nOslo", "Oslo"),
    ("<think>hm</think><answer>Oslo city</answer>", "Oslo city"),
    (tagged(FENCED), "Oslo"),
]
BARELY_REFUSED = [
    ("<think>hm</think>", NO_QUERY),
    ("?!", NO_QUERY),
    ("<think>hm", UNCLOSED),
    ("</think><answer>Oslo<think></answer>", UNCLOSED),
    ("{Oslo}", BROKEN),
    ("<answer>Oslo</answer><answer>Bergen</answer>", SEVERAL),
]
CASES = [
    *((text, TAGGED, Parsed(query, REWRITTEN)) for text, query in READ),
    *((text, TAGGED, Parsed("", outcome)) for text, outcome in REFUSED),
    *((text, BARE, Parsed(query, REWRITTEN)) for text, query in BARELY),
    *((text, BARE, Parsed("", outcome)) for text, outcome in BARELY_REFUSED),
]


@pytest.mark.parametrize(("text", "form", "parsed"), CASES)
def test_what_is_written_is_a_query_or_an_outcome(text: str, form: str, parsed: Parsed) -> None:
    assert read_output(text, form, cut_off=False) == parsed
    # Even where the query is whole, what was cut off is too long: the model did not end there.
    assert read_output(text, form, cut_off=True) == Parsed("", TOO_LONG)


BOMBS = [
    "<think>" * 50_000,
    "</think>" + "<answer></answer>" * 50_000,
    "< " * 100_000,
    "</think><answer>" + '{"query":' * 100_000 + "</answer>",
    '</think><answer>{"query": ' + "[" * 100_000 + "]" * 100_000 + "}</answer>",
    "</think><answer>" + "{} " * 50_000 + "</answer>",
    '</think><answer>{"query": ' + "9" * 100_000 + "}</answer>",
    "</think><answer>```" + " " * 100_000 + "```</answer>",
    "\ud800" * 100_000,
]
PIECES = [
    "<think>", "</think>", "<answer>", "</answer>", '{"query": "', '"}', "{", "}", "[", "]", '"',
    "```", "json", "\n", " ", ",", ":", "query", "Oslo", "\\", "\\u003c", "\\ud800", "<", ">", "/",
    "\x00", "\ud83d", "\ude00", "\u200b", "\u2028", "é", "<|im_end|>", "AND", "(", ")",
]  # fmt: skip
FORMAT = ["<think>", "hm", "</think>", "<answer>", '{"query": "Oslo"}', "</answer>", "\n"]


def test_bombs_and_random_texts() -> None:
    for text in BOMBS:
        for form in FORMS:
            _check(text, form)
    draw = random.Random(0)
    outcomes = set()
    for number in range(4000):
        if number % 3 == 0:
            text = "".join(draw.choices(PIECES, k=draw.randint(0, 30)))
        elif number % 3 == 1:
            text = "".join(map(chr, draw.choices(range(0x11000), k=draw.randint(0, 20))))
            text = tagged(json.dumps({"query": text}))
        else:  # close to the format: a piece is lost, doubled or moved
            pieces = [*FORMAT]
            for _ in range(draw.randint(0, 2)):
                place = draw.randrange(len(pieces))
                change = draw.choice((FORMAT[place : place + 1], [], [pieces[place]] * 2))
                pieces[place : place + 1] = change
                draw.shuffle(pieces) if draw.random() < 0.1 else None
            text = "".join(pieces)
        for form in FORMS:
            outcomes.add(_check(text, form))
    assert outcomes == set(OUTCOMES) - {TOO_LONG, UNREADABLE}


def _check(text: str, form: str) -> str:
    """What holds of every text; the tagged form by an obvious reading, too."""
    query, outcome = read_output(text, form, cut_off=False)
    assert outcome in OUTCOMES
    assert bool(query) == (outcome == REWRITTEN)
    if query:
        assert query == " ".join(query.split())
        query.encode()
        assert not any(unicodedata.category(letter) == "Cc" for letter in query)
        assert not any(tag in query.lower() for tag in ("<think>", "</think>", "<answer>"))
        assert not query.startswith(("{", "[{"))
    if form == TAGGED:
        assert bool(query) == _is_right(text)
    return outcome


def _is_right(text: str) -> bool:
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    counts = [text.count(tag) for tag in tags]
    if counts not in ([1, 1, 1, 1], [0, 1, 1, 1]):
        return False
    places = [text.find(tag) for tag in tags]  # -1, where it is missing, is before all others
    if places != sorted(places):
        return False
    answer = text[places[2] + len("<answer>") : places[3]].strip()
    if answer.startswith("```") and answer.endswith("```") and len(answer) >= 6:
        answer = answer[3:-3].strip().removeprefix("json").strip()
    try:
        pairs = json.loads(answer, object_pairs_hook=list, strict=False)
    except (ValueError, RecursionError):
        return False
    if not answer.startswith("{") or len(pairs) != 1 or pairs[0][0] != "query":
        return False
    query = pairs[0][1]
    if not isinstance(query, str) or not any(map(str.isalnum, query)):
        return False
    plain = "".join(" " if unicodedata.category(c) == "Cc" else c for c in query)
    plain = "".join(plain.split())
    return not plain.startswith(("{", "[{")) and not any(tag in plain.lower() for tag in tags)
