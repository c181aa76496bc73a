"""A run's folder is safe: a full disk, a second run, a lost config, damaged checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import ml_collections
import pytest

from configs import hotpotqa
from qrag_jax import train
from qrag_jax.errors import InputError
from qrag_jax.runtime import locks
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.saved_run import SavedRun
from tests import disks
from tests.entry_points import CHECKPOINT_EVERY, SHARED, STEPS, Commands, refusal
from tests.runtime.test_checkpoints import flip_a_bit
from tests.test_train_faults import assert_same_run

pytestmark = pytest.mark.long

BEFORE_LAST = STEPS - CHECKPOINT_EVERY


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ml_collections.ConfigDict:
    # These tests compile little; JAX shall not be turned to a folder that goes away.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    return hotpotqa.get_config("tiny")


def refused(config: ml_collections.ConfigDict, workdir: Path) -> str:
    """The sentence with which training refuses the folder; nothing is computed before it."""
    with pytest.raises(InputError) as error:
        train.train(config, workdir)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------- a full disk


def test_full_disk_at_resume_costs_the_run_nothing(
    commands: Commands, finished_run: Path, tmp_path: Path
) -> None:
    with disks.small_disk(tmp_path / "disk", "16m") as disk:
        workdir = Path(shutil.copytree(finished_run, disk / "run"))
        shutil.rmtree(workdir / "checkpoints" / "last" / str(STEPS))
        config = workdir / "config.json"
        before, written = config.read_bytes(), config.stat()
        filler = disks.fill(disk)
        result = commands.run("train", *SHARED, f"--workdir={workdir}")
        assert result.returncode == 1, result.stderr[-3000:]
        text = result.stderr.splitlines()[-1]
        assert text.startswith("error: ")
        assert "(No space left on device)" in text
        assert "free space there and give the same command" in text
        assert config.read_bytes() == before
        filler.unlink()
        free = "--config.train.checkpoint_every=2"  # a later start may change it: of itself alone
        out = commands.succeed("train", *SHARED, f"--workdir={workdir}", free)
        assert f"resumed {workdir} at step {BEFORE_LAST}" in out
        assert (config.stat().st_ino, config.stat().st_mtime_ns) == (
            written.st_ino,
            written.st_mtime_ns,
        )
        assert_same_run(workdir, finished_run)


# ---------------------------------------------------------------------- the config


def test_checkpoints_without_their_config_are_refused(
    run_copy: Path, config: ml_collections.ConfigDict
) -> None:
    (run_copy / "config.json").unlink()
    config.pqn.gamma = 0.5  # another run's
    text = refused(config, run_copy)
    assert f"{run_copy} holds checkpoints (checkpoints/best/" in text
    assert "its config.json is missing; restore it from a backup, or give another --workdir" in text
    assert (run_copy / "encoder" / "model.safetensors").exists()
    with pytest.raises(InputError, match=r"its config\.json is missing"):  # as evaluation reads it
        load_config(run_copy / "config.json")


@pytest.mark.parametrize("content", [b"", b'{"seed": 1', b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_config_that_was_cut_is_refused(
    run_copy: Path, config: ml_collections.ConfigDict, content: bytes
) -> None:
    (run_copy / "config.json").write_bytes(content)
    text = refused(config, run_copy)
    assert f"{run_copy / 'config.json'} is not " in text
    assert "restore it from a backup, or give another --workdir." in text


# ---------------------------------------------------------------------- a second run


def test_a_second_run_in_one_folder_is_refused(
    commands: Commands, config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    workdir = tmp_path / "run"
    first = commands.start("train", *SHARED, f"--workdir={workdir}", "--config.train.steps=100000")
    try:
        deadline = time.monotonic() + 120
        while not (workdir / ".lock").exists() or not (workdir / ".lock").read_text():
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        text = refused(config, workdir)
        assert text.startswith(
            f"{workdir} is being trained by process {first.pid} on {os.uname()[1]}"
        )
        assert "give another --workdir" in text
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=60)
    with locks.run_lock(workdir):  # nothing is left of a process that was killed
        pass


def test_what_a_killed_start_left_is_deleted(
    run_copy: Path, config: ml_collections.ConfigDict, capsys: pytest.CaptureFixture[str]
) -> None:
    half = [
        run_copy / ".encoder-0a1b2c",
        run_copy / "checkpoints" / "last" / f"{STEPS + 4}.orbax-checkpoint-tmp",
    ]
    for folder in half:
        folder.mkdir()
        (folder / "part").write_text("x")
    with locks.run_lock(run_copy):  # not while somebody else is making them
        refused(config, run_copy)
    assert all(folder.exists() for folder in half)
    config.pqn.gamma = 0.5
    assert "config.pqn.gamma" in refused(config, run_copy)
    assert not any(folder.exists() for folder in half)
    assert f"deleted {half[0]}, which a process that was killed had left" in capsys.readouterr().out


# ---------------------------------------------------------------------- damage


def test_a_damaged_newest_checkpoint_costs_its_steps_alone(
    commands: Commands, finished_run: Path, run_copy: Path
) -> None:
    flip_a_bit(run_copy / "checkpoints" / "last" / str(STEPS))
    result = commands.run("train", *SHARED, f"--workdir={run_copy}")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stdout.splitlines() if "is damaged" in line]
    assert line.startswith(f"checkpoint {STEPS} is damaged (file state/")
    assert f"is not as it was saved): going on from step {BEFORE_LAST}; it is now " in line
    assert f"resumed {run_copy} at step {BEFORE_LAST}" in result.stdout
    assert_same_run(run_copy, finished_run)


@pytest.mark.usefixtures("config")
def test_scoring_tells_which_checkpoint_is_damaged(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (best,) = (run_copy / "checkpoints" / "best").iterdir()
    flip_a_bit(best)
    flip_a_bit(run_copy / "checkpoints" / "last" / str(STEPS))
    run = SavedRun.open(run_copy, load_config(run_copy / "config.json"))
    with pytest.raises(InputError, match="give --checkpoint=last, or restore it from a backup"):
        run.trained("best")
    assert run.trained("last")[1] == BEFORE_LAST
    told = capsys.readouterr().out
    assert f"checkpoint {STEPS} is damaged (file state/" in told
    assert f"taking step {BEFORE_LAST}" in told
    flip_a_bit(run_copy / "checkpoints" / "last" / str(BEFORE_LAST))
    with pytest.raises(InputError, match="last: every checkpoint is damaged"):
        run.trained("last")


# ---------------------------------------------------------------------- who may read and write


def test_a_run_may_be_shared_as_the_umask_says(finished_run: Path, commands: Commands) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    folders = [path for path in finished_run.rglob("*") if path.is_dir()]
    folders += [path for path in (commands.folder / "cache").rglob("*") if path.is_dir()]
    assert finished_run / "encoder" in folders
    assert {path.name for path in folders} >= {"tokens", "synthetic", "last"}
    for folder in folders:
        assert folder.stat().st_mode & 0o777 == 0o777 & ~umask, folder


def test_a_run_that_may_only_be_read(
    run_copy: Path,
    commands: Commands,
    config: ml_collections.ConfigDict,
    tmp_path: Path,
) -> None:
    with disks.read_only(run_copy):
        text = refused(config, run_copy)
        assert (
            text == f"{run_copy} cannot be written (Read-only file system); give another --workdir."
        )
        workdir = f"--workdir={run_copy}"
        text = refusal(commands.run("evaluate", workdir, "--samples=2"))
        assert f"{run_copy / 'eval' / 'untrained'} cannot be written (Read-only" in text
        assert text.endswith("give another --out.")
        arguments = (workdir, "--samples=2", f"--out={tmp_path / 'scores'}")
        assert "2 questions, best checkpoint" in commands.succeed("evaluate", *arguments)
        run = SavedRun.open(run_copy, load_config(run_copy / "config.json"))
        assert run.trained("last")[1] == STEPS
