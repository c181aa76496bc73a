"""What a suite of long trainings keeps, so that an interrupted one goes on: runs and results.

Both are of one version of the code. A changed trainer trains anew, whatever lies there from before:
figures of two versions never meet in one table.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from qrag_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ("qrag_jax/**/*.py", "qrag_jax/**/*.txt", "configs/*.py")
SUITES = ("benchmarks/**/*.py",)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
RUNS = Path("runs/benchmarks")
PROGRAMS = "compilation_cache"  # of a run, as train.py has it

Part = Callable[[], dict[str, Any]]


def code_version(root: Path = ROOT, patterns: Sequence[str] = TRAINER) -> str:
    """A digest of the code under `root`, names and contents, and of the packages it uses."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where one suite keeps what it made.

    Attributes:
        suite: its name. runs: folder of trainings, of this version of the trainer. results: folder
            of the parts' results, of this version of trainer and suites. root: of the code.
    """

    suite: str
    runs: Path
    results: Path
    root: Path = ROOT

    @classmethod
    def of(cls, suite: str, root: Path = ROOT, under: Path = RUNS) -> Kept:
        """Those of a suite, told on the screen; folders of other versions stay where they are."""
        runs = under / suite / code_version(root)
        others = sum(entry.is_dir() for entry in runs.parent.glob("*")) - runs.is_dir()
        print(f"runs: {runs}" + (f" ({others} of other versions beside it)" if others else ""))
        return cls(suite, runs, runs / f"results-{code_version(root, SUITES)}", root)

    def finish(
        self, parts: Mapping[str, Part], only: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """Runs the parts that have no result yet; returns all results there are, by part.

        Args:
            only: parts to run, none: all. Results of others are returned if they are there.

        Raises:
            InputError: `only` names a part that there is not.
        """
        if unknown := [name for name in only if name not in parts]:
            raise InputError(f"--only={unknown[0]}: the parts are {', '.join(parts)}.")
        for name in only or parts:
            path = self.results / f"{name}.json"
            if path.exists():
                print(f"{name}: finished before, {path}", flush=True)
                continue
            started, version = time.monotonic(), self._version()
            result = parts[name]()
            if self._version() != version:
                raise InputError(
                    f"the code has changed while {name} was run, so that its figures are of no one "
                    "version; run it again."
                )
            result |= {
                "part_seconds": time.monotonic() - started,
                "machine": report.machine(),
                "date": datetime.date.today().isoformat(),
            }
            self.results.mkdir(parents=True, exist_ok=True)
            building = path.with_suffix(".partial")
            building.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(building, path)
        paths = {name: self.results / f"{name}.json" for name in parts}
        return {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}

    def _version(self) -> str:
        return code_version(self.root, TRAINER + SUITES)

    def write_tables(
        self, results: Mapping[str, Mapping[str, Any]], note: str, tables: Sequence[str]
    ) -> None:
        """The tables as README.md and RESULTS.md have them, in one file that is told."""
        if not results:
            return
        dates = sorted({result["date"] for result in results.values()})
        path = self.results / "tables.md"
        path.write_text(
            f"`python -m benchmarks --suite {self.suite}`, {' to '.join(dates)}, "
            f"on: {report.machine()}. {note}\n\n" + "\n".join(tables)
        )
        print(f"tables: {path}")


def begin_anew(workdir: Path) -> Path:
    """Empties a run's folder but for its compiled programs; returns it."""
    for entry in workdir.glob("*"):
        if entry.is_dir() and entry.name != PROGRAMS:
            shutil.rmtree(entry)
        elif not entry.is_dir():
            entry.unlink()
    return workdir


def command(module: str, *arguments: str) -> None:
    """Runs a module of the package as a user does; what it prints is shown."""
    print(f"$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)  # noqa: S603


def train(workdir: Path, config: str, *fields: str) -> Path:
    """Trains, or goes on with a training, as a user does; returns the run's folder."""
    command("qrag_jax.train", f"--config={config}", f"--workdir={workdir}", *fields)
    return workdir


def metrics(workdir: Path, key: str) -> list[float]:
    """The values of one metric of a run, oldest first."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]
