"""HoVer's layouts, and what makes one of its records unusable."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.data.sample import BadRecord, Page, QueryQuestion
from qrag_jax.data.sources import hover

RECORD: dict[str, Any] = {
    "uid": "a0cf",
    "claim": " The painter of Dusk was born in Oslo. ",
    "supporting_facts": [["Dusk", 0], ["Ada Berg", 1], ["Dusk", 2]],
    "label": "SUPPORTED",
    "num_hops": 2,
    "hpqa_id": "5a7a",
}
QUESTION = QueryQuestion(
    "a0cf",
    "Is the following claim supported: The painter of Dusk was born in Oslo?",
    ("yes",),
    (Page("Dusk"), Page("Ada Berg")),
)


def test_official_layout() -> None:
    assert hover.parse(RECORD) == QUESTION
    assert hover.parse(RECORD | {"label": "NOT_SUPPORTED"}).answers == ("no",)


def test_hub_layout() -> None:
    facts = [{"key": title, "value": place} for title, place in RECORD["supporting_facts"]]
    record = RECORD | {"id": 7, "supporting_facts": facts, "label": 1}
    assert hover.parse(record) == QUESTION
    assert hover.parse(record | {"label": 0}).answers == ("no",)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"supporting_facts": []}, "no supporting facts"),
        ({"supporting_facts": None}, "no supporting facts"),  # the test split
        ({"supporting_facts": [["  ", 0]]}, "empty title"),
        ({"supporting_facts": "Dusk"}, "field 'supporting_facts' is not a list"),
        (
            {"supporting_facts": ["Dusk"]},
            "field 'supporting_facts' is not a list of [title, sentence index]",
        ),
        (
            {"supporting_facts": [["Dusk", "0"]]},
            "field 'supporting_facts sentence index' is not an integer",
        ),
        (
            {"supporting_facts": [{"value": 1}]},
            "field 'supporting_facts title' is not a string",
        ),
        ({"label": None}, "missing field 'label'"),
        ({"label": -1}, "field 'label' is neither SUPPORTED nor NOT_SUPPORTED"),
        ({"label": True}, "field 'label' is neither SUPPORTED nor NOT_SUPPORTED"),
        ({"label": ["SUPPORTED"]}, "field 'label' is neither SUPPORTED nor NOT_SUPPORTED"),
        ({"uid": None}, "missing field 'uid'"),
        ({"uid": " "}, "empty id"),
        ({"claim": None}, "missing field 'claim'"),
        ({"claim": " "}, "empty claim"),
        ({"claim": "half a pair \ud83d"}, "text is not valid Unicode"),
    ],
)
def test_unusable_record(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        hover.parse(RECORD | fields)
    assert str(caught.value) == reason
