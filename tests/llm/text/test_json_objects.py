"""JSON objects in texts as models write them."""

from __future__ import annotations

from typing import Any

import pytest

from qrag_jax.llm.text.json_objects import last_object

FOUND: list[tuple[str, dict[str, Any]]] = [
    ('{"a": 1}', {"a": 1}),
    ('So:\n```json\n{"a": 1, "b": "x}"}\n```\nDone.', {"a": 1, "b": "x}"}),
    ('{"a": 1} or rather {"a": 2}', {"a": 2}),
    ('{"a": 1} and {"b": 2}', {"a": 1}),
    ('{STATUS} {"a": {"a": 2}}', {"a": {"a": 2}}),
    ('{{"a": 1}}', {"a": 1}),
    ('"{" {"a": "ü"}', {"a": "ü"}),
    ('[{"a": 1}]', {"a": 1}),
]


@pytest.mark.parametrize(("text", "found"), FOUND)
def test_the_last_object_with_the_name(text: str, found: dict[str, Any]) -> None:
    assert last_object(text, ("a",)) == found


@pytest.mark.parametrize(
    "text", ["", "a", "{'a': 1}", '{"a": 1', '{"b": 1}', "{", "{" * 5000, '{"a":' * 5000]
)
def test_no_object(text: str) -> None:
    assert last_object(text, ("a",)) is None


def test_all_names_are_needed() -> None:
    assert last_object('{"a": 1}', ("a", "b")) is None
    assert last_object('{"a": 1, "b": 2, "c": 3}', ("a", "b")) == {"a": 1, "b": 2, "c": 3}
