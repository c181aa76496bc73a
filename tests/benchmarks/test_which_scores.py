"""Scores of the suite which against obvious NumPy, and what their differences say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.which_cases import scores, span_reader
from benchmarks.which_cases.found import COUNTS, MOST, Asking, Found
from benchmarks.which_cases.invented import Sizes
from benchmarks.which_cases.scores import AP, difference, interval
from benchmarks.which_cases.settings import Setting
from qrag_jax.metrics import answers
from tests.benchmarks import invented_setting


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"), Sizes(test=12))


def found(given: Setting, seed: int) -> Found:
    """Lists of random passages, of which some are gold."""
    rng = np.random.default_rng(seed)
    names, lists = [passage.name for passage in given.corpus], {}
    for asked in given.test:
        others = rng.permutation(names)[:6].tolist()
        mixed = [*others, *rng.permutation(asked.gold)[: rng.integers(3)].tolist()]
        lists[asked.id] = tuple(dict.fromkeys(rng.permutation(mixed).tolist()))[:MOST]
    return Found(lists, Asking())


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_a_loop(given: Setting, seed: int) -> None:
    read = found(given, seed)
    made = scores.columns(given, read)
    by_name = {passage.name: passage for passage in given.corpus}
    texts = {name: passage.whole for name, passage in by_name.items()}
    for place, asked in enumerate(given.test):
        names = read.lists[asked.id]
        for k in COUNTS:
            hits = [name for name in names[:k] if name in asked.gold]
            assert made[f"recall@{k}"][place] == pytest.approx(len(hits) / len(asked.gold))
            assert made[f"all@{k}"][place] == float(len(hits) == len(asked.gold))
            words = [texts[name].lower() for name in names[:k]]
            stands = any(asked.answers[0].lower() in text for text in words)
            assert made[f"answer@{k}"][place] == float(stands)
        passages = [
            passage for name in names[:4] for passage in given.corpus if passage.name == name
        ]
        said = span_reader.answer(asked.text, passages)
        em, f1 = answers.hotpotqa(said, asked.answers)
        assert (made["span_em@4"][place], made["span_f1@4"][place]) == (em, f1)
        precisions = [
            sum(name in asked.gold for name in names[: rank + 1]) / (rank + 1)
            for rank, name in enumerate(names)
            if name in asked.gold
        ]
        assert made[AP][place] == pytest.approx(sum(precisions) / len(asked.gold))


def test_a_question_that_was_not_asked_has_no_score(given: Setting) -> None:
    read = found(given, 0)
    lists = dict(list(read.lists.items())[:5])
    made = scores.columns(given, Found(lists, Asking()))
    for values in made.values():
        assert np.isnan(values[5:]).all()
        assert not np.isnan(values[:5]).any()
    kept = interval([made[AP]])
    assert kept is not None
    assert kept.questions == 5
    assert interval([np.full(3, np.nan)]) is None


def test_yes_is_looked_for_in_no_passage(given: Setting) -> None:
    assert np.isnan(scores._stands(["yes, it is"], ("yes",)))
    assert scores._stands(["It was Oslo."], ("Oslo",)) == 1.0
    assert scores._stands(["It was Osloer."], ("Oslo",)) == 0.0
    assert scores._stands([], ("Oslo",)) == 0.0


def test_differences_are_paired_by_question_and_seed() -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(size=(3, 200)) * 5
    gain = difference(list(hard + 0.5), list(hard))
    assert gain is not None
    assert gain.mean == pytest.approx(0.5)
    assert gain.low == pytest.approx(0.5)
    assert gain.is_away
    # Three trainings and one: the mean is that of the difference, whichever comes first.
    one = [hard.mean(axis=0)]
    more, less = difference(list(hard + 1.0), one), difference(one, list(hard + 1.0))
    assert more is not None
    assert less is not None
    assert more.mean == pytest.approx(1.0)
    assert less.mean == pytest.approx(-1.0)


def test_chance_is_not_away_from_zero() -> None:
    rng = np.random.default_rng(1)
    gain = difference([rng.integers(0, 2, 100).astype(float)], [rng.integers(0, 2, 100) * 1.0])
    assert gain is not None
    assert gain.low < 0 < gain.high
    assert not gain.is_away


def test_lists_are_cut_where_they_end(tmp_path: Path) -> None:
    given = invented_setting.make(tmp_path)
    asked = given.test[0]
    made = scores.columns(given, Found({asked.id: asked.gold}, Asking()))
    assert [made[f"all@{k}"][0] for k in COUNTS] == [1.0] * len(COUNTS)
    empty = scores.columns(given, Found({asked.id: ()}, Asking()))
    assert [empty[f"recall@{k}"][0] for k in COUNTS] == [0.0] * len(COUNTS)
    assert empty[AP][0] == 0.0
