"""The suite which: pairs that the text names, and what is remembered of training."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.which_cases import pairs, remembered, table
from benchmarks.which_cases.found import Asking, Found
from benchmarks.which_cases.pairs import PAIRS
from benchmarks.which_cases.row import TRAINED, UNTRAINED, Result
from benchmarks.which_cases.rows import ROWS
from benchmarks.which_cases.settings import TRAIN, TWO_WIKI, Setting
from tests.benchmarks import invented_setting


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return invented_setting.make(tmp_path_factory.mktemp("setting"))


def lines(given: Setting, ways: dict[str, dict[str, dict[str, list[str]]]]) -> list[table.Scored]:
    """Lines of part → way → question → what is read."""
    made = {
        f"{TWO_WIKI}/{part}": Result(
            {
                way: {
                    TWO_WIKI: Found(
                        {asked: tuple(names) for asked, names in lists.items()}, Asking()
                    )
                }
                for way, lists in read.items()
            }
        )
        for part, read in ways.items()
    }
    return table.scored(made, lambda name: given)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_of_rows_that_there_are(pair: pairs.Pair) -> None:
    for title in (pair.first, pair.second):
        known = [
            row
            for row in ROWS
            if (title.startswith(f"{row.title}, ") if row.seeds else title == row.title)
        ]
        assert known, title
        assert any(pair.setting in row.settings for row in known)


def test_pairs_are_differences_by_question(given: Setting) -> None:
    gold = {asked.id: [*asked.gold] for asked in given.test}
    half: dict[str, list[str]] = {
        name: names if at % 2 else [] for at, (name, names) in enumerate(gold.items())
    }
    found = lines(given, {"second_hop": {UNTRAINED: gold}, "bm25": {UNTRAINED: half}})
    _, _, head, _, *rows = pairs.table(found).strip().splitlines()
    assert head.split(" | ")[1:4] == ["row", "less", "column"]
    (row,) = rows  # no other pair has both of its lines
    share = np.mean([not names for names in half.values()])
    start = f"| {TWO_WIKI} | {pairs.SECOND_HOP} | BM25 | all@4 | {share:+.3f} ["
    assert row.startswith(start)
    assert pairs.table(found[:1]) == ""


def test_gold_passages_of_training_questions_are_counted_among_the_wrong_ones(
    given: Setting,
) -> None:
    known = {name for asked in given.questions[TRAIN] for name in asked.gold}
    first, second = given.test[:2]
    gold = {*first.gold, *second.gold}
    old = sorted(known - gold)[:2]
    new = sorted({passage.name for passage in given.corpus} - known - gold)[:3]
    read = {first.id: [*first.gold[:1], old[0], *new[:2], old[1]], second.id: [old[0]]}
    found = lines(given, {"q_rag-42": {TRAINED: read, UNTRAINED: {first.id: list(first.gold[:1])}}})
    trained, untrained = found
    # The fifth passage is not within the first four, and the first one is gold.
    assert remembered.share(trained, given, known) == pytest.approx(2 / 4)
    assert remembered.share(untrained, given, known) is None
    (told,) = remembered.tables(found, lambda name: given)
    assert f"are {len(known):,} of {len(given.corpus):,} passages" in told
    assert "| Q-RAG, trained | 50 |" in told
    assert "untrained" not in told


def test_a_setting_without_lines_has_no_table() -> None:
    assert [*remembered.tables([], lambda name: pytest.fail(name))] == []
