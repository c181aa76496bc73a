"""Writes the tables of docs/published.md: `python -m benchmarks.published_table`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.published_constants import RUNS, Constant, shared, value
from configs import published

DOCUMENT = Path(__file__).parents[1] / "docs" / "published.md"
BEGIN = "<!-- written by python -m benchmarks.published_table -->"
HEAD = "| their file | constant | theirs | ours | what differs |\n| --- | --- | --- | --- | --- |"
# Run → another run, whose constants it repeats; it adds some of its own.
LIKE = {
    "contriever-babilong-em": "contriever-babilong",
    "gte-hotpotqa-musique-wiki": "gte-hotpotqa-musique",
}


def tables() -> str:
    """The shared constants once, then what each run adds, as Markdown."""
    same = {constant.name for constant in shared("")}
    first = next(iter(RUNS))
    common = [constant for constant in RUNS[first] if constant.name in same]
    parts = ["## All runs", "", *_table(first, common)]
    for name, constants in RUNS.items():
        of_other = {c.name: c for c in RUNS[LIKE[name]]} if name in LIKE else {}
        own = [c for c in constants if c.name not in same and of_other.get(c.name) != c]
        also = f" As `:{LIKE[name]}`, and" if name in LIKE else ""
        parts += [
            "",
            f"## `:{name}`",
            "",
            *([also.strip(), ""] if also else []),
            *_table(name, own),
        ]
    return "\n".join(parts) + "\n"


def _table(run: str, constants: Sequence[Constant]) -> list[str]:
    config = published.get_config(run)
    rows = []
    for constant in constants:
        cells = (
            constant.source,
            f"`{constant.name}`" if "." in constant.name else constant.name,
            _text(constant.theirs),
            _text(value(config, constant.name)),
            constant.why,
        )
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return [HEAD, *rows]


def _text(constant: Any) -> str:
    if isinstance(constant, str):
        return f"`{constant}`" if constant else "none"
    return f"{constant:,}" if type(constant) is int else str(constant)


def main() -> None:
    """Writes the tables anew behind the text of the document."""
    text, _, _ = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(f"{text}{BEGIN}\n\n{tables()}")


if __name__ == "__main__":
    main()
