"""Rewards in tiers, as DeepRetrieval (arXiv 2503.00223) and its remake on TRL have them.

- `engines`, by recall: format 1; and 5 from 0.7 on, 4 from 0.5, 3 from 0.4, 1 from 0.3, 0.5 from
  0.1, 0.1 from 0.05, else -3.5. A wrong format: -4.
- `qa`, by the place of the first document with an answer: format 1; and 5 to place 5, 4 to 20, 2 to
  50, 1 to 100, 0.5 to 1000, 0.1 to 3000, else -3.5. A wrong format: -4.
- `ir`, by nDCG: 0.1 for the format and nDCG, but 0 if nDCG is 0. A wrong format: -2.
- `remake`, by recall: 0.8 recall, 0.06 for an operator, 0.1 for an operator between two groups and
  0.04 for 6 to 29 words.

DeepRetrieval trained the first two at k 3000, and the third at several k from 10 to 3000.

A query that the search cannot read has the right format. `engines` and `qa` then give -4 in place
of a tier, as DeepRetrieval does where a search raises an error. There the network may be the cause;
here it can only be the query, since a search that fails ends in no reward at all. The remake takes
all that the model wrote as the query, so it has no format; without a query all its parts are 0. An
operator is AND or OR in capitals, and a group stands in parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

ENGINES, QA, IR, REMAKE = "engines", "qa", "ir", "remake"


class Judged(NamedTuple):
    """What a preset reads of an episode.

    Attributes:
        query: what was written; "" if no query could be read.
        readable: whether the search could read it, too.
        value: recall or nDCG in [0, 1]; of `qa`, 1 / place of the answer, 0 if it is not there.
    """

    query: str
    readable: bool
    value: float


# (least value, reward), the highest first.
_ENGINES = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
# (last place, reward), the first places first.
_QA = ((5, 5.0), (20, 4.0), (50, 2.0), (100, 1.0), (1000, 0.5), (3000, 0.1))
_MISSED, _NO_SEARCH = -3.5, -4.0
_FORMAT, _NO_FORMAT = 1.0, -4.0
_IR_FORMAT, _IR_NO_FORMAT = 0.1, -2.0
_OPERATOR = re.compile(r"\b(?:AND|OR)\b")
_BETWEEN = re.compile(r"\)\s*(?:AND|OR)\s*\(")
_FEWEST_WORDS, _MOST_WORDS = 6, 29


def _engines(of: Judged) -> float:
    if not of.query:
        return _NO_FORMAT
    if not of.readable:
        return _FORMAT + _NO_SEARCH
    return _FORMAT + next((reward for least, reward in _ENGINES if of.value >= least), _MISSED)


def _qa(of: Judged) -> float:
    if not of.query:
        return _NO_FORMAT
    if not of.readable:
        return _FORMAT + _NO_SEARCH
    place = round(1 / of.value) if of.value else _QA[-1][0] + 1
    return _FORMAT + next((reward for last, reward in _QA if place <= last), _MISSED)


def _ir(of: Judged) -> float:
    if not of.query:
        return _IR_NO_FORMAT
    return _IR_FORMAT + of.value if of.value > 0 else 0.0


def _remake(of: Judged) -> float:
    between = _BETWEEN.search(of.query)
    grouped = (
        between is not None
        and "(" in of.query[: between.start()]
        and ")" in of.query[between.end() :]
    )
    words = len(of.query.split())
    return (
        0.8 * of.value
        + 0.06 * (_OPERATOR.search(of.query) is not None)
        + 0.1 * grouped
        + 0.04 * (_FEWEST_WORDS <= words <= _MOST_WORDS)
    )


class Preset(NamedTuple):
    """One reward.

    Attributes:
        measure: of `rewrite_reward.MEASURES`, which `Judged.value` has.
        reward: of an episode.
    """

    measure: str
    reward: Callable[[Judged], float]


TIERS: Mapping[str, Preset] = {
    ENGINES: Preset("recall", _engines),
    QA: Preset("answer_rank", _qa),
    IR: Preset("ndcg", _ir),
    REMAKE: Preset("recall", _remake),
}
