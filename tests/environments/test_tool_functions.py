"""Functions of a user's file as tools, in their real process; and those of the example."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.tools import calculate, look_up
from qrag_jax.environments.tool_functions import DONE, FAILED, MALFORMED, ToolFunctions
from qrag_jax.errors import InputError

TOOLS = '''
import enum
import os
import sys
import time
from typing import Literal

calls = 0

Deed = Literal["count", "hang", "die", "exit", "print", "flood", "odd"]

def act(what: Deed, by: float = 1.5) -> str:
    """Does something.

    Args:
        what: What to do.
        by: A number.
    """
    global calls
    calls += 1
    match what:
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(3)
        case "exit":
            sys.exit("over")
        case "print":
            print("printed")
            os.write(1, b"written")
            return sys.stdin.read()
        case "flood":
            return "x" * 10_000_000
        case "odd":
            return calculate
    return {"calls": calls, "by": by, "Köln": None}

def calculate() -> str:
    """Divides."""
    return str(1 / 0)

class Level(enum.Enum):
    LOW = 1

def raised(level: Level) -> int:
    """Goes one level up.

    Args:
        level: From here.
    """
    return level.value + 1

def _helper(x):
    return x
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def functions(folder: Path) -> Iterator[ToolFunctions]:
    (folder / "my_tools.py").write_text(TOOLS)
    found = ToolFunctions(str(folder / "my_tools.py"), folder / "log", seconds=2.0, most=200)
    yield found
    found.end()


def test_a_schema_is_of_docstring_and_annotations(functions: ToolFunctions) -> None:
    one, other, third = (each["function"] for each in functions.schemas)
    assert (one["name"], other["name"], third["name"]) == ("act", "calculate", "raised")
    assert other["description"] == "Divides."
    assert one["parameters"]["required"] == ["what"]
    assert "hang" in one["parameters"]["properties"]["what"]["enum"]
    assert one["parameters"]["properties"]["by"] == {"type": "number", "description": "A number."}


def test_a_call_that_fails_costs_that_call_alone(functions: ToolFunctions) -> None:
    """After one that hangs, or ends its process, the process is another, and counts from 1."""
    functions.end()
    for what, text in (
        ("count", '{"calls": 1, "by": 2.0, "Köln": null}'),
        ("hang", "within 2 seconds"),
        ("count", '{"calls": 1,'),
        ("die", "without a result"),
        ("exit", "SystemExit: over"),
        ("odd", "TypeError"),
        ("count", '{"calls": 3,'),
    ):
        called = functions.call("act", {"what": what, "by": 2})
        assert text in called.text
        assert called.outcome == (DONE if what == "count" else FAILED)
    assert "ZeroDivisionError" in functions.call("calculate", {}).text
    assert functions.call("raised", {"level": 1}) == ("2", DONE)
    assert functions.call("raised", {"level": 2}).outcome == MALFORMED


def test_what_is_printed_is_no_result_and_a_long_result_is_cut(
    functions: ToolFunctions, folder: Path
) -> None:
    assert functions.call("act", {"what": "print"}) == ("", DONE)
    cut = functions.call("act", {"what": "flood"})
    assert cut.text.startswith("x" * 200 + "…")
    assert "10000000" in cut.text
    assert len(cut.text) < 300
    functions.end()
    assert {"printed", "written"} <= {*(folder / "log").read_text().split()}


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (None, "no file"),
        ("raise RuntimeError('at import')", "at import"),
        ("import os\nfrom shutil import copy\ndef _f(): pass", "no function"),
        ("def undescribed(x: int): pass", "undescribed"),
        ("def bare(x):\n    '''Is bare.\n\n    Args:\n        x: A number.\n    '''", "bare"),
    ],
)
def test_files_that_are_refused(code: str | None, named: str, tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(InputError, match=named) as refused:
        ToolFunctions(str(file), tmp_path / "log", seconds=1.0, most=10)
    assert {"config.tools.path", str(file)} <= {*str(refused.value).replace(",", "").split()}
    assert not (tmp_path / "log").exists()


def test_a_file_that_changes_between_two_starts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text('def f() -> str:\n    """Says a."""\n    return "a"')
    functions = ToolFunctions(str(file), tmp_path / "log", seconds=9.0, most=10)
    file.write_text(file.read_text().replace('"a"', '"b"'))
    with pytest.raises(InputError, match="changed"):
        functions.call("f", {})
    functions.end()


# ---------------------------------------------------------------- the example


def test_a_calculator_calculates_and_runs_nothing() -> None:
    for expression, value in {
        " (1931 - 1874) / 2": "28.5",
        "-2 ** 3 + 7 // 2 % 2": "-7",
        "1e3": "1000",
        "2 ** 64": str(2**64),
    }.items():
        assert calculate(expression) == value
    for wrong in ("__import__('os')", "x", "True + 1", "9 ** 9 ** 9", "1 if 1 else 2", "'a' * 3"):
        with pytest.raises(ValueError):
            calculate(wrong)


def test_a_look_up_only_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "facts.sqlite", tmp_path / "other.sqlite"
    for each in (path, other):
        with sqlite3.connect(each) as database:
            database.execute("CREATE TABLE cities (name TEXT, people INTEGER)")
            database.executemany(
                "INSERT INTO cities VALUES (?, ?)", [("Oslo", n) for n in range(30)]
            )
        database.close()
    monkeypatch.setenv("TOOLS_DATABASE", str(path))
    before = path.read_bytes()
    assert look_up("SELECT name, max(people) AS most FROM cities") == [{"name": "Oslo", "most": 29}]
    assert len(look_up("SELECT * FROM cities")) == 20
    assert look_up("SELECT name FROM sqlite_schema") == [{"name": "cities"}]
    for wrong in (
        "DELETE FROM cities",
        "SELECT 1; DROP TABLE cities",
        f"ATTACH '{other}' AS other",
        "PRAGMA journal_mode = WAL",
    ):
        with pytest.raises((sqlite3.Error, sqlite3.Warning)):
            look_up(wrong)
    assert path.read_bytes() == before
