"""Disturbs short runs of every system, and compares what they end with.

Part `kills`: 50 rounds; a process is killed (SIGKILL) at a random moment, and the command is given
again. `disks`: files may grow to a limit, as on a full disk; and the folder is read-only. `clock`:
the wall clock jumps by hours, on and back, while a run goes on. `damage`: bytes of checkpoints and
of caches are changed. Each ends with the numbers of the undisturbed run, or is a fault. Kills of a
real vLLM are in `make test-sidecar`. `--only=PART` runs one part; results are kept.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_rounds import WORKER, Course, Moment, Started, differs, killed, whole
from benchmarks.kept_runs import Kept
from benchmarks.report import Case
from qrag_jax.errors import InputError
from tests import disks

MUST_HOLD = True  # a fault is a failure of the suite
ROUNDS, SEED = 50, 20
LOUD = ("--config.train.log_every=1",)
Q_RAG = (
    *("--config=configs/quickstart.py:tiny", "--config.train.steps=20", *LOUD),
    *("--config.train.checkpoint_every=4", "--config.train.eval_every=8"),
)
HARR = (
    *("--config=configs/harr_grpo.py:tiny", "--config.train.steps=10", *LOUD),
    *("--config.train.batch_size=12", "--config.train.checkpoint_every=3"),
    *("--config.policy.pool=16", "--config.policy.passages=8", "--config.train.eval_every=4"),
)
OFTEN = ("--config.train.checkpoint_every=2", *LOUD)
COURSES = (
    Course("Q-RAG", Q_RAG, 20),
    Course("Q-RAG with a data worker", (*Q_RAG, "--config.data.workers=1"), 20, victim=WORKER),
    Course("Q-RAG, the first of two hosts", Q_RAG, 20, hosts=2, victim="host 0"),
    Course("Q-RAG, the second of two hosts", Q_RAG, 20, hosts=2, victim="host 1"),
    Course("HARR", HARR, 10),
    Course("RLVR", ("--config=configs/rlvr.py:tiny", *OFTEN), 10),
    Course("LeReT", ("--config=configs/leret.py:tiny", "--config.iterations=1", *OFTEN), 46),
    Course(
        "DeepRetrieval",
        ("--config=configs/deepretrieval.py:tiny", "--config.script.steps=6", *OFTEN),
        10,
    ),
)
SHORTEST = Course("Q-RAG", (*Q_RAG, "--config.train.steps=6"), 6)
# Each start, a jump of the wall clock by hours, on and back, at each third reading of it.
JUMPS = """
import random, time
_now, _drawn = time.time, random.Random(3)
time.time = lambda: _now() + _drawn.choice((0, 0, 7200.0, -7200.0))
"""


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite.

    Raises:
        InputError: `only` names an unknown part.
    """
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            return cases({"kills": kills(Path(folder), [SHORTEST], 1)})
    kept = Kept.of("faults")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "kills": lambda: kills(kept.runs / "kills", COURSES, ROUNDS),
        "disks": lambda: each_of(kept.runs / "disks", {"full": full, "read-only": read_only}),
        "clock": lambda: each_of(kept.runs / "clock", {"jumps": jumps}),
        "damage": lambda: each_of(
            kept.runs / "damage", {"checkpoint": checkpoints, "compiled programs": programs}
        ),
    }
    return cases(kept.finish(parts, only))


def cases(results: dict[str, dict[str, Any]]) -> list[Case]:
    """A case for each kind of disturbance."""
    found = []
    for part, result in results.items():
        for name, row in result["rows"].items():
            for wrong in row["wrong"]:
                print(f"FAULT, {part}, {name}: {wrong}")
            found.append(
                Case(
                    f"{part}: {name}",
                    None if row["rounds"] is None else float(len(row["wrong"])),
                    f"faults in {row['rounds']} rounds",
                    target="0",
                    holds=not row["wrong"],
                    details=row.get("details", {}),
                )
            )
    return found


def kills(folder: Path, courses: Sequence[Course], rounds: int) -> dict[str, Any]:
    """So many kills in all, the courses in turn; rounds that are done are kept in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    seconds = {course.name: _undisturbed(folder, course) for course in courses}
    log = folder / "rounds.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    for number in range(len(done), rounds):
        course = courses[number % len(courses)]
        done.append(_round(folder, course, number, seconds[course.name]))
        with log.open("a") as file:
            file.write(json.dumps(done[-1]) + "\n")
        told = done[-1]["wrong"] or "as undisturbed"
        print(f"round {number}, {course.name}, killed {done[-1]['place']}: {told}", flush=True)
    rows = {}
    for name, took in seconds.items():
        own = [each for each in done if each["course"] == name]
        places = collections.Counter(each["place"] for each in own)
        told = ", ".join(f"{place} {count}" for place, count in sorted(places.items()))
        rows[name] = {
            "rounds": len(own),
            "wrong": [f"killed {e['place']}: {e['wrong']}" for e in own if e["wrong"]],
            "details": {"undisturbed, s": took, "killed": told},
        }
    return {"rows": rows}


def _undisturbed(folder: Path, course: Course) -> float:
    """Runs a course, if it has not been; its seconds."""
    reference, programs = _places(folder, course)
    kept = reference.with_suffix(".seconds")
    if not kept.exists():
        seconds = 0.0
        # The second time all programs are compiled, as in the rounds.
        for _ in range(1 if course is SHORTEST else 2):
            shutil.rmtree(reference, ignore_errors=True)
            wrong, seconds = whole(course, reference, programs)
            if wrong:
                raise InputError(f"{course.name} does not run undisturbed: {wrong}")
        kept.write_text(f"{seconds:.3f}")
    return float(kept.read_text())


def _round(folder: Path, course: Course, number: int, seconds: float) -> dict[str, str]:
    """Kills a run at a random moment, gives the command again, and compares."""
    reference, programs = _places(folder, course)
    workdir = folder / f"round-{number}"
    drawn = random.Random(f"{SEED} {number}")
    found = None
    while found is None:  # else it had ended, so that nothing was killed
        shutil.rmtree(workdir, ignore_errors=True)
        found = killed(course, workdir, programs, _moment(drawn, course, seconds))
    wrong, place = found
    wrong = wrong or whole(course, workdir, programs)[0]
    wrong = wrong or differs(course, workdir, reference)
    if not wrong:
        shutil.rmtree(workdir)
    return {"course": course.name, "place": place, "wrong": wrong}


def _moment(drawn: random.Random, course: Course, seconds: float) -> Moment:
    """A random moment: once in four before the first step, else in any step or behind it."""
    if drawn.random() < 0.25:
        return Moment(0, drawn.uniform(0.1, 0.7) * seconds)
    return Moment(drawn.randint(1, course.steps - 1), drawn.uniform(0.0, 0.5))


def _places(folder: Path, course: Course) -> tuple[Path, Path]:
    """The undisturbed run of a course, and its compiled programs."""
    name = course.name.replace(" ", "_").replace(",", "")
    return folder / f"undisturbed-{name}", folder / f"programs-{course.hosts}"


# ---------------------------------------------------------------- other disturbances


@dataclasses.dataclass(frozen=True)
class Scene:
    """A course that has ended undisturbed, and a folder for disturbed ones.

    Attributes:
        reference: the run's folder.
        workdir: of a disturbed run.
        programs: compiled ones.
    """

    course: Course
    reference: Path
    workdir: Path
    programs: Path

    def ends_alike(self) -> str:
        """Gives the command again; what went wrong, or ""."""
        wrong, _ = whole(self.course, self.workdir, self.programs)
        return wrong or differs(self.course, self.workdir, self.reference)


Disturb = Callable[[Scene], Iterator[str]]


def each_of(folder: Path, kinds: dict[str, Disturb]) -> dict[str, Any]:
    """Disturbs a run of Q-RAG and one of RLVR in each of these ways."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rows: dict[str, dict[str, Any]] = {}
    for course in (COURSES[0], next(each for each in COURSES if each.name == "RLVR")):
        reference, programs = _places(folder, course)
        if wrong := whole(course, reference, programs)[0]:
            raise InputError(f"{course.name} does not run undisturbed: {wrong}")
        for kind, disturb in kinds.items():
            scene = Scene(course, reference, folder / "disturbed", programs)
            row: dict[str, Any] = {"rounds": 0, "wrong": []}
            try:
                for wrong in disturb(scene):
                    row["rounds"] += 1
                    row["wrong"] += [wrong] if wrong else []
                    print(f"{course.name}, {kind}: {wrong or 'as undisturbed'}", flush=True)
                    shutil.rmtree(scene.workdir, ignore_errors=True)
            except pytest.skip.Exception as why:  # file systems cannot be mounted here
                row = {"rounds": None, "wrong": [], "details": {"not run": str(why)}}
            rows[f"{kind}, {course.name}"] = row
    return {"rows": rows}


def full(scene: Scene) -> Iterator[str]:
    """Files may grow to a limit, at which a write fails as on a full disk."""
    for limit in (2_000, 20_000, 60_000, 200_000):
        run = Started(scene.course, scene.workdir, scene.programs)
        resource.prlimit(run.processes[0].pid, resource.RLIMIT_FSIZE, (limit, limit))
        (status,) = run.statuses()
        yield _refused(status, run.said()) or scene.ends_alike()


def read_only(scene: Scene) -> Iterator[str]:
    """The run's folder cannot be written: from the beginning, and when it goes on."""
    for begun in (False, True):
        scene.workdir.mkdir(parents=True)
        if begun:
            shutil.copytree(scene.reference, scene.workdir, dirs_exist_ok=True)
            _forget_last(scene)
        with disks.read_only(scene.workdir):
            run = Started(scene.course, scene.workdir, scene.programs)
            (status,) = run.statuses()
        yield _refused(status, run.said()) or scene.ends_alike()


def _refused(status: int, said: str) -> str:
    """A run that cannot write ends with status 1 or 2 and one sentence, or is not disturbed."""
    if not status:
        return ""
    if status not in (1, 2) or "Traceback" in said or said.count("error: ") != 1:
        return f"status {status}: {said}"
    return ""


def jumps(scene: Scene) -> Iterator[str]:
    """The wall clock jumps while a run begins, and while it goes on.

    Orbax gives a save up when the clock has gone on by minutes. Such a run says so and is gone on
    with, by a clock that does not jump.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(JUMPS)
        for is_begun in (False, True):
            if is_begun:
                shutil.copytree(scene.reference, scene.workdir)
                _forget_last(scene)
            run = Started(scene.course, scene.workdir, scene.programs, {"PYTHONPATH": folder})
            (status,) = run.statuses()
            said = run.said()
            if status and "the clock was set meanwhile" not in said:
                yield f"status {status}: {said}"
            else:
                yield _refused(status, said) or scene.ends_alike()


def checkpoints(scene: Scene) -> Iterator[str]:
    """A file of the newest checkpoint is damaged, so the run goes on from the one before."""
    drawn = random.Random(SEED)
    for _ in range(4):
        shutil.copytree(scene.reference, scene.workdir)
        newest = scene.workdir / "checkpoints" / "last" / str(scene.course.steps)
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        damaged = _damage(drawn.choice(files), drawn)
        run = Started(scene.course, scene.workdir, scene.programs)
        (status,) = run.statuses()
        said = run.said()
        if status or "is damaged" not in said:
            yield f"{damaged.relative_to(newest)} damaged, status {status}: {said}"
        else:
            yield differs(scene.course, scene.workdir, scene.reference)


def programs(scene: Scene) -> Iterator[str]:
    """Compiled programs that are kept are damaged, cut and emptied."""
    drawn = random.Random(SEED)
    for _ in range(3):
        for path in scene.programs.rglob("*"):
            if path.is_file() and drawn.random() < 0.5:
                _damage(path, drawn)
        yield scene.ends_alike()


def _damage(path: Path, drawn: random.Random) -> Path:
    content = bytearray(path.read_bytes())
    if not content or drawn.random() < 0.3:
        content = content[: len(content) // 2]
    else:
        for _ in range(8):
            content[drawn.randrange(len(content))] ^= 1 + drawn.randrange(255)
    path.write_bytes(bytes(content))
    return path


def _forget_last(scene: Scene) -> None:
    """Takes a finished run back to the checkpoint before its last one."""
    newest = scene.workdir / "checkpoints" / "last" / str(scene.course.steps)
    shutil.rmtree(newest)
    with contextlib.suppress(FileNotFoundError):
        (scene.workdir / "learning_curve.png").unlink()
