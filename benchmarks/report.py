"""Reports the cases of a benchmark: a table, one JSON object on the last line, and a stored file.

Full runs are stored in `benchmarks/results/SUITE/DATE-MACHINE.json`; `benchmarks.results` writes
`docs/results.md` from these files.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.runtime.whole_files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
# Processes that waited for a core in the minute before the run, per core: below it, a machine that
# other work leaves to the benchmark.
IDLE_LOAD = 0.25


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

    cores, model = usable_cores(), processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    device = jax.devices()[0]
    return (
        f"{model}, {cores} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"jax {jax.__version__} on {jax.device_count()} {device.device_kind}"
    )


def processor() -> str:
    """The processor's name, such as "AMD EPYC"."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load() -> float:
    """Load average of the last minute; 0 where the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def slug(name: str) -> str:
    """A processor's or a device's name as a part of a file's name: "AMD EPYC 7B13" → amd-epyc."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((?:r|tm)\)", " ", name.lower()))
    return "-".join(words[:2]) or "unknown"


def store(
    suite: str,
    cases: Sequence[Case],
    load_before: float,
    *,
    on: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Adds the cases to the file of this day and machine; a case of the same name is replaced.

    Args:
        load_before: `load()` right before the run.
        on: the machine as `machine()` writes it; None: this one, on JAX's first device.

    Returns:
        The file.
    """
    import jax

    device = jax.devices()[0]
    name = slug(processor() if device.platform == "cpu" else device.device_kind)
    today = datetime.date.today().isoformat()
    path = folder / suite / f"{today}-{name}.json"
    saved: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": []}
    state = {"commit": commit(), "load": load_before}
    state["idle"] = load_before <= IDLE_LOAD * usable_cores()
    fresh = [dataclasses.asdict(case) | state for case in cases if case.value is not None]
    names = {case["case"] for case in fresh}
    kept = [case for case in saved["cases"] if case["case"] not in names]
    stored = {
        "suite": suite,
        "machine": on or machine(),
        "date": today,
        "packages": {package: importlib.metadata.version(package) for package in PACKAGES},
        "cases": [*kept, *fresh],
    }
    write_whole(path, json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    return path


def commit() -> str:
    """The commit of the working tree, with "+" where files differ from it; "" without git."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


def show(suite: str, cases: Sequence[Case]) -> int:
    """Prints the tables and the JSON line; returns the exit status: 1 if a case could not run."""
    lines = [("case", "value", "unit", "peer", "ratio", "target", "holds")]
    for case in cases:
        lines.append(
            (
                case.case,
                number(case.value),
                case.unit,
                number(case.peer),
                number(case.ratio),
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
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def print_table(lines: Sequence[tuple[str, ...]]) -> None:
    """Prints a table; every column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _detail(value: float | str) -> str:
    return value if isinstance(value, str) else number(value)


def number(value: float | None) -> str:
    """Four digits; "" without a value."""
    return "" if value is None else f"{value:.4g}"
