"""Writes docs/results.md and README.md's table from what is stored: python -m benchmarks.results

`benchmarks/results/SUITE/DATE-MACHINE.json` are the one home of a figure (`report.store`). `LIST`
says which are shown: the newest one of an idle machine, or, marked, the newest of a busy one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, ROOT, markdown, number

PAGE, README = Path("docs/results.md"), Path("README.md")
BEGIN, END = "<!-- results: written by `make results` -->", "<!-- end of results -->"
MOST = 12  # rows of a suite
HEADER = ("what", "value", "peer", "machine", "date")
BUSY = "; other work beside"


class Row(NamedTuple):
    """A row of the page.

    title: what is measured, in the reader's words.
    suite, case: which figure.
    beside: the case whose figure is the peer's, if not the figure's own peer is.
    in_readme: also in README.md's table.
    """

    title: str
    suite: str
    case: str
    beside: str = ""
    in_readme: bool = False


SUITES = {
    "quality": "Does training help",
    "speed": "Speed on CPUs",
    "gpu": "NVIDIA GPUs",
    "published": "Constants of the published runs",
}
LIST: tuple[Row, ...] = ()


def newest(suite: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By its name the newest figure of each case of a suite, of an idle machine if there is one."""
    found: dict[str, dict[str, Any]] = {}
    files = [json.loads(path.read_text()) for path in sorted((folder / suite).glob("*.json"))]
    for file in sorted(files, key=lambda file: file["date"]):
        for case in file["cases"]:
            state = {name: case.get(name, file.get(name)) for name in ("idle", "commit")}
            figure = case | state | {"machine": file["machine"], "date": file["date"]}
            before = found.get(case["case"])
            if before is None or figure["idle"] or not before["idle"]:
                found[case["case"]] = figure
    return found


def lines(
    rows: Sequence[Row], figures: dict[str, dict[str, dict[str, Any]]]
) -> Iterator[tuple[str, ...]]:
    """The cells of the rows whose figures are there."""
    for row in rows:
        figure = figures[row.suite].get(row.case)
        if figure is not None:
            unit = "" if figure["unit"] == "share" else figure["unit"]
            other = figures[row.suite].get(row.beside, {}).get("value") if row.beside else None
            peer = other if row.beside else figure["peer"]
            shown = (
                "" if x is None else f"{number(x)} {unit}".strip() for x in (figure["value"], peer)
            )
            machine = figure["machine"].partition(", Python")[0] + ("" if figure["idle"] else BUSY)
            yield (row.title, *shown, machine, figure["date"])


def page(listed: Sequence[Row], folder: Path = RESULTS) -> str:
    """The whole page.

    Raises:
        ValueError: a suite has too many rows.
    """
    figures = {suite: newest(suite, folder) for suite in SUITES}
    text = [
        "# Results",
        "<!-- Written by `make results` from benchmarks/results/; edit LIST in "
        "benchmarks/results.py. -->",
        "Each row is one figure of `python -m benchmarks --suite SUITE`, the newest that was "
        "measured on an idle machine; where\nother work ran beside it, the row says so. "
        "Everything measured, with commits and versions of packages, is in\n"
        "`benchmarks/results/`.",
    ]
    for suite, title in SUITES.items():
        rows = [row for row in listed if row.suite == suite]
        if len(rows) > MOST:
            raise ValueError(f"{suite} has {len(rows)} rows in LIST; at most {MOST} are shown")
        cells = list(lines(rows, figures))
        if cells:
            text += [f"## {title}", f"`--suite {suite}`", markdown(HEADER, cells).rstrip()]
    return "\n\n".join(text) + "\n"


def with_table(readme: str, listed: Sequence[Row], folder: Path = RESULTS) -> str:
    """README.md's text with today's table between the two marks.

    Raises:
        ValueError: a mark is missing.
    """
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md lacks {BEGIN} or {END}")
    figures = {suite: newest(suite, folder) for suite in SUITES}
    cells = list(lines([row for row in listed if row.in_readme], figures))
    before, _, rest = readme.partition(BEGIN)
    table = markdown(HEADER, cells).rstrip()
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Writes both; tells the rows of `LIST` that nothing was measured for."""
    (ROOT / PAGE).write_text(page(LIST))
    readme = ROOT / README
    readme.write_text(with_table(readme.read_text(), LIST))
    missing = [row for row in LIST if row.case not in newest(row.suite)]
    for row in missing:
        print(f"not measured: {row.suite}, {row.case}", file=sys.stderr)
    print(f"{PAGE}: {len(LIST) - len(missing)} of {len(LIST)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
