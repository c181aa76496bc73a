"""The log of a query rewriter: round trip, parts, damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.evaluators import rewrite_log
from qrag_jax.evaluators.rewrite_log import RewriteRow

ROWS = [
    RewriteRow(
        "1", "a", "Where?", "place", "rewritten", " place\u2028", (("d1", 2.5), ("d2", 0.0)), 7
    ),
    RewriteRow("1", "b", "Who?", "", "query_too_long", "who who", (), 40),
    RewriteRow("2", "b", "Why?", "why", "server", "why", None, 2),
]


def test_a_log_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "eval" / "last-3.jsonl"
    rewrite_log.write(path, ROWS, {"way": "last-3"})
    assert rewrite_log.read(path) == ROWS
    assert path.with_suffix(".json").read_text() == '{\n "way": "last-3"\n}\n'
    assert [row.failed for row in ROWS] == [False, False, True]
    assert [row.ranking for row in ROWS] == [("d1", "d2"), (), ()]
    assert rewrite_log.of_queries(ROWS, [("a", "1"), ("b", "1"), ("b", "2")])
    assert not rewrite_log.of_queries(ROWS, [("a", "1"), ("b", "2"), ("b", "1")])


@pytest.mark.parametrize(("lines", "kept"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 5)])
def test_whole_parts_are_kept(tmp_path: Path, lines: int, kept: int) -> None:
    """Parts have two rows, the last one of five has one."""
    rows = [dataclasses.replace(ROWS[0], id=f"{n}") for n in range(5)]
    path = tmp_path / "x.jsonl"
    path.touch()
    rewrite_log.append(path, rows[:lines])
    with path.open("a") as file:
        file.write('{"id": "9", "coll')
    assert rewrite_log.read_parts(path, 2, 5) == rows[:kept]
    rewrite_log.append(path, rows[kept:])
    assert rewrite_log.read(path) == rows


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with pytest.raises(InputError, match=r"x\.jsonl"):
        rewrite_log.read(path)
    assert rewrite_log.read_parts(path, 2, 5) == []
    for line in ('{"id": "1"}', "[1]", "no", '{"id": "1", "found": 3}'):
        path.write_text(line + "\n")
        with pytest.raises(InputError, match=r"x\.jsonl"):
            rewrite_log.read(path)
        with pytest.raises(InputError, match="line 1: is no row"):
            rewrite_log.read_parts(path, 2, 5)
