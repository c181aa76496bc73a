"""Tries in files: whole parts stay, torn ones are made again, others' are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.feedback.tries import Try
from qrag_jax.systems.leret_tries import KeptTries

RECORD = {"weights": "abc", "search": {"k": (1, 2)}}


def one(number: int) -> Try:
    return Try(number, 1, 0, 1, 0, "a query", (5, 6), (-0.1, -2.5), "stop", "searched", reward=0.5)


@pytest.fixture
def kept(tmp_path: Path) -> KeptTries:
    return KeptTries(tmp_path / "iteration-1" / "hop-1.jsonl", RECORD)


def test_parts_come_back_to_the_last_bit(kept: KeptTries) -> None:
    assert kept.begin() == []
    kept.append([one(0), one(1)])
    kept.append([one(2)])
    assert kept.begin() == [[one(0), one(1)], [one(2)]]


@pytest.mark.parametrize("torn", ["", '{"question": 3', json.dumps(one(3).to_json()) + "\n"])
def test_what_is_behind_the_last_whole_part_goes(kept: KeptTries, torn: str) -> None:
    kept.begin()
    kept.append([one(0)])
    whole = kept.path.read_text()
    kept.path.write_text(whole + torn)
    assert kept.begin() == [[one(0)]]
    assert kept.path.read_text() == whole


def test_other_weights_are_refused(kept: KeptTries) -> None:
    kept.begin()
    kept.append([one(0)])
    other = KeptTries(kept.path, {**RECORD, "weights": "xyz"})
    with pytest.raises(InputError, match="was begun with another weights; bring that back"):
        other.begin()


@pytest.mark.parametrize(
    ("line", "told"),
    [("no JSON", "line 3: is no try"), ('{"part": 7}', "the part has 0 tries, not 7")],
)
def test_a_damaged_line_is_named(kept: KeptTries, line: str, told: str) -> None:
    kept.begin()
    kept.append([one(0)])
    kept.path.write_text(kept.path.read_text() + line + "\n")
    with pytest.raises(InputError, match=told):
        kept.begin()
