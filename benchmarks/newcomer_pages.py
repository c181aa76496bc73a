"""Follows the README and docs/ word for word, in a fresh clone and with a fresh wheel.

The blocks of each page are run by `tests/test_docs_blocks.py`, as a reader would run them; here it
is told to use what is installed, and not the checkout. Every command is asked for its help.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import ROOT
from benchmarks.newcomer_start import clean_environment, done, wheel_in
from benchmarks.report import Case
from qrag_jax.__main__ import COMMANDS

INSTALLED = "QRAG_READ_INSTALLED"  # see tests/test_docs_blocks.py
PAGES = "tests/test_docs_blocks.py"
_PLACES = {"pages": "a fresh clone", "pages-wheel": "a fresh wheel"}


def in_clone() -> dict[str, Any]:
    """The pages in a clone of the checkout, by its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        clone = _cloned(Path(folder))
        done(["make", ".venv/.installed-test"], clone)
        return _followed(clone / ".venv" / "bin", clone)


def with_wheel() -> dict[str, Any]:
    """The pages by a wheel of the checkout in a new environment."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = wheel_in(place)
        python = str(place / "env" / "bin" / "python")
        done([python, "-m", "pip", "--quiet", "install", f"{wheel}[test]"], place)
        return _followed(place / "env" / "bin", _cloned(place))


def _cloned(place: Path) -> Path:
    clone = place / "qrag_jax"
    done(["git", "clone", "--quiet", str(ROOT), str(clone)], place)
    return clone


def _followed(programs: Path, clone: Path) -> dict[str, Any]:
    """What the blocks of all pages, and the help of all commands, end with."""
    report, empty = clone / "pages.xml", clone.parent / "nothing"
    empty.mkdir()
    words = [str(programs / "python"), "-m", "pytest", "-q", "-m", "long", PAGES]
    subprocess.run(  # noqa: S603
        [*words, f"--junitxml={report}"],
        cwd=clone,
        env={**clean_environment(), INSTALLED: "1"},
        check=False,
    )
    return {
        "pages": dict(read(report)),
        "help": {name: _help(programs / "qrag", name, empty) for name in COMMANDS},
    }


def read(report: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Page by page what a report of JUnit's form says: seconds, and what was wrong or "".

    Raises:
        RuntimeError: it has no page.
    """
    root = xml.etree.ElementTree.parse(report).getroot()  # noqa: S314 – our own file
    found = 0
    for case in root.iter("testcase"):
        _, _, page = (case.get("name") or "").partition("[")
        if not page:
            continue
        found += 1
        problems = [each for each in case if each.tag in ("failure", "error", "skipped")]
        wrong = " ".join((each.get("message") or each.tag)[-400:] for each in problems)
        yield page.rstrip("]"), {"seconds": float(case.get("time") or 0), "wrong": wrong}
    if not found:
        raise RuntimeError(f"{report} has no page")


def _help(qrag: Path, command: str, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    told = subprocess.run(  # noqa: S603
        [str(qrag), command, "--help"],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    wrong = "" if told.returncode == 0 else f"status {told.returncode}: {told.stderr[-400:]}"
    if not wrong and len(told.stdout.splitlines()) < 5:
        wrong = f"it tells no more than {told.stdout!r}"
    return {"seconds": time.monotonic() - began, "wrong": wrong}


def page_cases(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Case]:
    """How many pages can be followed and how many commands tell their help; the others by name."""
    for part, where in _PLACES.items():
        for kind, told in (("pages", "pages followed"), ("help", "commands that tell their help")):
            rows: Mapping[str, Any] = results.get(part, {}).get(kind, {})
            if not rows:
                continue
            wrong = {name: row["wrong"] for name, row in rows.items() if row["wrong"]}
            seconds = [row["seconds"] for row in rows.values()]
            yield Case(
                f"{where}: {told}",
                len(rows) - len(wrong),
                "",
                target=str(len(rows)),
                holds=not wrong,
                details={"seconds": sum(seconds), "slowest, s": max(seconds), **wrong},
            )
