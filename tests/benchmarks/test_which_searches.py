"""The suite which: searches without training, and how the lists of several are made one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import which
from benchmarks.which_cases import single
from benchmarks.which_cases.found import Asking, Found, by_turns, fused
from benchmarks.which_cases.invented import Sizes
from tests.benchmarks import invented_setting


def test_searches_without_training_find_lists(tmp_path: Path) -> None:
    """The whole of --quick is a slow test of all suites; these are its data."""
    made = invented_setting.make(tmp_path, Sizes(train=24, dev=8, test=which.QUICK_QUESTIONS))
    assert len(made.test) == which.QUICK_QUESTIONS
    found = single.bm25(made)
    assert {*found.lists} == {asked.id for asked in made.test}
    assert found.index_bytes > 0
    assert found.asking.milliseconds is not None
    for further in (single.expansion(made), single.second_hop(made)):
        assert {*further.lists} == {*found.lists}
        assert further.asking.searches == 2
    # The best of both searches come first.
    hops = single.second_hop(made).lists
    for question, names in hops.items():
        assert names[:1] == found.lists[question][:1]
    assert any(found.lists[question][1:2] != names[1:2] for question, names in hops.items())


def test_what_searches_find_is_read_in_turns() -> None:
    assert by_turns([("a", "b", "c"), ("a", "d"), ()]) == ("a", "b", "d", "c")
    assert len(by_turns([[f"{search}-{n}" for n in range(9)] for search in range(3)])) == 10


@pytest.mark.parametrize("seed", range(3))
def test_fused_lists_are_those_of_the_engine_hybrid(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.permutation(15)[: rng.integers(1, 11)].tolist() for _ in range(2)]
    names = {number: f"p{number:02}" for number in range(15)}
    found = fused([[names[number] for number in own] for own in lists])
    sums = {n: sum(1 / (61 + own.index(n)) for own in lists if n in own) for n in names}
    best = sorted((value for value in sums.values() if value), reverse=True)[:10]
    assert len(found) == len(set(found)) == len(best)
    assert [sums[int(name[1:])] for name in found] == best


def test_what_words_find_is_fused_with_a_list(tmp_path: Path) -> None:
    made = invented_setting.make(tmp_path, Sizes(test=8))
    words = single.bm25(made)
    gold = {a.id: a.gold for a in made.test}
    both = single.with_words(made, Found(gold, Asking(5.0, encoder_tokens=7.0, searches=2.0), 100))
    assert both.lists == {name: fused((own, words.lists[name])) for name, own in gold.items()}
    assert both.lists != gold
    assert both.asking.searches == 3
    assert both.asking.encoder_tokens == 7
    assert both.asking.milliseconds is not None
    assert both.asking.milliseconds > 5
    assert both.index_bytes == 100 + words.index_bytes
    # Nothing is known of the whole where nothing is known of a part.
    unknown = single.with_words(made, Found(gold, Asking(None)))
    assert unknown.asking.milliseconds is None
