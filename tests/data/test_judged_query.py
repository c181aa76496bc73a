"""Judged queries on a corpus: which are kept, and which judgements are of another collection."""

from __future__ import annotations

import pytest

from qrag_jax.data.judged_query import JudgedQuery, Origin, check_in_corpus
from qrag_jax.errors import InputError

ALL = JudgedQuery("all", "a", (("d1", 1), ("d2", 2)))
SOME = JudgedQuery("some", "b", (("d2", 1), ("x1", 1)))
NONE = JudgedQuery("none", "c", (("x1", 1), ("x2", 1)))
KNOWN = {"d1", "d2", "d3"}
FROM = Origin("config.queries.train", "the corpus of data/north", "name another folder")


def test_queries_without_a_document_in_the_corpus_are_dropped_and_counted() -> None:
    found = check_in_corpus([ALL, NONE, SOME], KNOWN, FROM, 0.4)
    assert found.queries == [ALL, SOME]  # SOME keeps the judgement that the corpus lacks
    assert (found.dropped, found.documents, found.lacking) == (("none",), 3, 1)
    assert found.summary == (
        "1 of 3 queries left out, of which the corpus has no relevant document; the first is none; "
        "the corpus lacks 1 of the 3 documents that are relevant for the queries that are kept"
    )
    assert check_in_corpus([ALL], KNOWN, FROM).summary == ""
    # The ids of the judged documents are all that is needed.
    assert check_in_corpus([ALL], frozenset({"d2"}), FROM).lacking == 1


def test_up_to_the_share_may_be_dropped() -> None:
    four = [ALL, SOME, NONE, JudgedQuery("other", "d", (("x3", 1),))]
    assert check_in_corpus(four, KNOWN, FROM, 0.5).dropped == ("none", "other")
    with pytest.raises(InputError) as caught:
        check_in_corpus(four, KNOWN, FROM, 0.49)
    assert str(caught.value) == (
        "config.queries.train: the corpus of data/north has no relevant document of 2 of 4 queries "
        "(the first is 'none', with document 'x1'), so these seem to be judgements of another "
        "collection; name another folder, or raise config.search.max_missing_share, 0.49."
    )


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="2 queries"):
        check_in_corpus([NONE, NONE], KNOWN, FROM, 1.0)
    with pytest.raises(InputError, match="document of 1"):
        check_in_corpus([ALL], set(), FROM, 1.0)
    with pytest.raises(InputError, match=r"^config\.queries\.train has no judged query; name d"):
        check_in_corpus([], KNOWN, FROM)
    with pytest.raises(InputError, match=r"'bare'\)"):
        check_in_corpus([JudgedQuery("bare", "d", ())], KNOWN, FROM)
