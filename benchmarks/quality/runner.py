"""Runs parts by the user's commands and keeps their results, so that a suite resumes.

Trainings lie in runs/benchmarks/quality/TRAINER, where TRAINER is a digest of the package and the
configs; results in `results-SUITE` inside of it, SUITE being a digest of this folder. So no table
mixes two versions. An interrupted training resumes by its checkpoint, an interrupted scoring by its
logs, and a finished part is not run again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from qrag_jax.errors import InputError
from qrag_jax.runtime.whole_files import write_whole

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ("qrag_jax/**/*.py", "qrag_jax/**/*.txt", "configs/*.py")
SUITE = ("benchmarks/quality/*.py",)
PACKAGES = ("jax", "jaxlib", "flax", "optax")
RUNS = Path("runs/benchmarks/quality")

Run = Callable[[], dict[str, Any]]


def code_digest(patterns: Iterable[str] = TRAINER, root: Path = ROOT) -> str:
    """A digest of the code under `root` (names and contents) and of its packages' versions."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Kept:
    """The folders of one version of the code.

    Attributes:
        runs: of the trainings.
        results: of the parts' results.
    """

    runs: Path
    results: Path
    root: Path = ROOT

    @classmethod
    def of(cls, under: Path = RUNS, root: Path = ROOT) -> Kept:
        """The folders of the present code."""
        runs = under / code_digest(root=root)
        return cls(runs, runs / f"results-{code_digest(SUITE, root)}", root)

    def finish(self, parts: Mapping[str, Run], names: Sequence[str]) -> list[str]:
        """Runs these parts where they have no result yet.

        One that fails is reported and the others are run, since hours of parts may follow that do
        not depend on it.

        Returns:
            the names of the parts that failed.

        Raises:
            InputError: data or packages are missing, or the code changed while a part was run.
        """
        failed = []
        for name in names:
            path = self.results / f"{name}.json"
            if path.exists():
                print(f"{name}: finished before, {path}", flush=True)
                continue
            version = code_digest(TRAINER + SUITE, self.root)
            try:
                result = parts[name]()
            except InputError:
                raise
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            if code_digest(TRAINER + SUITE, self.root) != version:
                raise InputError(f"the code changed while {name} was run; run it again.")
            about = {"machine": report.machine(), "date": datetime.date.today().isoformat()}
            write_whole(path, json.dumps(result | about) + "\n")
        return failed

    def finished(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The results that are there, by part."""
        paths = {name: self.results / f"{name}.json" for name in names}
        return {name: json.loads(p.read_text()) for name, p in paths.items() if p.exists()}


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines; see `write_whole`."""
    write_whole(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of JSON lines."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def command(module: str, *words: Any) -> None:
    """Runs a module of the package as a user does and shows its output."""
    arguments = [str(word) for word in words]
    print(f"$ python -m {module} {shlex.join(arguments)}", flush=True)
    # What a command prints is no result of this suite, whose last line is one JSON object.
    subprocess.run([sys.executable, "-m", module, *arguments], check=True)  # noqa: S603


def once(marker: Path, run: Callable[..., object], *words: Any) -> None:
    """Does something unless the marker says that the same was done before."""
    arguments = json.dumps([str(word) for word in words])
    if not marker.exists() or marker.read_text() != arguments:
        run(*words)
        write_whole(marker, arguments)


def train(workdir: Path, config: str, fields: Iterable[str], seed: int) -> float:
    """Starts or resumes a training as a user does; returns its minutes over all starts.

    Args:
        config: such as configs/hotpotqa.py:minilm.
        fields: such as train.steps=20.
    """
    words = [f"--config={config}", f"--workdir={workdir}", f"--config.seed={seed}"]
    command("qrag_jax.train", *words, *(f"--config.{field}" for field in fields))
    return float(json.loads((workdir / "training.json").read_text())["seconds"]) / 60
