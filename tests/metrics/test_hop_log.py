"""The log of a query writer: round trip, means, differences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics import hop_log
from qrag_jax.metrics.hop_log import Hop, Searched


def row(name: str, *recalls: float, sampled: int = 4) -> Searched:
    hops = tuple(
        Hop(
            "a query", "searched", ("p1", "p2"),
            {"recall": each, "ap": each / 2, "all_gold": float(each == 1)}, 20, sampled,
        )
        for each in recalls
    )  # fmt: skip
    return Searched(name, f"{name}?", ("x",), ("g1", "g2"), hops)


ROWS = [row("a", 0.5, 1.0), row("b", 0.0, 0.5)]


def test_a_log_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "last-3.jsonl"
    hop_log.write(path, ROWS, {"way": "last-3"})
    assert hop_log.read(path) == ROWS
    assert path.with_suffix(".json").exists()


def test_means_after_each_hop() -> None:
    found = hop_log.summary(ROWS)
    assert found["hop1/recall"]["mean"] == 0.25
    assert found["hop2/all_gold"]["mean"] == 0.5
    assert (found["read_tokens"], found["sampled_tokens"]) == (40, 8)
    assert found["outcomes"] == {"searched": 4}


def test_differences_are_paired() -> None:
    others = [row("a", 0.0, 0.5), row("b", 0.0, 0.0)]
    found = hop_log.gains(ROWS, others)
    assert found["hop2/recall"] == {"mean": 0.5, "low": 0.5, "high": 0.5}
    assert found["hop1/recall"]["mean"] == 0.25


def test_what_failed_is_left_out_and_counted() -> None:
    first, second = ROWS[1].hops
    hops = (dataclasses.replace(first, outcome="timeout"), second)
    lost = dataclasses.replace(ROWS[1], hops=hops)
    found = hop_log.summary([ROWS[0], lost])
    assert (found["failed"], found["failed_share"], found["hop2/recall"]["mean"]) == (1, 0.5, 1.0)
    assert hop_log.gains(ROWS, [ROWS[0], lost])["hop1/recall"]["mean"] == 0
    assert len(hop_log.table({"lost": hop_log.summary([lost])}, 2)) == 2


def test_the_table_has_a_line_for_each_way() -> None:
    lines = hop_log.table({"trained": hop_log.summary(ROWS)}, 2)
    assert len(lines) == 2
    assert "hop2/all_gold" in lines[0]
    assert "0.750 [" in lines[1]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": "a"}\n')
    with pytest.raises(InputError, match="line 1: is no row"):
        hop_log.read(path)


def test_a_broken_log_goes_on_behind_its_last_whole_part(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    rows = [row(f"q{number}\u2028", 0.5, 1.0) for number in range(5)]
    assert hop_log.read_parts(path, 2, 5) == []
    hop_log.append(path, rows[:3])
    with path.open("a") as file:
        file.write('{"id"')
    assert hop_log.read_parts(path, 2, 5) == rows[:2]
    hop_log.append(path, rows[2:])
    assert hop_log.read_parts(path, 2, 5) == hop_log.read(path) == rows


def test_what_was_found_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    hop = dataclasses.replace(ROWS[0].hops[0], found=(("p2", 1.5), ("p1", 0.1 + 0.2)))
    rows = [dataclasses.replace(ROWS[0], hops=(hop,))]
    hop_log.append(path, rows)
    assert hop_log.read(path) == rows
    # A log that was written before it had these.
    saved = json.loads(path.read_text())
    del saved["hops"][0]["found"]
    path.write_text(json.dumps(saved) + "\n")
    assert hop_log.read(path)[0].hops[0].found == ()


def test_a_log_is_known_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert not hop_log.is_one(path)
    for text, known in [("", False), ("[]\n", False), ('{"id": "a", "sf_idx": []}\n', False)]:
        path.write_text(text)
        assert hop_log.is_one(path) is known
    hop_log.write(path, ROWS, {"search": {"gold_by": "title"}})
    assert hop_log.is_one(path)
    assert hop_log.read_record(path) == {"search": {"gold_by": "title"}}
    path.with_suffix(".json").write_text("[")
    with pytest.raises(InputError, match="JSON object; restore"):
        hop_log.read_record(path)


def test_an_empty_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match=r"x\.jsonl"):
        hop_log.read(path)
