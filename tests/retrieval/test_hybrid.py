from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.hybrid import FusedIndex, FusionConfig
from qrag_jax.retrieval.protocol import NONE, Queries
from tests.retrieval.small_corpus import TableIndex, stored


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    return stored(
        tmp_path / "corpus", [f"text {i}" for i in range(12)], odd=[i % 2 for i in range(12)]
    )


def slow(
    rankings: list[list[tuple[int, float]]], config: FusionConfig, weights: list[float]
) -> dict[int, float]:
    """The definition, passage by passage; each ranking is (number, score), best first."""
    sums: dict[int, float] = {}
    for number in {number for ranking in rankings for number, _ in ranking}:
        sums[number] = 0.0
        for weight, ranking in zip(weights, rankings):
            place = next((i for i, (each, _) in enumerate(ranking) if each == number), None)
            gain = 0.0 if place is None else 1 / (config.constant + place + 1)
            sums[number] += weight * gain
    return sums


@pytest.mark.parametrize("weights", [(), (1.0, 0.25, 3.0)])
def test_sums_are_those_of_the_definitions(
    weights: tuple[float, ...], corpus: StoredCorpus
) -> None:
    """Three engines with random scores, some of them equal, some without any hit."""
    config = FusionConfig(weights=weights, constant=7.0, depth=5)
    draw = random.Random(0)
    for _ in range(40):
        tables = [
            {
                n: float(draw.randrange(-3, 4))
                for n in draw.sample(range(12), draw.choice((0, 1, 4, 9)))
            }
            for _ in range(3)
        ]
        fused = FusedIndex([TableIndex(corpus, {"q": table}) for table in tables], config)
        rankings = [sorted(t.items(), key=lambda item: (-item[1], item[0]))[:5] for t in tables]
        sums = slow(rankings, config, list(weights or (1.0, 1.0, 1.0)))
        order = sorted(sums, key=lambda n: (-round(sums[n], 7), n))
        for k in (1, 2, 5):
            hits = fused.search(Queries(["q"]), k)
            numbers = hits.numbers[0][hits.numbers[0] != NONE]
            assert numbers.tolist() == order[:k]
            expected = [sums[number] for number in numbers]
            got = hits.scores[0][: len(numbers)]
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_both_lists_matter_at_k_2(corpus: StoredCorpus) -> None:
    """Each engine's first is among the two; with one engine's list alone, none of the other's."""
    one = TableIndex(corpus, {"q": {7: 30.0, 5: 20.0, 3: 10.0}})
    other = TableIndex(corpus, {"q": {2: 0.3, 8: 0.2, 1: 0.1}})
    hits = FusedIndex([one, other]).search(Queries(["q"]), 2)
    assert hits.numbers.tolist() == [[2, 7]]  # a tie, so by number
    assert hits.scores[0, 0] == hits.scores[0, 1]
    heavy = FusionConfig(weights=(1.0, 2.0))
    first = FusedIndex([one, other], heavy).search(Queries(["q"]), 2).numbers[0, 0]
    assert first == 2
    heavy = FusionConfig(weights=(2.0, 1.0))
    first = FusedIndex([one, other], heavy).search(Queries(["q"]), 2).numbers[0, 0]
    assert first == 7


def test_a_passage_that_both_find_beats_the_first_of_one(corpus: StoredCorpus) -> None:
    one = TableIndex(corpus, {"q": {7: 3.0, 5: 2.0}})
    other = TableIndex(corpus, {"q": {2: 3.0, 5: 2.0}})
    assert FusedIndex([one, other]).search(Queries(["q"]), 3).numbers.tolist() == [[5, 2, 7]]


def test_three_engines_with_permuted_ranks_tie(corpus: StoredCorpus) -> None:
    """With this constant, the sum of the same three parts in another order is another float32."""
    ranks = [(9, 4, 1), (4, 1, 9), (1, 9, 4)]
    engines = [
        TableIndex(corpus, {"q": {n: -float(place) for place, n in enumerate(order)}})
        for order in ranks
    ]
    config = FusionConfig(constant=41.00000051005985)
    hits = FusedIndex(engines, config).search(Queries(["q"]), 4)
    assert hits.numbers.tolist() == [[1, 4, 9, NONE]]
    assert len(set(hits.scores[0, :3].tolist())) == 1


def test_depth_bounds_what_is_taken_from_each(corpus: StoredCorpus) -> None:
    table = {"q": {n: -float(n) for n in range(12)}}
    deep = TableIndex(corpus, {"q": {11: 1.0, 10: 0.5}})
    for depth, expected in ((1, [0, 11, NONE]), (2, [0, 11, 1])):
        fused = FusedIndex([TableIndex(corpus, table), deep], FusionConfig(depth=depth))
        assert fused.search(Queries(["q"]), 1).numbers.tolist() == [expected[:1]]
        assert fused.search(Queries(["q"]), 3).numbers[0, :2].tolist() == [0, 11]
    hits = fused.search(Queries(["q", "unknown"]), 12)
    assert hits.numbers.tolist() == [[0, 11, 1, 10] + [NONE] * 8, [NONE] * 12]


def test_a_filter_reaches_the_engines(corpus: StoredCorpus) -> None:
    one = TableIndex(corpus, {"q": {2: 3.0, 3: 2.0}})
    other = TableIndex(corpus, {"q": {4: 3.0, 5: 2.0}})
    hits = FusedIndex([one, other]).search(Queries(["q"]), 4, {"odd": 1})
    assert hits.numbers.tolist() == [[3, 5, NONE, NONE]]
    assert np.isneginf(hits.scores[0, 2:]).all()


def test_engines_of_different_corpora_are_refused(corpus: StoredCorpus, tmp_path: Path) -> None:
    other = stored(tmp_path / "other", ["another text"])
    with pytest.raises(InputError, match="engine 1 searches"):
        FusedIndex([TableIndex(corpus, {}), TableIndex(other, {})])
    same = StoredCorpus(corpus.folder)
    FusedIndex([TableIndex(corpus, {}), TableIndex(same, {})])
    with pytest.raises(InputError, match="2 engines"):
        FusedIndex([TableIndex(corpus, {})])
    with pytest.raises(InputError, match="values for 2"):
        FusedIndex([TableIndex(corpus, {})] * 2, FusionConfig(weights=(1.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": (1.0, 0.0)}, r"config\.fusion\.weights has 0\.0"),
        ({"weights": (1.0, float("nan"))}, r"config\.fusion\.weights has nan"),
        ({"constant": -1.0}, r"config\.fusion\.constant is -1\.0"),
        ({"constant": float("inf")}, r"config\.fusion\.constant is inf"),
        ({"depth": 0}, r"config\.fusion\.depth is 0"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FusionConfig(**settings)
