from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.retrieval.corpus import StoredCorpus
from qrag_jax.retrieval.golden import GOLD, GoldenIndex
from qrag_jax.retrieval.protocol import NONE, Queries
from tests.retrieval.small_corpus import stored


@pytest.fixture
def corpus(tmp_path: Path) -> StoredCorpus:
    return stored(tmp_path / "corpus", [f"text {i}" for i in range(5)], odd=[0, 1, 0, 1, 0])


def test_gold_passages_come_in_their_order_and_nothing_else(corpus: StoredCorpus) -> None:
    index = GoldenIndex(corpus, {"who?": [4, 1, 2], " when? ": np.array([3]), "why?": []})
    hits = index.search(Queries(["when?", "who?", "who? ", "why?", "where?"]), 2)
    assert hits.numbers.tolist() == [[3, NONE], [4, 1], [4, 1], [NONE, NONE], [NONE, NONE]]
    assert hits.scores[:2].tolist() == [[1.0, -np.inf], [1.0, 0.5]]
    assert hits.numbers.dtype == np.int64
    assert hits.scores.dtype == np.float32
    assert index.search(Queries(["who?"]), 9).numbers.tolist() == [[4, 1, 2] + [NONE] * 6]


def test_a_filter_leaves_gold_passages_out(corpus: StoredCorpus) -> None:
    index = GoldenIndex(corpus, {"who?": [4, 1, 2]})
    assert index.search(Queries(["who?"]), 3, {"odd": 0}).numbers.tolist() == [[4, 2, NONE]]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ({"q": [5]}, r"are \[5\]; the corpus has the numbers 0 to 4"),
        ({"q": [-1]}, r"are \[-1\]"),
        ({"q": [1, 1]}, "give each passage once"),
        ({"q": [1], "q ": [2]}, "is there twice with different gold passages"),
    ],
)
def test_gold_that_cannot_be_is_refused(
    gold: dict[str, Any], message: str, corpus: StoredCorpus
) -> None:
    with pytest.raises(InputError, match=message):
        GoldenIndex(corpus, gold)
    GoldenIndex(corpus, {"q": [1], "q ": [1]})


def test_it_is_saved_and_loaded(corpus: StoredCorpus, tmp_path: Path) -> None:
    index = GoldenIndex(corpus, {"who?": [4, 1], "ça?": []})
    index.save(tmp_path / "index")
    again = GoldenIndex.open(tmp_path / "index", corpus)
    assert again.search(Queries(["who?", "ça?"]), 2).numbers.tolist() == [[4, 1], [NONE, NONE]]
    whole = (tmp_path / "index" / GOLD).read_bytes()
    for damaged in (whole.replace(b"4", b"9"), whole.replace(b"[", b"{"), whole[:-2] + b"x\n"):
        (tmp_path / "index" / GOLD).write_bytes(damaged)
        with pytest.raises(InputError, match=r"gold\.json is damaged"):
            GoldenIndex.open(tmp_path / "index", corpus)
