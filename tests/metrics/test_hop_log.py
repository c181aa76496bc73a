"""The log of a query writer: round trip, means, differences."""

from __future__ import annotations

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


def test_an_empty_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match=r"x\.jsonl is empty; delete it"):
        hop_log.read(path)
