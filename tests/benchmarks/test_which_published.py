"""The results in benchmarks/which_results: what they have, and how the page names their days."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import which
from benchmarks.which_cases import page, published, settings
from benchmarks.which_cases.found import MOST
from benchmarks.which_cases.row import Result
from benchmarks.which_cases.rows import ROWS
from benchmarks.which_cases.settings import SETTINGS, TWO_WIKI, Setting
from tests.data import real_data

RESULTS = published.published()
FILE = Path(which.__file__).parent / "RESULTS.md"
SECTION = "The five side by side"
OTHER_SECTION = "Search in several steps over a corpus"  # of the smaller corpus of HotpotQA


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


@pytest.mark.parametrize("where", ["page", "results"])
def test_the_text_has_numbers_of_the_tables_alone(where: str) -> None:
    """A number that the tables no longer have is one of an earlier run."""
    prose, _, made = page.DOCUMENT.read_text(encoding="utf-8").partition(page.BEGIN)
    known, other = _shares(made), set[str]()
    if where == "page":
        told = _shares(prose)
        other = _shares(_section(OTHER_SECTION))
    else:
        told = _shares(_section(SECTION))
    assert len(told) > 20
    assert told - known <= other
    text = prose if where == "page" else _section(SECTION)
    intervals = _intervals(text)
    assert len(intervals) > 5
    assert intervals <= _intervals(made)


def _shares(text: str) -> set[str]:
    return {*re.findall(r"\b[01]\.\d{3}\b", text)}


def _intervals(text: str) -> set[tuple[str, frozenset[str]]]:
    """Means with their intervals, without signs: a pair may be told the other way round."""
    one = r"[+-]?(\d\.\d{3})"
    found = re.findall(rf"{one} \[{one}, {one}\]", " ".join(text.split()))
    return {(mean, frozenset(bounds)) for mean, *bounds in found}


def _section(title: str) -> str:
    _, found, after = FILE.read_text(encoding="utf-8").partition(f"## {title}\n")
    assert found
    return re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.long
def test_the_page_is_made_of_them(tmp_path: Path) -> None:
    data = real_data.real("2wikimultihopqa").parent

    @cache
    def setting(name: str) -> Setting:
        return settings.setting(name, data, tmp_path / name)

    refused = {
        f"{where}/{part}": why for row in ROWS for where, why in row.refused for part in row.parts
    }
    _, tables = which.shown(RESULTS, setting, refused)
    document = page.DOCUMENT.read_text(encoding="utf-8")
    assert document.partition(f"{page.BEGIN}\n\n")[2] == page.text(tables, RESULTS)
