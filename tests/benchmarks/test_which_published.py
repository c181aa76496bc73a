"""The results in benchmarks/which_results: what they have, and how the page names their days."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import which
from benchmarks.which_cases import page, published
from benchmarks.which_cases.found import MOST
from benchmarks.which_cases.row import Result
from benchmarks.which_cases.rows import ROWS
from benchmarks.which_cases.settings import SETTINGS, TWO_WIKI

RESULTS = published.published()


def test_published_results_are_of_known_parts() -> None:
    known = {f"{where}/{part}" for where in SETTINGS for row in ROWS for part in row.parts}
    known |= {f"{where}/{which.ANSWERS}" for where in SETTINGS}
    assert {*RESULTS} <= known
    assert f"{TWO_WIKI}/bm25" in RESULTS


@pytest.mark.parametrize("name", RESULTS)
def test_a_published_result_is_whole(name: str) -> None:
    made = RESULTS[name]
    assert {"date", "machine", "trainer"} <= {*made}
    if not which._is_row(name):
        return
    result = Result.of_json(made)
    assert json.loads(json.dumps(result.to_json())).items() <= made.items()
    bm25 = Result.of_json(RESULTS[f"{name.partition('/')[0]}/bm25"])
    (asked,) = (found.lists for tests in bm25.ways.values() for found in tests.values())
    for tests in result.ways.values():
        for where, found in tests.items():
            if where == name.partition("/")[0]:
                assert {*found.lists} <= {*asked}
            for names in found.lists.values():
                assert len(names) == len(set(names)) <= MOST


def test_a_setting_without_results_has_no_table() -> None:
    def setting(name: str) -> Any:
        pytest.fail(name)

    lines, tables = which.shown({}, setting, {})
    assert lines == []
    assert not any("what is found" in each for each in tables)


def test_a_page_of_several_days_tells_the_first_and_the_last() -> None:
    days = ("2026-11-27", "2026-11-26", "2026-12-01")
    results = {f"2wiki/{day}": {"date": day, "machine": "a machine"} for day in days}
    assert "which`, 2026-11-26 to 2026-12-01, on: a machine." in page.text([], results)


def test_published_results_stay_until_they_are_made_anew(tmp_path: Path) -> None:
    first = {"lists": {"q": ["p1"]}, "trainer": "a"}
    published.publish({"2wiki/bm25": first, "2wiki/q_rag-42": first}, tmp_path)
    before = (tmp_path / "2wiki" / "bm25.json.gz").read_bytes()
    published.publish({"2wiki/bm25": first}, tmp_path)
    assert (tmp_path / "2wiki" / "bm25.json.gz").read_bytes() == before
    assert not list(published.versions(published.published(tmp_path)))
    second = first | {"trainer": "b"}
    published.publish({"2wiki/bm25": second}, tmp_path)
    there = published.published(tmp_path)
    assert there == {"2wiki/bm25": second, "2wiki/q_rag-42": first}
    assert [*published.versions(there)] == [
        "Of version b of the trainer: 2wiki/bm25.",
        "Of version a of the trainer: 2wiki/q_rag-42.",
    ]


def test_the_page_of_the_docs_has_the_mark() -> None:
    assert page.DOCUMENT.read_text().count(page.BEGIN) == 1
