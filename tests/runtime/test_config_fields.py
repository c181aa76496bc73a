"""Sections made from dataclasses, and back again."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import Count, Positive, Share, one_of, some_of
from qrag_jax.runtime.config_fields import fill, internal, section


@dataclasses.dataclass(frozen=True)
class Inner:
    size: Count = 3


@dataclasses.dataclass(frozen=True)
class Base:
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Outer(Base):
    rate: Share = 0.5
    limit: Positive | None = None
    shape: tuple[int, ...] = (1, 2)
    names: str | tuple[str, ...] = "all"
    kind: Annotated[str, one_of(("", "x", "y"))] = ""
    stages: Annotated[tuple[str, ...], some_of(("a", "b", "c"), ordered=True)] = ("a",)
    hidden: int = internal(7)
    inner: Inner = dataclasses.field(default_factory=Inner)
    maybe: Inner | None = None  # only where it is asked for


def test_a_section_has_the_defaults_their_types_and_no_more() -> None:
    found = section(Outer)
    assert found.to_dict() == {
        **{"name": "a", "rate": 0.5, "limit": None, "shape": (1, 2), "names": "all"},
        **{"kind": "", "stages": ("a",), "inner": {"size": 3}, "maybe": {"size": 3}},
    }
    assert section(Inner, size=5).size == 5
    found.lock()
    for name, error in (("rate", TypeError), ("limit", TypeError), ("rat", AttributeError)):
        with pytest.raises(error):
            setattr(found, name, "much")


def test_a_section_is_filled() -> None:
    assert fill(Outer, {}, "outer") == Outer()
    assert fill(Outer, section(Outer), "outer") == Outer(maybe=Inner())
    assert fill(Outer, {"stages": ["a", "c"]}).stages == ("a", "c")
    values = {"shape": [4, 5], "inner": {"size": 2}, "maybe": ConfigDict({"size": 9}), "limit": 2}
    expected = Outer(limit=2, shape=(4, 5), inner=Inner(2), maybe=Inner(9))
    assert fill(Outer, values, "outer") == expected
