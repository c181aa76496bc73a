"""Writes the tables of docs/which.md behind its text, and its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report

DOCUMENT = Path(__file__).parents[2] / "docs" / "which.md"
PICTURE = "which_recall.png"
BEGIN = "<!-- written by python -m benchmarks --suite which -->"
LEGEND = (
    "The share of questions with all gold passages within 4, against the time of a question; o: "
    "trained, or never to be trained; x: untrained; triangles: HARR, whose agent is told more"
)


def text(tables: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """What the suite writes: command, dates, machines, picture, tables."""
    dates = sorted({result["date"] for result in results.values()})
    machines = dict.fromkeys(result["machine"] for result in results.values())
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    told = f"`python -m benchmarks --suite which`, {when}, on: "
    head = f"{told}{'; '.join(machines) or report.machine()}.\n\n![{LEGEND}]({PICTURE})\n"
    sections = [table.replace("### ", "## ", 1) for table in tables]
    return "\n".join([head, *sections])


def write(
    tables: Sequence[str],
    draw: Callable[[Path], object],
    results: Mapping[str, Mapping[str, Any]],
    document: Path = DOCUMENT,
) -> None:
    """Writes them anew; the text of the page before the mark stays. Nothing without results.

    Args:
        draw: writes the picture to a path.
    """
    if not results:
        return
    before, _, _ = document.read_text(encoding="utf-8").partition(BEGIN)
    draw(document.parent / PICTURE)
    document.write_text(f"{before}{BEGIN}\n\n{text(tables, results)}", encoding="utf-8")
    print(f"written: {document}")
