"""Reports the cases of a benchmark: as a table, then as one JSON object on the last line."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Case:
    """One measured figure.

    Attributes:
        case: what was measured.
        value: the figure; None if it could not be measured.
        unit: the unit of `value`.
        peer: the peer's figure from the same run, or the published figure that `case` names.
        ratio: our figure relative to the peer's; above 1, ours is better.
        target: the required result, in words.
        holds: whether the target was met; None without a target.
        details: further figures of the measurement; their names include the unit.
    """

    case: str
    value: float | None
    unit: str
    peer: float | None = None
    ratio: float | None = None
    target: str | None = None
    holds: bool | None = None
    details: Mapping[str, float | str] = dataclasses.field(default_factory=dict)


def machine() -> str:
    """Processor, usable cores, memory, Python, jax and its devices of this machine, in a line."""
    import jax

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = jax.devices()[0]
    return (
        f"{model}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"jax {jax.__version__} on {jax.device_count()} {device.device_kind}"
    )


def show(suite: str, cases: Sequence[Case]) -> int:
    """Prints the tables and the JSON line; returns the exit status: 1 if a case could not run."""
    lines = [("case", "value", "unit", "peer", "ratio", "target", "holds")]
    for case in cases:
        lines.append(
            (
                case.case,
                _number(case.value),
                case.unit,
                _number(case.peer),
                _number(case.ratio),
                case.target or "",
                {True: "yes", False: "NO", None: ""}[case.holds],
            )
        )
    print_table(lines)
    for case in cases:
        if case.details:
            print(f"\n{case.case}")
            print_table([(f"  {name}", _detail(value)) for name, value in case.details.items()])
    result = {
        "suite": suite,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "cases": [dataclasses.asdict(case) for case in cases],
    }
    print(json.dumps(result))
    return int(any(case.value is None for case in cases))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table as in `RESULTS.md`."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cases_markdown(cases: Sequence[Case]) -> str:
    """The cases as a Markdown table for `RESULTS.md`, without their details."""
    held = {True: "yes", False: "**no**", None: ""}
    rows = [
        (c.case, _number(c.value), c.unit, _number(c.peer), _number(c.ratio), c.target or "")
        for c in cases
    ]
    cells = [(*row, held[case.holds]) for row, case in zip(rows, cases, strict=True)]
    return markdown(("case", "ours", "unit", "peer", "ratio", "target", "met"), cells)


def print_table(lines: Sequence[tuple[str, ...]]) -> None:
    """Prints a table; every column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _detail(value: float | str) -> str:
    return value if isinstance(value, str) else _number(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
