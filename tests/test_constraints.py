"""The pinned versions: every file by its hash, all that the base install needs, and no address."""

from __future__ import annotations

import re
import tomllib
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.entry_points import ROOT

HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


class Pinned(NamedTuple):
    """An entry: what is pinned, and what follows it."""

    requirement: Requirement
    options: list[str]


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pinned(text: str) -> list[Pinned]:
    """The entries, as pip reads them: a backslash joins a line with the next."""
    lines = text.replace("\\\n", " ").splitlines()
    entries = [line.partition(" --") for line in lines if line.strip() and line[0] != "#"]
    return [Pinned(Requirement(n), f"--{rest}".split()) for n, _, rest in entries]


def test_each_has_one_version_and_hashes(pinned: list[Pinned]) -> None:
    assert len(pinned) > 50
    for requirement, options in pinned:
        (only,) = requirement.specifier
        assert only.operator == "=="
        assert options
        assert all(HASH.fullmatch(option) for option in options), requirement


def test_no_address_of_a_registry_is_in_it(text: str) -> None:
    assert "://" not in text
    assert not re.search(r"^\s*-", re.sub(r"^ +--hash=\S+", "", text, flags=re.M), re.M)


def test_all_that_the_package_needs_is_there_and_fits(pinned: list[Pinned]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [Requirement(each) for each in project["dependencies"]]
    found = {canonicalize_name(each.requirement.name): each.requirement for each in pinned}
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        assert name in found, f"{name} is not there; run make constraints"
        (only,) = found[name].specifier
        assert requirement.specifier.contains(only.version), requirement
        assert found[name].marker is None  # on every system
