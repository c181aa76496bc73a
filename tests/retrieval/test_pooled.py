"""Passages of many questions as one corpus: each once, with ids that stay."""

from __future__ import annotations

from qrag_jax.data.query_question import Page
from qrag_jax.retrieval.pooled import pooled
from qrag_jax.retrieval.protocol import Passage

ADA, LAKE, BARE = Page("Ada Berg", "She sails."), Page("Lake (film)", "Old."), Page("", "No. 7!")


def test_each_passage_is_there_once_in_the_order_of_first_sight() -> None:
    again = Page("ADA BERG", "She  sails", id="elsewhere")
    other = Page("Ada Berg", "She flies.")
    found = pooled([ADA, LAKE, again, BARE, other, LAKE])
    assert [(each.title, each.text) for each in found] == [
        ("Ada Berg", "She sails."),
        ("Lake (film)", "Old."),
        ("", "No. 7!"),
        ("Ada Berg", "She flies."),
    ]
    assert pooled([]) == []


def test_ids_are_readable_and_do_not_depend_on_the_pool() -> None:
    found = pooled([ADA, LAKE, BARE])
    assert found[0] == Passage("ada-berg-864caa4b", "She sails.", "Ada Berg")
    assert [each.name.rpartition("-")[0] for each in found] == ["ada-berg", "lake-film", "no-7"]
    assert pooled([BARE, Page("Ada Berg", "She flies."), LAKE])[2] == found[1]
    (long,) = pooled([Page("Very " * 20, "long")])
    assert len(long.name) <= 49


def test_passages_without_letters_are_told_apart() -> None:
    found = pooled([Page("!!!", "?"), Page("???", "?"), Page("!!!", "?")])
    assert [each.title for each in found] == ["!!!", "???"]
    assert len({each.name for each in found}) == 2
    assert all(len(each.name) == 8 for each in found)
