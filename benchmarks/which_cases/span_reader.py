"""A script that answers a question by a span of the passages that were read.

It knows no answer and is not trained. The kind of a span follows from the question: a time, a
number, yes or no, one of two alternatives, else a name. Spans of this kind are scored by the words
of the question in their passage, in a passage that names the title of theirs (the second hop), and
close to them (the sliding window of MCTest, Richardson et al., 2013), and by `RULES` of what stands
before a span, as in Quarc (Riloff and Thelen, 2000, "A Rule-based Question Answering System for
Reading Comprehension Tests"). Rules and weights were chosen by training questions.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from qrag_jax.metrics.answers import normalise
from qrag_jax.retrieval.protocol import Passage

YEAR, TIME, NUMBER, NAME = "year", "time", "number", "name"
YES, NO = "yes", "no"
_KEPT = 1 << 15  # spans of passages: many rows read the same ones
_NEAR = (60, 30)  # characters of the window before and after a span's begin and end
_BEFORE = 80  # characters that a rule looks at
_LATER = 0.002  # of the score, for each character before the span: what a text is about comes first
_LEADS = 2.0  # of a passage that names the title of the span's, where its own weighs 1
_TWO_WORDS = 0.7  # of the score of a name with two words or more, where a person is asked for


class Rule(NamedTuple):
    """What a span is worth where the question and the text before the span match.

    points: beside the weights of words, which are about 1.
    """

    question: re.Pattern[str]
    before: re.Pattern[str]
    points: float


def _rule(question: str, before: str, points: float) -> Rule:
    return Rule(re.compile(rf"\b(?:{question})\b"), re.compile(before), points)


RULES = (
    _rule("born|birth|birthday|birthplace", r"\([^)–]*$|\bborn\b[^.;]*$", 3.0),
    _rule("die|died|death", r"\([^)]*[–\-][^)–]*$|\b(?:died|death)\b[^.;]*$", 3.0),
    _rule(
        "where|place|city|town|village|county|state|country|location|area|region|island",
        r"\b(?:in|at|near|of|from|to) $|, $",
        1.5,
    ),
    _rule(
        "nationality|citizenship|country .*from|from .*country",
        r"\b(?:is|was|were|are) (?:an?|the) (?:\w+-born )?$",
        6.0,
    ),
    _rule(
        "father|father-in-law",
        r"\b(?:son|daughter|child|children) of(?: \w+){0,2} $|\bfather,? $",
        4.0,
    ),
    _rule("mother", r"\b(?:son|daughter|child) of\b.* (?:and|by)(?: \w+)? $|\bmother,? $", 4.0),
    _rule(
        "wife|husband|spouse|married",
        r"\b(?:married|wife|husband|marriage to|spouse)(?: of| was|,)?(?: \w+)? $",
        4.0,
    ),
    _rule(
        "child|son|daughter",
        r"\b(?:son|daughter|child|father|mother|children)(?: of| was| is|,)?(?: \w+)? $",
        4.0,
    ),
    _rule("director|directed", r"\b(?:directed|director)\b[^.,;]*$", 2.0),
    _rule("wrote|writer|written|author|novel", r"\b(?:written|wrote|author|novel)\b[^.;]*$", 1.0),
    _rule(
        "star|starred|starring|played|actor|actress|cast",
        r"\b(?:starring|stars|played|cast)\b[^.;]*$",
        1.0,
    ),
)

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)
_YEAR = re.compile(r"\b1\d{3}\b|\b20\d{2}\b")
_MONTH = "|".join(_MONTHS)
_CAPITAL = r"(?:(?:[A-Z]\.)+|[^\W\d_a-z][\w'’\-]*)"
_BETWEEN = "of|the|de|la|von|van|der|du|del|di|al|bin|ibn"
_FORMS = {
    YEAR: _YEAR,
    TIME: re.compile(
        rf"\d{{1,2}} (?:{_MONTH}),? \d{{4}}|(?:{_MONTH}) \d{{1,2}}, ?\d{{4}}|"
        rf"(?:{_MONTH}) \d{{4}}|{_YEAR.pattern}"
    ),
    NUMBER: re.compile(
        r"\b\d[\d,.]*\d\b|\b\d\b|"
        r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)\b"
    ),
    NAME: re.compile(rf"{_CAPITAL}(?: (?:(?:{_BETWEEN}) ){{0,2}}{_CAPITAL})*"),
}
_AT_THE_START = (
    "it he she his her they their this these in the a an as at on for its after also but by from "
    "since when while during there who we however both"
)
# Words that have a capital in a date or at the start of a sentence.
_NO_NAMES = {month.lower() for month in _MONTHS} | {*_AT_THE_START.split()}
_SMALL_WORDS = (
    "a an the of in on at to for by with and or is are was were be been do does did has have had "
    "who whom whose which what when where how that this it its his her he she they from as s both"
)
_EMPTY = frozenset(_SMALL_WORDS.split())
_SAME = dict.fromkeys(("birth", "birthday", "older", "younger"), "born")
_SAME |= dict.fromkeys(("died", "death"), "die")
_AUXILIARIES = "is are was were do does did has have had can"
_ASKS_YES = frozenset(_AUXILIARIES.split())
_PERSON = re.compile(r"\b(?:who|whose|whom)\b")
_KINDS = {
    YEAR: re.compile(r"\b(?:what|which) year\b"),
    TIME: re.compile(r"\b(?:when|what date|which date|date of|birthday)\b"),
    NUMBER: re.compile(r"\bhow (?:many|much|old|long|tall|far)\b|\bpopulation\b"),
}
_ALTERNATIVES = (
    re.compile(r"(?:[,:] (?:either )?)([^,:?]+),? or ([^?]+)\?*$"),
    re.compile(r"\b(?:between|out of) (.+?),? (?:and|or) ([^?]+)\?*$"),
    re.compile(
        r"^(?:Is|Are|Was|Were|Did|Does|Who is|Who was) (.+?),? or (.+?) "
        r"(?:born|the|first|older|younger|die|died|released|founded|made|created)\b"
    ),
)
_LATEST = re.compile(r"\b(?:later|younger|last|recent|recently|newer)\b")
_ASKS_DEATH = re.compile(r"\b(?:die|died|death)\b")
_MAKER = re.compile(r"\b(?:director|composer|performer|author|writer)s?\b")
_WORD = re.compile(r"\w+")


class Span(NamedTuple):
    """A part of a text, with what stands around it.

    form: its normal form.
    begin: its place in the text, in characters.
    near: words around it, and its own.
    before: the text before it.
    """

    text: str
    form: str
    begin: int
    near: frozenset[str]
    before: str


def answer(question: str, passages: Sequence[Passage]) -> str:
    """The span that answers the question; "" if none does.

    Without passages it is "no" for a question of yes or no, and the first of two alternatives.
    """
    if given := alternatives(question):
        return _compared(question, given, passages)
    if question.split()[:1] and question.split()[0].lower() in _ASKS_YES:
        return _yes_or_no(question, passages)
    return _best(question, passages)


def kind_of(question: str) -> str:
    """The kind of spans that answer it."""
    return next((k for k, form in _KINDS.items() if form.search(question.lower())), NAME)


def alternatives(question: str) -> tuple[str, str] | None:
    """The two things that the question lets one choose from; None: it does not."""
    for form in _ALTERNATIVES:
        if match := form.search(question):
            return match[1].strip(" ,"), match[2].strip(" ,?")
    return None


@functools.lru_cache(_KEPT)
def spans(text: str, kind: str) -> tuple[Span, ...]:
    """All spans of a kind in a text."""
    return tuple(_spans(text, kind))


def _spans(text: str, kind: str) -> Iterator[Span]:
    for match in _FORMS[kind].finditer(text):
        found, begin = match[0], match.start()
        first, _, rest = found.partition(" ")
        if kind == NAME and first.lower() in _NO_NAMES:
            if not rest or rest.split()[0].islower():
                continue
            found, begin = rest, begin + len(first) + 1
        near = text[max(0, begin - _NEAR[0]) : begin + len(found) + _NEAR[1]]
        before = text[max(0, begin - _BEFORE) : begin]
        yield Span(found, normalise(found), begin, _words(near), before)


def _best(question: str, passages: Sequence[Passage]) -> str:
    kind, asked = kind_of(question), _words(question) - _EMPTY
    weights = _weights(asked, [_read_words(each.text) for each in passages])
    plain = f" {normalise(question)} "
    rules = [rule for rule in RULES if rule.question.search(question.lower())]
    person = kind == NAME and _PERSON.search(question.lower())
    best, answer = -math.inf, ""
    for passage, worth in zip(passages, _worths(plain, weights, passages), strict=True):
        for span in spans(passage.text, kind):
            if not span.form or f" {span.form} " in plain:
                continue
            score = worth + _sum(weights, span.near) - _LATER * span.begin
            score += sum(rule.points for rule in rules if rule.before.search(span.before))
            score += _TWO_WORDS if person and " " in span.text else 0.0
            if score > best:
                best, answer = score, span.text
    return answer


def _worths(
    question: str, weights: Mapping[str, float], passages: Sequence[Passage]
) -> Iterator[float]:
    """Of each passage: its words of the question, and those of the best one that leads to it."""
    own = [_sum(weights, _read_words(each.text)) for each in passages]
    for place, passage in enumerate(passages):
        title = _title(passage)
        leads = (
            worth
            for other, worth in zip(passages, own, strict=True)
            if other is not passage and _names(other, title)
        )
        led = 0.0 if not title or title in question else max(leads, default=0.0)
        yield own[place] + _LEADS * led


def _yes_or_no(question: str, passages: Sequence[Passage]) -> str:
    """Yes if the two passages that the question names, else the first two, have a name in common.

    A name of the question does not count.
    """
    plain = f" {normalise(question)} "
    about = [each for each in passages if (title := _title(each)) and title in plain]
    two = (about if len(about) > 1 else passages)[:2]
    if len(two) < 2:
        return NO
    first, second = ({span.form for span in spans(each.text, NAME)} for each in two)
    return YES if any(f" {form} " not in plain for form in first & second - {""}) else NO


def _compared(question: str, given: tuple[str, str], passages: Sequence[Passage]) -> str:
    """The alternative with the earlier year, or the later one where the question asks for it."""
    asked = question.lower()
    years = [_year(asked, each, passages) for each in given]
    first, second = years
    if first is None or second is None:
        return given[1] if first is None and second is not None else given[0]
    return given[years.index((max if _LATEST.search(asked) else min)(first, second))]


def _year(question: str, alternative: str, passages: Sequence[Passage]) -> int | None:
    """The first year of the passage about it; of death, the second one; None: there is none.

    Where the question is about who made it, the passage about the maker.
    """
    about = [each for each in passages if _title(each) == f" {normalise(_bare(alternative))} "]
    if _MAKER.search(question):
        makers = [
            each
            for each in passages
            if each not in about and any(_names(one, _title(each)) for one in about)
        ]
        about = makers or about
    for passage in about:
        years = [int(year) for year in _YEAR.findall(passage.text)]
        if years:
            return years[1] if _ASKS_DEATH.search(question) and len(years) > 1 else years[0]
    return None


def _words(text: str) -> frozenset[str]:
    return frozenset(_SAME.get(word, word) for word in _WORD.findall(text.lower()))


_read_words = functools.lru_cache(_KEPT)(_words)


@functools.lru_cache(_KEPT)
def _read_form(text: str) -> str:
    return f" {normalise(text)} "


def _weights(asked: Collection[str], texts: Sequence[frozenset[str]]) -> dict[str, float]:
    """Of the question's words: rare ones weigh more, among the texts that were read."""
    counts = Counter(word for text in texts for word in text)
    return {word: math.log(1 + (len(texts) + 1) / (counts[word] + 0.5)) for word in sorted(asked)}


def _sum(weights: Mapping[str, float], there: Collection[str]) -> float:
    return sum(weight for word, weight in weights.items() if word in there)


def _bare(title: str) -> str:
    """A title without what tells it from others, such as (1999 film)."""
    return re.sub(r" \([^)]*\)$", "", title)


def _title(passage: Passage) -> str:
    """Its normal form between blanks; "" if it has no word."""
    form = normalise(_bare(passage.title))
    return f" {form} " if form else ""


def _names(passage: Passage, title: str) -> bool:
    return bool(title) and title in _read_form(passage.text)
