"""What tests of several rooms share: the entry points as commands, and one finished run."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from qrag_jax.runtime.platform import enable_persistent_cache
from qrag_jax.runtime.whole_files import default_cache
from tests import devices, machine
from tests.entry_points import COURSES, FLOAT32, Commands

# Threads of torch that wait for each other on busy cores take longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Children and commands have the devices that their environment gives them.
jax.config.update("jax_num_cpu_devices", devices.COUNT)
# Compiled programs are kept from run to run, for both workers and for commands.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QRAG_CACHE", str(default_cache() / "tests"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(enable_persistent_cache())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


class _Groups(threading.local):
    """Numbers of `shard_alike`'s groups, in each program from 0.

    JAX counts them on from program to program: the same program of several devices would be another
    one each time that it is lowered, and found in no cache.
    """

    def __init__(self, lower: Callable[..., Any]) -> None:
        self.numbers, self._lower = itertools.count(), lower

    def __next__(self) -> int:
        return next(self.numbers)

    def lower(self, *arguments: Any, **named: Any) -> Any:
        self.numbers = itertools.count()
        return self._lower(*arguments, **named)


# Names that are JAX's own: a later JAX may lack them, and then compiles more.
with contextlib.suppress(ImportError, AttributeError):
    from jax._src import shard_alike
    from jax._src.interpreters import mlir

    _groups = _Groups(mlir.lower_jaxpr_to_module)
    shard_alike._next_shard_group_id = _groups  # type: ignore[assignment]
    mlir.lower_jaxpr_to_module = _groups.lower

# A program that mixes ranks without saying so is more often wrong than right.
jax.config.update("jax_numpy_rank_promotion", "raise")
# So is one that mixes dtypes. Rooms that use optax, and flax in half precision, cannot be asked:
# these mix them.
ONE_DTYPE = {"algorithms", "compute", "environments", "feedback", "policies", "rollouts"}
TRAIN = ("systems", "conformance", "pinned", "learners")  # folders whose files take long


@pytest.fixture(scope="session", autouse=True)
def caches_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test reads or writes of a user's cache is not that of the user who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QRAG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def dtypes_are_not_mixed(request: pytest.FixtureRequest) -> Iterator[None]:
    strict = request.path.parent.name in ONE_DTYPE
    with jax.numpy_dtype_promotion("strict" if strict else "standard"):
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_are_dropped() -> Iterator[None]:
    """Programs of earlier modules are forgotten before there are too many of them.

    Each one maps pieces of memory, hundreds of them where it is large. A process may have 65,530
    (Linux' vm.max_map_count); the program that goes beyond ends it with a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    base = tmp_path_factory.getbasetemp()
    # With several workers, base is the worker's own folder below the session's.
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return Commands(folder / "entry_points")


def once(folder: Path, make: Callable[[], Any]) -> Path:
    """Makes a folder that all workers share, by the first one that asks for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make()
            done.touch()
    return folder


@pytest.fixture(scope="session")
def trained(commands: Commands) -> Callable[[str], Path]:
    """The run of a system's course, trained to its end; tests that write copy it."""

    def run(system: str) -> Path:
        workdir = commands.folder / "trained" / system / "run"
        words = (*COURSES[system].fields, f"--workdir={workdir}")
        return once(workdir, lambda: commands.succeed("train", *words))

    return run


@pytest.fixture(scope="session")
def scored(commands: Commands, trained: Callable[[str], Path]) -> Callable[[str], Path]:
    """A scored copy of it."""

    def run(system: str) -> Path:
        workdir = commands.folder / "scored" / system / "run"

        def score() -> None:
            shutil.copytree(trained(system), workdir)
            dtype = [FLOAT32] if system == "q_rag" else []
            words = (f"--workdir={workdir}", "--checkpoint=last", *COURSES[system].scoring, *dtype)
            commands.succeed("evaluate", *words)

        return once(workdir, score)

    return run


@pytest.fixture(scope="session")
def finished_run(trained: Callable[[str], Path]) -> Path:
    """A tiny run of Q-RAG of `STEPS` steps; tests that write copy it."""
    return trained("q_rag")


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to write to."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def scored_run(scored: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scored copy of it; tests that write copy it."""
    return Path(shutil.copytree(scored("q_rag"), tmp_path_factory.mktemp("scored") / "my-run"))


@pytest.fixture(scope="session")
def exported(
    scored_run: Path, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Its towers and `retriever.json`, as the command exports them."""
    out = tmp_path_factory.mktemp("exported") / "deep" / "out"
    commands.succeed("export", f"--workdir={scored_run}", f"--out={out}", "--checkpoint=last")
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]  # nothing half made
    return out


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings in this process see one device: their programs are quick, and kept in the cache."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a megabyte: what is written beyond fails with ENOSPC."""
    folder = tmp_path / "small_disk"
    folder.mkdir()
    machine.mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    yield folder
    machine.unmount(folder)


@pytest.fixture
def untrained_best(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it whose best checkpoint is that of step 0, as where training only did harm."""
    # Imported here: most tests need neither.
    from qrag_jax.runtime.checkpoints import Checkpoints
    from qrag_jax.systems.config import load_config
    from qrag_jax.systems.q_rag.run import SavedRun

    workdir = Path(shutil.copytree(finished_run, tmp_path / "untrained_best"))
    run = SavedRun.open(workdir, load_config(workdir / "config.json"))
    checkpoints = Checkpoints(workdir)
    checkpoints.save_best(0, run.untrained(), {"scores": {}})
    checkpoints.wait()
    return workdir


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Entry points first, then what trains: files that take long, so that two workers end together.

    Each gets a file at a time: with a long one at the end, the other would wait.
    """
    first = (Path(__file__).parent.name, *TRAIN)

    def place(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return (*first, folder).index(folder)

    items.sort(key=place)
