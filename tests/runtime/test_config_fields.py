"""Sections made from dataclasses: values, types, comments, and back again."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import Count, InputError, Positive, Share, one_of, some_of, within
from qrag_jax.runtime.config_fields import (
    comments,
    described,
    fill,
    internal,
    section,
)


@dataclasses.dataclass(frozen=True)
class Inner:
    size: Count = 3  # of it


@dataclasses.dataclass(frozen=True)
class Base:
    name: str = "a"  # what it is called


@dataclasses.dataclass(frozen=True)
class Outer(Base):
    """What it is for."""

    rate: Share = 0.5  # a share, "#" and all
    # Above the field,
    # on two lines.
    limit: Positive | None = None
    # Above, and
    shape: tuple[int, ...] = (1, 2)  # behind.
    names: str | tuple[str, ...] = "all"
    kind: Annotated[str, one_of(("", "x", "y"))] = ""
    stages: Annotated[tuple[str, ...], some_of(("a", "b", "c"), ordered=True)] = ("a",)
    beam: Annotated[int, within(1, 8)] = 1
    hidden: int = internal(7)
    made: list[int] = internal(factory=list)
    inner: Inner = dataclasses.field(default_factory=Inner)  # nested
    maybe: Inner | None = None  # only where it is asked for


def test_a_section_has_the_defaults_their_types_and_no_more() -> None:
    made = section(Outer)
    assert made.to_dict() == {
        **{"name": "a", "rate": 0.5, "limit": None, "shape": (1, 2), "names": "all"},
        **{"kind": "", "stages": ("a",), "beam": 1, "inner": {"size": 3}, "maybe": {"size": 3}},
    }
    assert section(Inner, size=5).size == 5
    made.lock()
    for name, error in (("rate", TypeError), ("limit", TypeError), ("rat", AttributeError)):
        with pytest.raises(error):
            setattr(made, name, "much")


def test_a_section_is_filled() -> None:
    assert fill(Outer, {}, "outer") == Outer()
    assert fill(Outer, section(Outer), "outer") == Outer(maybe=Inner())
    assert fill(Outer, {"stages": "b", "kind": "y", "beam": 8}).stages == ("b",)
    assert fill(Outer, {"stages": ["a", "c"]}).stages == ("a", "c")
    given = {"shape": [4, 5], "inner": {"size": 2}, "maybe": ConfigDict({"size": 9}), "limit": 2}
    filled = fill(Outer, given, "outer")
    assert filled == Outer(limit=2, shape=(4, 5), inner=Inner(2), maybe=Inner(9))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"size": 1}, "config.outer.size is unknown; there are beam, inner,"),
        ({"hidden": 1}, "config.outer.hidden is unknown"),
        ({"inner": {"sise": 1}}, "config.outer.inner.sise is unknown; there are size."),
        ({"inner": {"size": 0}}, "config.outer.inner.size is 0; it must be at least 1."),
        ({"inner": 3}, "config.outer.inner is 3"),
        ({"rate": 1.5}, "config.outer.rate is 1.5"),
        ({"rate": float("nan")}, "config.outer.rate is NaN"),
        ({"limit": 0.0}, "config.outer.limit is 0.0"),
        ({"limit": float("inf")}, "config.outer.limit is Infinity"),
        ({"kind": "z"}, 'config.outer.kind is "z"; use one of x, y.'),
        ({"stages": ("c", "a")}, "config.outer.stages is"),
        ({"stages": ("a", "a")}, "config.outer.stages is"),
        ({"stages": ()}, "config.outer.stages is"),
        ({"shape": (4, "x")}, "config.outer.shape[1] is"),
        ({"beam": 9}, "config.outer.beam is 9; it must be from 1 to 8."),
    ],
)
def test_what_cannot_be_filled_is_named(given: dict, told: str) -> None:
    with pytest.raises(InputError) as caught:
        fill(Outer, given, "outer")
    assert told in str(caught.value)


def test_comments_stand_behind_a_field_or_above_it() -> None:
    assert comments(Outer) == {
        "name": "what it is called",
        "rate": 'a share, "#" and all',
        "limit": "Above the field, on two lines.",
        "shape": "Above, and behind.",
        "inner": "nested",
        "maybe": "only where it is asked for",
    }
    assert ("outer.inner.size", 3, "of it") in described(Outer, "outer")
    assert ("outer.maybe.size", 3, "of it") in described(Outer, "outer")
    assert ("outer.names", "all", "") in described(Outer, "outer")
