"""Measures on the GPUs of this machine what was estimated without one; prints both side by side.

`python -m benchmarks --suite gpu --run [--quick] [--only=PART,PART]`. Every part (`gpu_parts`) is a
process of its own that ends within `LIMIT`. Its rows are added to a JSON file at once: after an
interruption the same command goes on with the parts that are missing, and with those that failed.
A change of the code or another device begins a new file. Without `--quick` a GPU is needed; with
it, small programs run on whatever device is there.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import OWN, ROOT
from benchmarks.gpu_parts import DEVICE, PARTS
from benchmarks.kept_runs import RUNS, SUITES, TRAINER, code_version
from benchmarks.report import Case, markdown, print_table
from qrag_jax.errors import InputError

LIMIT = 590.0  # seconds of a part
HEADER = (
    "measurement",
    "value",
    "unit",
    "estimate",
    "value / estimate",
    "share of peak",
    "torch",
    "value / torch",
    "note",
)

RunPart = Callable[[str], list[dict[str, Any]]]


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """Runs the parts that are missing; prints the whole table.

    Raises:
        InputError: there is no GPU here, or `only` names an unknown part.
    """
    if unknown := [name for name in only if name not in PARTS]:
        raise InputError(f"--only={unknown[0]}: the parts are {', '.join(PARTS)}.")
    # So that the part that is being run ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    python, device = _python(quick)
    folder = ROOT / RUNS / "gpu" / _name(device, quick)
    kept = folder / "results.json"

    def run_part(name: str) -> list[dict[str, Any]]:
        return _process(python, name, folder, ["--quick"] if quick else [], LIMIT)

    print(f"{device['count']} {device['kind']}; results: {kept}", flush=True)
    results = finish(kept, list(only or PARTS), run_part, device)
    lines = table(results)
    print_table([HEADER, *lines])
    (folder / "table.md").write_text(markdown(HEADER, lines))
    print(f"as Markdown: {folder / 'table.md'}\n")
    return cases(results)


def finish(
    kept: Path, names: Sequence[str], run_part: RunPart, device: dict[str, Any]
) -> dict[str, Any]:
    """Runs the parts without rows in the file `kept`, and adds each one's rows to it.

    A part that fails is noted with the reason, the others go on; it is run again the next time.

    Returns:
        What the file holds: `device`, and `parts` by their names in the order of `PARTS`.
    """
    results = json.loads(kept.read_text()) if kept.exists() else {"device": device, "parts": {}}
    kept.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        if "rows" in results["parts"].get(name, {}):
            print(f"{name}: finished before", flush=True)
            continue
        print(f"{name}: …", flush=True)
        began = time.monotonic()
        try:
            part: dict[str, Any] = {"rows": run_part(name)}
        except PartFailed as failure:
            part = {"failed": str(failure)}
        part |= {
            "seconds": round(time.monotonic() - began, 1),
            "date": datetime.date.today().isoformat(),
        }
        print(f"{name}: {part.get('failed', 'done')}, {part['seconds']} s", flush=True)
        results["parts"][name] = part
        order = sorted(results["parts"], key=[*PARTS, name].index)
        results["parts"] = {one: results["parts"][one] for one in order}
        building = kept.with_suffix(".partial")
        building.write_text(json.dumps(results, indent=1) + "\n")
        os.replace(building, kept)
    return results


class PartFailed(Exception):
    """A part ended without rows; the message says why."""


def table(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """A line for each of our figures, with the estimate and the peer's beside it."""
    lines: list[tuple[str, ...]] = []
    for case in cases(results):
        details = case.details
        lines.append(
            (
                case.case,
                _shown(case.value),
                case.unit,
                _shown(details.get("estimate")),
                _shown(details.get("value over estimate")),
                _shown(details.get("share of peak")),
                _shown(case.peer),
                _shown(case.ratio),
                str(details.get("note", "")),
            )
        )
    return lines


def cases(results: dict[str, Any]) -> list[Case]:
    """The rows as cases; a part that failed is a case without a value."""
    rows = [row for part in results["parts"].values() for row in part.get("rows", ())]
    peers = {row["name"]: row for row in rows if row["peer"]}
    found = [_case(row, peers.pop(row["name"], None)) for row in rows if not row["peer"]]
    # A peer beside which nothing of ours was measured.
    found += [
        Case(f"{row['name']}: torch", row["value"], row["unit"], details={"note": row["note"]})
        for row in peers.values()
    ]
    for name, part in results["parts"].items():
        if "failed" in part:
            found.append(Case(name, None, "", details={"note": part["failed"]}))
    return found


def _case(row: dict[str, Any], peer: dict[str, Any] | None) -> Case:
    value, estimate, notes = row["value"], row["estimate"], [row["note"]]
    theirs = peer["value"] if peer else None
    if peer and peer["note"]:
        notes.append(peer["note"])
    details: dict[str, float | str] = {"note": "; ".join(filter(None, notes))}
    if value is not None and estimate:
        details |= {"estimate": estimate, "value over estimate": value / estimate}
    if row["share_of_peak"] is not None:
        details["share of peak"] = row["share_of_peak"]
    details |= {f"estimate, line {number}": text for number, text in enumerate(row["details"], 1)}
    ratio = value / theirs if value and theirs else None
    return Case(row["name"], value, row["unit"], peer=theirs, ratio=ratio, details=details)


def _shown(value: float | str | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _name(device: dict[str, Any], quick: bool) -> str:
    """A folder's name: the devices, whether all is small, and the version of the code."""
    kind = re.sub(r"\W+", "-", device["kind"].lower()).strip("-")
    version = code_version(ROOT, TRAINER + SUITES)
    return f"{device['count']}-{kind}{'-quick' if quick else ''}-{version}"


def _python(quick: bool) -> tuple[str, dict[str, Any]]:
    """The interpreter whose JAX sees a GPU, and what it sees; if quick, any device will do.

    This process asks no device itself: it would take memory that the parts need.
    """
    seen = []
    for python in (sys.executable, str(OWN)):
        if not Path(python).exists():
            continue
        try:
            device = _process(python, DEVICE, ROOT, [], 120.0)
        except PartFailed:
            continue
        if device["platform"] == "gpu":
            return python, device
        seen.append((python, device))
    if quick and seen:
        return seen[0]
    raise InputError(
        "--run measures on a GPU, and JAX finds none here (pip install 'qrag_jax[cuda12]' where "
        "there is one); --quick runs small programs on any device."
    )


def _process(python: str, name: str, folder: Path, more: list[str], limit: float) -> Any:
    """What a part prints on its last line; its errors go to the screen of this process.

    Raises:
        PartFailed: it took too long, or ended with an error.
    """
    command = [python, "-m", "benchmarks.gpu_parts", name, str(folder), *more]
    errors = subprocess.DEVNULL if name == DEVICE else None
    process = subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    )
    try:
        shown, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        raise PartFailed(f"stopped after {limit:.0f} s") from None
    finally:
        if process.poll() is None:  # with the processes that it has started itself
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise PartFailed(f"ended with status {process.returncode}")
    return json.loads(shown.splitlines()[-1])
