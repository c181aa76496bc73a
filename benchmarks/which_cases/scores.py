"""Scores of what was read, cut at 2, 4, 6 and 10 passages, of each test question.

- `all@k`: 1 if all gold passages are among the first k;
- `recall@k`: the share of them;
- `ap@10`: average precision of the list's first 10, by trec_eval's own code (`metrics.ranking`);
- `answer@k`: 1 if the answer stands in the first k, in SQuAD's normal form as whole words, which a
  script looks up. Questions whose answer is yes or no have none.
- `span_em@4`, `span_f1@4`: HotpotQA's EM and F1 of the span that a script takes from the first 4
  (`span_reader`).
- `em@4`, `f1@4`: of answers by a language model that read the first 4 (`answers`), where asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.which_cases import span_reader
from benchmarks.which_cases.found import COUNTS, MOST, READ, Found
from benchmarks.which_cases.settings import TEST, Setting, qrels
from qrag_jax.metrics import answers
from qrag_jax.metrics.answer_places import has_answer, worded
from qrag_jax.metrics.bootstrap import crossed_interval
from qrag_jax.metrics.ranking import ranking_columns

AP = f"ap@{MOST}"
ALL, RECALL, ANSWER = "all", "recall", "answer"
SPAN_EM, SPAN_F1 = f"span_em@{READ}", f"span_f1@{READ}"
Columns = dict[str, np.ndarray]  # column → float of each test question; NaN: it has none


def columns(given: Setting, found: Found) -> Columns:
    """The scores of the setting's test questions, in their order.

    A question that was not asked has NaN everywhere.
    """
    asked = given.test
    known = np.array([each.id in found.lists for each in asked])
    lists = [found.lists.get(each.id, ()) for each in asked]
    passages = {passage.name: passage for passage in given.corpus}
    scores: Columns = {}
    for k in COUNTS:
        hits = [len({*each.gold} & {*names[:k]}) for each, names in zip(asked, lists, strict=True)]
        share = np.array([hit / len(each.gold) for hit, each in zip(hits, asked, strict=True)])
        scores[f"{ALL}@{k}"] = (share == 1.0).astype(float)
        scores[f"{RECALL}@{k}"] = share
        scores[f"{ANSWER}@{k}"] = np.array(
            [
                _stands([passages[name].whole for name in names[:k]], each.answers)
                for each, names in zip(asked, lists, strict=True)
            ]
        )
    said = [
        answers.hotpotqa(
            span_reader.answer(each.text, [passages[name] for name in names[:READ]]), each.answers
        )
        for each, names in zip(asked, lists, strict=True)
    ]
    scores[SPAN_EM] = np.array([each.em for each in said])
    scores[SPAN_F1] = np.array([each.f1 for each in said])
    ranked = ranking_columns(found.lists, qrels(given, TEST), [AP])[AP]
    scores[AP] = np.array([ranked[each.id] for each in asked])
    for values in scores.values():
        values[~known] = np.nan
    return scores


def _stands(passages: Sequence[str], answers: Sequence[str]) -> float:
    looked_for = worded(answers)
    if not looked_for:
        return float("nan")
    return float(any(has_answer(text, looked_for) for text in passages))


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean, with its 95 % bootstrap interval over trainings and questions.

    Attributes:
        questions: number of questions.
    """

    mean: float
    low: float
    high: float
    questions: int

    @property
    def is_away(self) -> bool:
        """Whether the interval of a difference leaves 0 out."""
        return self.low > 0 or self.high < 0


def interval(runs: Sequence[np.ndarray]) -> Interval | None:
    """Of a column in several trainings; None: no question has a score.

    Args:
        runs: of each training, `[questions]`; questions that one of them lacks are left out.
    """
    table = np.array(runs)
    table = table[:, ~np.isnan(table).any(axis=0)]
    if not table.size:
        return None
    return Interval(*crossed_interval(table), table.shape[1])


def difference(runs: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> Interval | None:
    """Of two rows, first less second, paired by question, and by seed where both have as many.

    Where they have not, the means over the second one's trainings are compared with each training
    of the first, or the other way round, so that the larger number of trainings is drawn from.
    """
    first, second = np.array(runs), np.array(others)
    if len(first) != len(second):
        if len(first) < len(second):
            first = first.mean(axis=0, keepdims=True)
        else:
            second = second.mean(axis=0, keepdims=True)
    return interval(list(first - second))


def all_columns(given: Mapping[str, Setting], tests: Mapping[str, Found]) -> dict[str, Columns]:
    """The scores on the test of each setting that was searched."""
    return {name: columns(given[name], found) for name, found in tests.items()}
