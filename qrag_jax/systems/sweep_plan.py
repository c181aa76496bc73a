"""A sweep: one experiment, trained with every seed and every combination of settings.

Each run is trained and scored by the commands `train` and `evaluate`. Its folder says how far it
is: with the summary of its evaluation it is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json, typed_json, whole_files
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import log
from qrag_jax.systems import run_flags

NAME = "sweep.json"
MOST_RUNS = 1000
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_OPEN, _CLOSED = "([{", ")]}"
_BASE = "base"  # the name of the combination in which nothing is varied
_LONGEST = 80  # characters of a folder's name, without the seed
_SUMMARIES = ("summary.json", "eval/summary.json")  # of Q-RAG; of the other systems
_TURN = 0.2  # seconds between looks at a command and at the signals
_TAIL = 65536  # bytes of a log in which its last line is looked for
_SHOWN = 300  # characters of that line


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One training with its scores.

    Attributes:
        name: of its folder.
        settings: what people call its combination of settings.
        seed: of the training.
        values: the text of each field that is set.
    """

    name: str
    settings: str
    seed: int
    values: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All runs of a sweep.

    Attributes:
        config: FILE or FILE:VARIANT of the experiment.
        seeds: of the trainings.
        sets: field → the values it takes, as texts.
        samples: questions of the evaluation; 0: all.
        checkpoint: which one is scored; "": the command's own choice.
    """

    config: str
    seeds: tuple[int, ...]
    sets: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    samples: int = 0
    checkpoint: str = ""

    def runs(self) -> list[PlannedRun]:
        """The runs, the seeds of a combination one after the other."""
        varied = [field for field, values in self.sets.items() if len(values) > 1]
        found, names = list[PlannedRun](), set[str]()
        for chosen in itertools.product(*self.sets.values()):
            values = tuple(zip(self.sets, chosen, strict=True))
            told = {field: value for field, value in values if field in varied}
            name = _unused(_folder(told), names)
            settings = ", ".join(f"{field}={value}" for field, value in told.items()) or _BASE
            found += [
                PlannedRun(f"{name}-seed{seed}", settings, seed, values) for seed in self.seeds
            ]
        return found

    def words(self, run: PlannedRun) -> list[str]:
        """The trainer's flags of a run, but for its folder."""
        fields = [f"--config.{field}={value}" for field, value in run.values]
        return [f"--config={self.config}", f"--config.seed={run.seed}", *fields]

    def commands(self, run: PlannedRun, folder: Path) -> list[list[str]]:
        """The words of the two commands of a run, in a sweep's folder."""
        where = f"--workdir={folder / run.name}"
        checkpoint = [f"--checkpoint={self.checkpoint}"] if self.checkpoint else []
        return [
            [sys.executable, "-m", "qrag_jax.train", *self.words(run), where],
            [
                *(sys.executable, "-m", "qrag_jax.evaluate", where),
                *(f"--samples={self.samples}", *checkpoint),
            ],
        ]

    def line(self, run: PlannedRun, folder: Path) -> str:
        """Both commands of a run as a line for a shell."""
        return " && ".join(map(shlex.join, self.commands(run, folder)))

    def check(self) -> None:
        """Refuses values that no training could use, before any of them starts."""
        runs = self.runs()
        if len(runs) > MOST_RUNS:
            raise InputError(f"--set and --seeds make {len(runs)} runs; at most are {MOST_RUNS}.")
        for run in runs:
            if run.seed != self.seeds[0]:
                continue
            try:
                systems.check(run_flags.experiment_of(self.words(run)))
            except InputError as error:
                raise InputError(f"{run.settings}: {error}") from None

    def write(self, folder: Path) -> None:
        """Keeps the plan in the sweep's folder, which is made.

        Raises:
            OSError: it cannot be written.
        """
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        whole_files.write_whole(folder / NAME, text)

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """That of a sweep's folder."""
        path = folder / NAME
        try:
            return typed_json.made(cls, bounded_json.load(path))
        except FileNotFoundError:
            raise InputError(
                f"{path} does not exist; give the folder of a sweep, or --config to begin one."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{path} cannot be read ({whole_files.reason(error)}); restore it, or give "
                "another --out."
            ) from None

    def refuse_other(self, kept: Plan, folder: Path) -> None:
        """Refuses to go on with another plan than the folder's."""
        for name, ours in dataclasses.asdict(self).items():
            theirs = getattr(kept, name)
            if ours != theirs:
                raise InputError(
                    f"{folder / NAME} has another plan ({name}: {_shown(theirs)} there, "
                    f"{_shown(ours)} given); leave the flags out to go on with it, or give "
                    "another --out."
                )


def missing(run: PlannedRun, folder: Path) -> str:
    """Why a run is not done: with the last line that its commands wrote; "": it is done."""
    workdir = folder / run.name
    if any((workdir / name).exists() for name in _SUMMARIES):
        return ""
    if not (log_path := folder / f"{run.name}.log").exists():
        return "not finished" if workdir.exists() else "not begun"
    return f"not finished: {_last_line(log_path)}"


def run_all(plan: Plan, folder: Path, stop: StopSignal) -> None:
    """Does the runs that are not done, one after the other; those that failed are tried again.

    Raises:
        Stopped: a signal came; the run in progress has saved, and goes on from there.
    """
    for run in plan.runs():
        stop.check()
        if not missing(run, folder):
            log(f"{run.name}: done already")
            continue
        for words in plan.commands(run, folder):
            command = words[2].rpartition(".")[2]
            log(f"{run.name}: {command}")
            status = _done(words, folder / f"{run.name}.log", stop)
            stop.check()
            if status:
                log(f"{run.name}: {command} failed with {status}; {missing(run, folder)}")
                break


def _done(words: Sequence[str], log_path: Path, stop: StopSignal) -> int:
    """Runs a command to its end; returns its status.

    A stop is passed on once, as SIGTERM: the command saves and ends.
    """
    with log_path.open("ab") as file:
        process = subprocess.Popen(  # noqa: S603  a list of arguments, no shell
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
        )
        passed_on = False
        while True:
            try:
                return process.wait(_TURN)
            except subprocess.TimeoutExpired:
                if stop.requested and not passed_on:
                    passed_on = True
                    process.send_signal(signal.SIGTERM)


def _last_line(path: Path) -> str:
    """The last error, or else the last line, of a log."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n") if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    found = [*lines[-1:], *errors[-1:]]
    return found[-1][:_SHOWN] if found else "it wrote nothing"


def sets_of(given: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The fields and values of `FIELD=V1,V2`; commas inside of brackets and quotes part nothing."""
    found: dict[str, tuple[str, ...]] = {}
    for each in given:
        field, equals, text = each.partition("=")
        field = field.removeprefix("config.")
        if not equals or not _FIELD.fullmatch(field):
            raise InputError(f"--set={each} is not of the form FIELD=VALUE,VALUE.")
        if field == "seed":
            raise InputError(f"--set={each} sets the seed; give --seeds in its place.")
        if field in found:
            raise InputError(f"--set={each} gives the values of {field} again; give it once.")
        values = _parted(text)
        if len({*values}) < len(values):
            raise InputError(f"--set={each} has a value twice; give each once.")
        found[field] = values
    return found


def seeds_of(given: Sequence[str]) -> tuple[int, ...]:
    """The numbers of `--seeds`."""
    if not given or not all(re.fullmatch(r"[0-9]{1,10}", each) for each in given):
        raise InputError(f"--seeds={','.join(given)} is no list of whole numbers, such as 42,43.")
    seeds = tuple(int(each) for each in given)
    if len({*seeds}) < len(seeds) or max(seeds) >= 2**32:
        raise InputError(f"--seeds={','.join(given)} must be different numbers below 2³².")
    return seeds


def _parted(text: str) -> tuple[str, ...]:
    parts, depth, quote = [""], 0, ""
    for mark in text:
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        else:
            depth += (mark in _OPEN) - (mark in _CLOSED)
        if mark == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += mark
    return tuple(parts)


def _folder(values: dict[str, str]) -> str:
    """A name for people: the last word of each field, and its value."""
    parts = [f"{field.rpartition('.')[2]}-{value}" for field, value in values.items()]
    name = re.sub(r"[^A-Za-z0-9.+-]+", "_", "-".join(parts)).strip("._-")[:_LONGEST]
    return name or _BASE


def _unused(name: str, names: set[str]) -> str:
    number, found = 1, name
    while found in names:
        number += 1
        found = f"{name}-{number}"
    names.add(found)
    return found


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{k}={','.join(v)}" for k, v in value.items()) or "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value)
