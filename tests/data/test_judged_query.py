"""Judged queries on a corpus: which are kept, and which judgements are of another collection."""

from __future__ import annotations

import pytest

from qrag_jax.data.judged_query import JudgedQuery, check_in_corpus
from qrag_jax.errors import InputError

ALL = JudgedQuery("all", "a", (("d1", 1), ("d2", 2)))
SOME = JudgedQuery("some", "b", (("d2", 1), ("x1", 1)))
NONE = JudgedQuery("none", "c", (("x1", 1), ("x2", 1)))
KNOWN = {"d1", "d2", "d3"}


def test_queries_without_a_document_in_the_corpus_are_dropped_and_counted() -> None:
    found = check_in_corpus([ALL, NONE, SOME], KNOWN, 0.4)
    assert found.queries == [ALL, SOME]  # SOME keeps the judgement that the corpus lacks
    assert (found.dropped, found.documents, found.lacking) == (("none",), 3, 1)
    assert found.summary == (
        "1 of 3 queries left out, of which the corpus has no relevant document; the first is none; "
        "the corpus lacks 1 of the 3 documents that are relevant for the queries that are kept"
    )
    assert check_in_corpus([ALL], KNOWN).summary == ""
    # The ids of the judged documents are all that is needed.
    assert check_in_corpus([ALL], frozenset({"d2"})).lacking == 1


def test_up_to_the_share_may_be_dropped() -> None:
    four = [ALL, SOME, NONE, JudgedQuery("other", "d", (("x3", 1),))]
    assert check_in_corpus(four, KNOWN, 0.5).dropped == ("none", "other")
    with pytest.raises(InputError) as caught:
        check_in_corpus(four, KNOWN, 0.49)
    assert str(caught.value) == (
        "the corpus has no relevant document of 2 of 4 queries (the first is 'none', with document "
        "'x1'), so these seem to be judgements of another collection; give the corpus that they "
        "are about in config.search.index, or raise config.search.max_missing_share, 0.49."
    )


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"2 of 2 queries .* in config\.search\.index\.$"):
        check_in_corpus([NONE, NONE], KNOWN, 1.0)
    with pytest.raises(InputError, match="the corpus has no document, or none of those that are"):
        check_in_corpus([ALL], set(), 1.0)
    with pytest.raises(InputError, match="there is no judged query; name data"):
        check_in_corpus([], KNOWN)
    with pytest.raises(InputError, match=r"\(the first is 'bare'\)"):
        check_in_corpus([JudgedQuery("bare", "d", ())], KNOWN)
