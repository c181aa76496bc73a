"""Guards of the training of a query rewriter: measures that show hacks, and limits that end them.

A policy that is paid for what its queries find may write the answer that it remembers into the
query, make the query ever longer, or repeat words. Or it may collapse: into text that is far from
what it began with, or that is always the same. `guard_measures` shows the first three, query by
query; the KL and the entropy of the update show the last two. `Guards` looks at their means, update
by update.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from qrag_jax.errors import InputError, check_known, check_least
from qrag_jax.metrics.answer_places import has_answer

GUARD_MEASURES = (
    "answer_in_query",
    "repetition",
    "kept_words",
    "new_words",
    "query_words",
    "echo",
)
STOP, TELL = ACTIONS = ("stop", "tell")
_SECTION = "guards"

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_POSSESSIVE = re.compile(r"(?<=\w)['’]s\b", re.IGNORECASE)
_OPERATORS = frozenset({"AND", "OR", "NOT"})
# A field behind a term, such as [tiab] or [Title/Abstract:~3].
_FIELD = re.compile(r"(?<=[\w\"')*])\[[A-Za-z][A-Za-z0-9/ :~-]{0,40}\]")


def guard_measures(original: str, query: str, answers: Sequence[str]) -> dict[str, float]:
    """Each of `GUARD_MEASURES` of one rewritten query.

    Words have no case, no punctuation and no possessive 's. Boolean operators in capitals and names
    of fields are no words, or each Boolean query would repeat itself.

    - `answer_in_query`: 1 if an answer is in the query and not in the original, both as
      `metrics.answer_places` compares them; else 0;
    - `repetition`: share of the query's words that are there before, 0 without words;
    - `kept_words`: share of the original's words that are in the query, 1 if it has none;
    - `new_words`: share of the query's words that are not in the original, 0 without words;
    - `query_words`: parts of the query between blanks, of whatever kind;
    - `echo`: 1 if both have the same words and operators in the same order; else 0.
    """
    before, after = _words(original), _words(query)
    known, written = set(before), set(after)
    leaked = any(has_answer(query, [each]) and not has_answer(original, [each]) for each in answers)
    return {
        "answer_in_query": float(leaked),
        "repetition": 1 - len(written) / len(after) if after else 0.0,
        "kept_words": sum(each in written for each in before) / len(before) if before else 1.0,
        "new_words": sum(each not in known for each in after) / len(after) if after else 0.0,
        "query_words": float(len(query.split())),
        "echo": float(_in_order(query) == _in_order(original)),
    }


def _in_order(text: str) -> list[str]:
    plain = _plain(text).casefold()
    return _WORD.findall(plain) or plain.split()


def _words(text: str) -> list[str]:
    found = _WORD.findall(_FIELD.sub(" ", _plain(text)))
    return [each.casefold() for each in found if each not in _OPERATORS]


def _plain(text: str) -> str:
    return _POSSESSIVE.sub("", unicodedata.normalize("NFKC", text))


@dataclasses.dataclass(frozen=True)
class GuardsConfig:
    """Section `guards`: limits of an update's means, and what happens beyond them."""

    # KL to the stage's first weights, nats a token; it is measured if the algorithm's beta is
    # above 0. 0: no limit
    max_kl: float = 0.0
    min_entropy: float = 0.0  # of the policy, nats a token; 0: no limit
    max_words: float = 0.0  # words of a query; 0: no limit
    max_repetition: float = 0.0  # share of a query's words that repeat an earlier one; 0: no limit
    patience: int = 5  # updates in a row beyond a limit until something happens
    action: str = STOP  # what happens: stop (the run ends), or tell (a line is printed)

    def __post_init__(self) -> None:
        fields = [limit.field for limit in _LIMITS]
        check_least(_SECTION, self, **dict.fromkeys(fields, 0.0), patience=1)
        check_known(_SECTION, self, "action", ACTIONS)
        for name in fields:
            if not math.isfinite(getattr(self, name)):
                raise InputError(
                    f"config.{_SECTION}.{name} is {getattr(self, name)}; use a finite number, or "
                    "0 for no limit."
                )
        if self.max_repetition >= 1:
            raise InputError(
                f"config.{_SECTION}.max_repetition is {self.max_repetition}, which no share of "
                "words is above; use a share below 1."
            )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that have a limit."""
        return tuple(each.metric for each in _LIMITS if getattr(self, each.field))


class _Limit(NamedTuple):
    """What is limited.

    field: of `GuardsConfig`.
    metric: its name among the metrics.
    said: what it is.
    unit: with a blank before it.
    most: whether it is the highest value, or else the lowest one.
    """

    field: str
    metric: str
    said: str
    unit: str
    most: bool = True

    def sentence(self, value: float, limit: float, updates: int) -> str:
        side = "above" if self.most else "below"
        times = f"the last {updates} updates" if updates > 1 else "the last update"
        return (
            f"{self.said} ({self.metric}) is {value:.6g}{self.unit} and was {side} "
            f"config.{_SECTION}.{self.field}, {limit:.6g}, in {times}."
        )


_LIMITS = (
    _Limit("max_kl", "kl", "the KL to the stage's first weights", " nats a token"),
    _Limit("min_entropy", "entropy", "the policy's entropy", " nats a token", most=False),
    _Limit("max_words", "query_words", "the length of queries", " words"),
    _Limit("max_repetition", "repetition", "the share of repeated words", ""),
)


class Guards:
    """Counts, for each limit, the updates in a row that were beyond it.

    What it says depends on its config, its state and the metrics alone.
    """

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self._beyond = {each.metric: 0 for each in _LIMITS}

    def look(self, metrics: Mapping[str, float]) -> str | None:
        """Looks at an update.

        Where a limit's count reaches the patience, it begins anew.

        Args:
            metrics: the update's means, by name: `kl`, `entropy`, `query_words`, `repetition`, as
                far as they have a limit. NaN tells that an update had nothing to measure; it
                neither counts nor ends a row.

        Returns:
            A sentence for each limit whose count reaches the patience, which is then for the caller
            to act on; None if there is none.
        """
        told = []
        for each in _LIMITS:
            limit = getattr(self._config, each.field)
            if not limit:
                continue
            if each.metric not in metrics:
                raise InputError(
                    f"config.{_SECTION}.{each.field} is {limit}, and this run does not measure "
                    f"{each.metric}; set it to 0."
                )
            value = float(metrics[each.metric])
            if math.isnan(value):
                continue
            beyond = value > limit if each.most else value < limit
            self._beyond[each.metric] = self._beyond[each.metric] + 1 if beyond else 0
            if self._beyond[each.metric] >= self._config.patience:
                self._beyond[each.metric] = 0
                told.append(each.sentence(value, limit, self._config.patience))
        return " ".join(told) or None

    def state(self) -> dict[str, int]:
        """Metric → updates in a row beyond its limit; JSON can hold it."""
        return dict(self._beyond)

    def restore(self, state: Mapping[str, int]) -> None:
        """Goes on from a state that `state` gave.

        Raises:
            ValueError: it is not such a state.
        """
        counts = dict(state)
        whole = all(type(each) is int and each >= 0 for each in counts.values())
        if counts.keys() != self._beyond.keys() or not whole:
            raise ValueError(f"the state of guards has one count for each metric, not {counts}")
        self._beyond = {name: counts[name] for name in self._beyond}
