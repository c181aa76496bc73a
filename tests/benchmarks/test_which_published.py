"""The results in benchmarks/which_results: what they have, and that the page is made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import which
from benchmarks.which_cases import published
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
