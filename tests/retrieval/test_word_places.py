from __future__ import annotations

from pathlib import Path

from qrag_jax.retrieval.bm25 import BM25Index
from qrag_jax.retrieval.word_places import WordPlaces
from tests.retrieval.small_corpus import stored


def test_occurrences_lie_in_order(tmp_path: Path) -> None:
    """Each word's, whatever the corpus; stop words have places, and no occurrences."""
    texts = ["the cat", "?", "dog the of cats cat", "..."]
    ranking = BM25Index.build(stored(tmp_path / "c", texts))
    places = WordPlaces.of(ranking)
    assert places.count == 4
    assert list(places.forms) == ["cat", "cats", "dog"]
    cat, dog = ranking.vocabulary["cat"], ranking.vocabulary["dog"]
    assert places.words.tolist() == [cat, cat, dog]
    for word, wanted in ((cat, [(0, 1), (2, 3), (2, 4)]), (dog, [(2, 0)])):
        span = slice(*places.ends[[word, word + 1]])
        assert [*zip(places.passages[span], places.places[span], strict=True)] == wanted
