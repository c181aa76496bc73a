"""JSON of unknown origin: within limits, and of the kinds that are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from qrag_jax.runtime.bounded_json import BadJSONError, load, parsed, typed


class Found(NamedTuple):
    name: str
    score: float


@dataclasses.dataclass(frozen=True)
class Row:
    id: str
    count: int
    found: tuple[Found, ...]
    pair: tuple[str, int] = ("", 0)
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    more: Any = None
    mean: float | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is below 0")


SOUND = {"id": "a", "count": 2, "found": [{"name": "b", "score": 1}], "pair": ["c", 3]}


def test_values_become_their_kinds() -> None:
    row = typed(Row, SOUND)
    assert row == Row("a", 2, (Found("b", 1),), ("c", 3))
    assert typed(Row, SOUND | {"mean": None, "more": [1]}).more == [1]
    assert typed(dict[str, float | None], {"a": None, "b": 2}) == {"a": None, "b": 2}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": True}, "count is true, no whole number"),
        ({"count": 2**70}, "no whole number"),
        ({"count": -1}, "cannot be: count is below 0"),
        ({"found": {}}, r"found is \{\}, no list"),
        ({"found": [{"name": "b", "score": "x"}]}, r"found\[0\].score is \"x\", no finite number"),
        ({"found": [{"name": "b"}]}, r"the field found\[0\].score is missing"),
        ({"pair": ["c"]}, "pair is"),
        ({"scores": {"a": float("nan")}}, "scores"),
        ({"mean": "x"}, "mean is"),
        ({"other": 1}, "the field other is unknown"),
    ],
)
def test_other_kinds_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadJSONError, match=told):
        typed(Row, SOUND | change)
    with pytest.raises(BadJSONError, match="the whole is"):
        typed(Row, [])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "nested too deep"),
        ("[1e999]", "too large"),
        ("[NaN]", "NaN"),
        (b"\xff", "UTF-8|utf-8"),
        ("9" * 5000, "limit"),
        ("{", "line 1 column 2"),
    ],
)
def test_what_is_no_json(text: str | bytes, told: str) -> None:
    with pytest.raises(BadJSONError, match=told):
        parsed(text)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(BadJSONError, match="more than 64 MiB"):
        load(path)
    path.write_text("[1]")
    assert load(path) == [1]
