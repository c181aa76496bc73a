"""Finds what there is to show in the folder of a run, or in a file, before anything is read."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.errors import InputError
from qrag_jax.evaluators.episode_sample import KINDS
from qrag_jax.evaluators.shown.rows import METRICS, SAMPLE, kind_of
from qrag_jax.metrics import retrieval_log
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.episode_file import EPISODES_NAME
from qrag_jax.runtime.saved_config import CONFIG_NAME, flat
from qrag_jax.runtime.writers import METRICS_NAME

EVAL, UNTRAINED = "eval", "untrained"
STEP_0 = "best-0"  # a best checkpoint of untrained weights
_GIVE = "give the folder of a run, such as runs/quickstart, or a log in it"
_TRAINED = re.compile(r"(best|last)-[1-9]\d*")
_BESIDE = ("single_step_", "planned_")  # names of logs that go with one of the same play


@dataclasses.dataclass(frozen=True)
class Log:
    """A log of episodes.

    Attributes:
        path: the file.
        kind: one of `episode_sample.KINDS`, or `rows.SAMPLE`.
        before: the log of the untrained weights, if it is there.
    """

    path: Path
    kind: str
    before: Path | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """A run, or a single file.

    Attributes:
        path: as it was given.
        folder: of the run; None: a file that is of no run.
        metrics: of its training; None: there are none.
        log: its episodes; None: there are none.
        others: further logs, which are not shown.
    """

    path: Path
    folder: Path | None
    metrics: Path | None
    log: Log | None
    others: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        """What the run is called."""
        return (self.folder or self.path.absolute().parent).resolve().name

    @property
    def config(self) -> dict[str, Any]:
        """The run's config; {} if there is none that can be read."""
        return {} if self.folder is None else _object(self.folder / CONFIG_NAME)

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the config that the log was made with, by their dotted names.

        The record beside a retrieval log says it; else the run's config does.
        """
        fields = flat(self.config)
        if self.log is not None:
            record = _object(retrieval_log.meta_path(self.log.path))
            fields |= {
                name.removeprefix("config."): value
                for name, value in record.items()
                if name.startswith("config.")
            }
        return fields


def find(given: Sequence[Path]) -> list[Place]:
    """What there is in each of these; what is given twice is shown once."""
    places: dict[str, Place] = {}
    for path in given:
        if not path.exists():
            raise InputError(f"{path} does not exist; {_GIVE}.")
        place = _folder(path) if path.is_dir() else _file(path)
        places.setdefault(os.path.realpath(path), place)
    return [*places.values()]


def _folder(path: Path) -> Place:
    metrics, sample = path / METRICS_NAME, path / EPISODES_NAME
    is_run = metrics.is_file() or (path / CONFIG_NAME).is_file()
    base = path / EVAL if is_run or (path / EVAL).is_dir() else path
    logs = [(file, kind) for file, kind in _logs(base) if kind in KINDS]
    if not (is_run or logs or sample.is_file()):
        raise InputError(
            f"{path} is not the folder of a run: it holds no {METRICS_NAME}, no {EPISODES_NAME} "
            f"and no logs of an evaluation; {_GIVE}."
        )
    log, others = None, [file for file, _ in logs]
    if logs:
        file, kind = max(logs, key=lambda each: _worth(each[0], base))
        log = Log(file, kind, _before(file, kind))
        others = [each for each in others if each not in (file, log.before)]
    if sample.is_file() and kind_of(sample) == SAMPLE:
        if log is None:
            log = Log(sample, SAMPLE)
        else:
            others.append(sample)
    if log is None and not metrics.is_file():
        raise InputError(
            f"{path} holds nothing to show yet, neither {METRICS_NAME} nor logs of an evaluation; "
            "train it first (qrag train), or give another run."
        )
    return Place(path, path, metrics if metrics.is_file() else None, log, tuple(sorted(others)))


def _file(path: Path) -> Place:
    kind = kind_of(path)
    if kind is None:
        raise InputError(f"{path} is no log that can be shown; {_GIVE}.")
    folder = next((each for each in path.absolute().parents if _is_run(each)), None)
    if kind == METRICS:
        return Place(path, folder, path, None)
    before = None if kind == SAMPLE else _before(path, kind)
    return Place(path, folder, None, Log(path, kind, before))


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_NAME).is_file() and (folder / CONFIG_NAME).is_file()


def _logs(base: Path) -> Iterator[tuple[Path, str | None]]:
    """Logs of evaluations, which are in a folder or in those right below it."""
    for file in sorted([*base.glob("*.jsonl"), *base.glob("*/*.jsonl")]):
        if file.is_file() and file.name not in (METRICS_NAME, EPISODES_NAME):
            yield file, kind_of(file)


def _worth(file: Path, base: Path) -> tuple[Any, ...]:
    """The largest is shown: the newest one of trained weights."""
    label = _label(file, base)
    is_beside = file.name.startswith(_BESIDE)
    is_trained = bool(_TRAINED.fullmatch(label))
    return (
        is_trained,
        label not in (UNTRAINED, STEP_0),
        not is_beside,
        file.stat().st_mtime,
        file.name,
    )


def _label(file: Path, base: Path) -> str:
    """What played: its folder's name, or its own where logs lie in one folder."""
    return file.stem if file.parent == base else file.parent.name


def _before(file: Path, kind: str) -> Path | None:
    """The log of the untrained weights that goes with this one."""
    if file.parent.name == STEP_0:
        return None
    for other in (file.parent.parent / UNTRAINED / file.name, file.parent / f"{UNTRAINED}.jsonl"):
        is_other = other.is_file() and other.resolve() != file.resolve()
        if is_other and kind_of(other) == kind:
            return other
    return None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = bounded_json.load(path, finite=False)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
