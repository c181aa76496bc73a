"""Answer metrics: exact match and F1 of a predicted answer, and which texts have an answer.

There are five rules, each from a public evaluation script: SQuAD v1.1 (Rajpurkar et al., 2016),
HotpotQA (Yang et al., 2018; 2WikiMultiHopQA scores alike), MuSiQue (Trivedi et al., 2022),
BABILong (Kuratov et al., 2024) and RULER (Hsieh et al., 2024). With several gold answers, EM and F1
are each the best over them, but of RULER all are needed. Which rule a data set has is in
`data.sources`.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from qrag_jax.errors import InputError, library

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Causes by which an episode has no score in an evaluation: a server, the network or a search failed
# (`llm.outcomes`), or what scores did (`feedback`). By any other cause the model, or the agent
# around it, gave no answer, which scores 0.
INFRASTRUCTURE = frozenset(
    (
        *("timeout", "connection", "server", "rate_limit", "request"),
        *("malformed", "broken_off", "unknown_end"),
        *("unclear_verdict", "raised", "no_reward", "no_number"),
    )
)
# Normalised answers that give F1 in HotpotQA only if they are equal as a whole; they say nothing
# about a passage.
WORDLESS = frozenset({"yes", "no", "noanswer"})
ROUGE_CHARACTERS = 128  # of each text; longer answers are cut there (HARR, arXiv 2602.03645)


class Scores(NamedTuple):
    """EM, 0.0 or 1.0, and F1 in [0, 1]."""

    em: float
    f1: float


def normalise(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks.

    Punctuation is deleted first, so "well-known" becomes "wellknown" and "a." becomes "".
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def squad(prediction: str, golds: Sequence[str]) -> Scores:
    """SQuAD v1.1 on normal forms; two texts without any token have EM 1 but F1 0."""
    return _best(prediction, golds, _text_f1)


def hotpotqa(prediction: str, golds: Sequence[str]) -> Scores:
    """HotpotQA: SQuAD's rule, but "yes", "no" and "noanswer" have F1 0 with any other answer."""

    def f1(said: str, gold: str) -> float:
        whole = said != gold and {said, gold} & WORDLESS
        return 0.0 if whole else _text_f1(said, gold)

    return _best(prediction, golds, f1)


def musique(prediction: str, golds: Sequence[str]) -> Scores:
    """MuSiQue: SQuAD's rule over answer and aliases; two texts without a token have F1 1."""

    def f1(said: str, gold: str) -> float:
        return _text_f1(said, gold) if said and gold else float(said == gold)

    return _best(prediction, golds, f1)


def ruler(prediction: str, golds: Sequence[str]) -> Scores:
    """RULER's `string_match_all`: the share of the gold values whose letters are in the prediction.

    F1 is this share, without regard to case, and EM is 1 if it is 1.
    """
    said = prediction.lower()
    share = sum(gold.lower() in said for gold in golds) / len(golds)
    return Scores(float(share == 1), share)


def _best(prediction: str, golds: Sequence[str], f1: Callable[[str, str], float]) -> Scores:
    said = normalise(prediction)
    forms = [normalise(gold) for gold in golds]
    return Scores(float(said in forms), max(f1(said, gold) for gold in forms))


def _text_f1(said: str, gold: str) -> float:
    return _token_f1(said.split(), gold.split())


def _token_f1(said: Collection[str], gold: Collection[str]) -> float:
    same = sum((Counter(said) & Counter(gold)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(said), same / len(gold)
    return 2.0 * precision * recall / (precision + recall)


def sub_em(prediction: str, golds: Sequence[str]) -> float:
    """1.0 if the normal form of a gold answer stands in that of the prediction, else 0.0.

    Letters count, not words: "art" stands in "party". A gold answer without any token stands in
    none.
    """
    said = normalise(prediction)
    return float(any(form and form in said for form in map(normalise, golds)))


_ROOMS = frozenset({"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"})
_INVENTED_ROOMS = frozenset({"library", "attic", "cellar", "pantry", "porch", "studio"})
# Task → the answers it may have: those of the bAbI files, then those of our generated stories.
BABILONG_LABELS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    **{task: (_ROOMS, _INVENTED_ROOMS) for task in ("qa1", "qa2", "qa3", "qa4")},
    "qa5": (
        frozenset({"bill", "fred", "jeff", "mary", "apple", "football", "milk"}),
        frozenset({"nora", "felix", "ruth", "oscar", "lantern", "basket", "violin"}),
    ),
}


def babilong(prediction: str, golds: Sequence[str], task: str, question: str) -> Scores:
    """BABILong's rule for `task`: which of the task's labels does the answer name?

    Only the first sentence of the answer counts, and "gardens" names "garden". Labels that the
    question also names do not count: a template may repeat it ("Before the garden the milk was in
    the office."). EM is BABILong's accuracy: the gold label is named and no other. F1 compares sets
    of labels.

    Q-RAG's script uses the last word for EM and counts the question's labels in F1. A right answer
    in the template of qa3 has F1 2/3 there; here it has 1.
    """
    if task not in BABILONG_LABELS:
        known = ", ".join(BABILONG_LABELS)
        raise InputError(f"the BABILong task {task!r} has no answer metric; use one of {known}")
    # The model may go on with more examples.
    sentence, asked = re.split(r"\.|<context>|<example>", prediction.lower())[0], question.lower()
    scores = []
    for gold in golds:
        label = gold.strip().lower()
        labels = next((labels for labels in BABILONG_LABELS[task] if label in labels), None)
        if labels is None:
            raise InputError(f"{gold!r} is no label of the BABILong task {task}; use squad")
        named = {word for word in labels if word in sentence and word not in asked}
        scores.append(Scores(float(named == {label}), _token_f1(named, {label})))
    return Scores(max(score.em for score in scores), max(score.f1 for score in scores))


_ID = re.compile(r"(qa[1-5])-|(([234])hop\d?)__")
_RULES = {"squad": squad, "hotpotqa": hotpotqa, "musique": musique, "ruler": ruler}
RULES = (*_RULES, "babilong")


def whole_answers(rule: str, golds: Sequence[str]) -> tuple[str, ...]:
    """Texts that are each a right answer as a whole: with "ruler", one that has all values."""
    return (", ".join(golds),) if rule == "ruler" else tuple(golds)


def kind_of(sample_id: str) -> tuple[str, int]:
    """What an id begins with: BABILong's task, "qa3", or MuSiQue's shape, "3hop1", and its hops.

    Of other ids it is "", and hops that the id does not tell are 0.
    """
    match = _ID.match(sample_id)
    return (match[1] or match[2], int(match[3] or 0)) if match else ("", 0)


def score(
    rule: str, sample_id: str, question: str, prediction: str, golds: Sequence[str]
) -> Scores:
    """EM and F1 by a rule; `babilong` alone uses the question, and its id, which has the task."""
    if rule == "babilong":
        return babilong(prediction, golds, kind_of(sample_id)[0], question)
    return _RULES[rule](prediction, golds)


def rouge_l(prediction: str, golds: Sequence[str]) -> float:
    """F-measure in [0, 1] of the longest common subsequence of stemmed ASCII words; best gold."""
    said = prediction[:ROUGE_CHARACTERS]
    return max(
        rouge_scorer().score(gold[:ROUGE_CHARACTERS], said)["rougeL"].fmeasure for gold in golds
    )


@functools.cache
def rouge_scorer() -> Any:
    rouge = library("rouge_score.rouge_scorer", "rouge")
    return rouge.RougeScorer(["rougeL"], use_stemmer=True)


# ---------------------------------------------------------------------------- answers in texts

_KEPT = 1 << 14  # forms of documents: many rewritings of one query find the same ones

_IN_NUMBER = re.compile(r"(?<=\d)[.,](?=\d)")
# Scripts written without blanks, and Hangul, whose particles follow a word without one.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Myanmar, Khmer
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # Kana, Han
    "\uac00-\ud7a3\U00020000-\U0003ffff]"  # Hangul, Han
)


class _Words(dict[int, "str | None"]):
    """For `str.translate`: what is no letter, mark or number parts words."""

    def __missing__(self, code: int) -> str | None:
        letter, kind = chr(code), unicodedata.category(chr(code))
        if kind == "Cf":  # soft hyphens and joiners
            self[code] = None
        elif _UNSPACED.match(letter):
            self[code] = f" {letter} "
        else:
            self[code] = letter if kind[0] in "LMN" else " "
        return self[code]


_WORDS = _Words()


def worded(answers: Iterable[str]) -> list[str]:
    """The answers that a passage can hold: they have words, and are not yes or no."""
    return [a for a in answers if normalise(a) not in WORDLESS | {""}]


def answer_places(texts: Iterable[str], answers: Iterable[str]) -> Iterator[int]:
    """Indices, from 0, of the texts that have one of the answers in them.

    Whole words are compared: those of SQuAD's normal form, in which "U.S.A." is "USA", or those of
    Unicode, on which "(1962–1970)" has two; in scripts without blanks each letter is one. An answer
    without a word is in no text.
    """
    both = ((normalise(a), _unicode_words(a)) for a in answers)
    forms = {f" {form} " for pair in both for form in pair if form}
    for index, text in enumerate(texts if forms else ()):
        if any(form in _words(text) for form in forms):
            yield index


def answer_place(texts: Iterable[str], answers: Iterable[str]) -> int:
    """Place, from 1, of the first text that has one of the answers in it; 0: none has."""
    return next(answer_places(texts, answers), -1) + 1


def has_answer(text: str, answers: Iterable[str]) -> bool:
    """Whether one of the answers is in the text; see `answer_places`."""
    return answer_place([text], answers) > 0


@functools.lru_cache(_KEPT)
def _words(text: str) -> str:
    return f" {normalise(text)} \n {_unicode_words(text)} "


def _unicode_words(text: str) -> str:
    bare = _IN_NUMBER.sub("", unicodedata.normalize("NFKC", text).casefold())
    words = unicodedata.normalize("NFC", bare).translate(_WORDS).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
