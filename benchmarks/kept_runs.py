"""Keeps the runs and results of a suite of long trainings, so that an interrupted suite resumes.

Runs and results belong to one version of the code. After a change of the trainer everything is
trained anew, even if older runs are there: a table never has figures of two versions.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from qrag_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ("qrag_jax/**/*.py", "qrag_jax/**/*.txt", "configs/*.py")
SUITES = ("benchmarks/**/*.py",)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
RUNS = Path("runs/benchmarks")

Part = Callable[[], dict[str, Any]]


def code_version(
    root: Path = ROOT, patterns: Sequence[str] = TRAINER, without: Sequence[str] = ()
) -> str:
    """A digest of the code under `root` (names and contents) and of its packages' versions.

    Args:
        patterns: files that count.
        without: files of these that do not.
    """
    digest = hashlib.sha256()
    for package in PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    left_out = {path for pattern in without for path in root.glob(pattern)}
    counted = {path for pattern in patterns for path in root.glob(pattern)} - left_out
    for path in sorted(counted):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Kept:
    """Where one suite keeps what it made.

    Attributes:
        suite: name of the suite.
        runs: folder of the trainings, for this version of the trainer.
        results: folder of the parts' results, for this version of trainer and suites.
        root: folder of the code.
        showing: files of the suite that only show its results; a change of these keeps them.
    """

    suite: str
    runs: Path
    results: Path
    root: Path = ROOT
    showing: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, suite: str, root: Path = ROOT, under: Path = RUNS, *, showing: Sequence[str] = ()
    ) -> Kept:
        """The folders of a suite; prints them. Folders of other versions stay where they are."""
        runs = under / suite / code_version(root)
        others = sum(entry.is_dir() for entry in runs.parent.glob("*")) - runs.is_dir()
        print(f"runs: {runs}" + (f" ({others} of other versions beside it)" if others else ""))
        results = runs / f"results-{code_version(root, SUITES, showing)}"
        return cls(suite, runs, results, root, tuple(showing))

    def finish(
        self, parts: Mapping[str, Part], only: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        """Runs the parts that have no result yet; returns all existing results, by part.

        Args:
            parts: all parts of the suite.
            only: parts to run; empty: all. Existing results of other parts are returned too.

        Raises:
            InputError: `only` names an unknown part, or the code changed while a part was run.
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
                "trainer": code_version(self.root),
            }
            path.parent.mkdir(parents=True, exist_ok=True)  # of a part such as 2wiki/bm25
            building = path.with_suffix(".partial")
            building.write_text(json.dumps(result, indent=1) + "\n")
            os.replace(building, path)
        return self.finished(parts)

    def finished(self, parts: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The results that are there, by part."""
        paths = {name: self.results / f"{name}.json" for name in parts}
        return {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}

    def _version(self) -> str:
        return code_version(self.root, TRAINER + SUITES, self.showing)

    def write_tables(
        self, results: Mapping[str, Mapping[str, Any]], note: str, tables: Sequence[str]
    ) -> None:
        """Writes the tables of RESULTS.md and docs/results.md to one file, and prints its path."""
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
    """Empties a run's folder; returns the folder."""
    shutil.rmtree(workdir, ignore_errors=True)
    return workdir


def command(module: str, *arguments: str) -> None:
    """Runs a module of the package as a user does and shows its output."""
    print(f"$ python -m {module} {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)  # noqa: S603


def train(workdir: Path, config: str, *fields: str) -> Path:
    """Starts or resumes a training as a user does; returns the run's folder."""
    command("qrag_jax.train", f"--config={config}", f"--workdir={workdir}", *fields)
    return workdir


def metrics(workdir: Path, key: str) -> list[float]:
    """The values of one metric of a run, oldest first."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]
