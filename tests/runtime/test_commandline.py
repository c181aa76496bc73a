"""Command lines: flags into a config, bad input into one sentence, exit statuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A real entry point of a few lines: it prints its config, or fails as the config says.
PROGRAM = """
from ml_collections import config_flags
from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline

CONFIG = config_flags.DEFINE_config_file("config", None, "")

def main():
    if CONFIG.value.fail == "input":
        raise InputError("data.jsonl: field 'id' is missing; add it.")
    if CONFIG.value.fail == "bug":
        raise RuntimeError("a bug")
    if CONFIG.value.fail == "memory":
        import jax.numpy as jnp

        jnp.zeros(10**14).block_until_ready()
    if CONFIG.value.fail == "devices":
        import jax

        jax.devices()
    if CONFIG.value.fail == "home":
        import os
        from qrag_jax.runtime.whole_files import default_cache

        os.setuid(54321)
        default_cache()
    if CONFIG.value.fail == "x64":
        import jax.numpy as jnp

        print(jnp.arange(2.0).sum().dtype, "é\\ud800")
    print(CONFIG.value.train.steps, CONFIG.value.sizes)
    return CONFIG.value.status

commandline.run(main)
"""
CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=""):
    if arg:
        raise ValueError(f"the variant {arg!r} is unknown; use none.")
    config = ConfigDict({"fail": "", "status": 0, "sizes": (1, 2), "train": {"steps": 3}})
    config.rate, config.seed = 0.5, 1
    return config.lock()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commandline")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "small.py").write_text(CONFIG)
    return folder


def run(folder: Path, *arguments: str, **own: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "program.py"), *arguments],
        env={"PYTHONPATH": str(ROOT), "PATH": ""} | own,
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
    )


def test_fields_are_overridden(folder: Path) -> None:
    fields = "--config.train.steps=7", "--config.sizes=(4, 5)", "--config.status=5"
    result = run(folder, "--config=small.py", *fields)
    assert (result.returncode, result.stdout) == (5, "7 (4, 5)\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config=small.py", "--config.train.stesp=1"], "no field 'stesp'"),
        (["--config=small.py", "--config.train.steps=1.5"], "--config.train.steps=1.5"),
        (["--config=small.py:big"], "the variant 'big' is unknown; use none."),
        (["--config=small.py", "--workdri=x"], "workdri"),
        (["--config=small.py", "--config.rate=nan"], "--config.rate"),
        (["--config=small.py", "--config.seed=-1"], "--config.seed"),
        (["--config=small.py", "more"], "unexpected argument 'more'; options are written --name"),
        (["--config=small.py", "--config.fail=input"], "data.jsonl: field 'id' is missing; add"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, arguments: list[str], says: str) -> None:
    result = run(folder, *arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_what_the_environment_says_is_told_or_is_no_matter(folder: Path) -> None:
    given = "--config=small.py"
    told = run(folder, given, "--config.fail=devices", JAX_PLATFORMS="cuda")
    assert (told.returncode, "Traceback" in told.stderr) == (2, False)
    assert "JAX_PLATFORMS" in told.stderr
    told = run(folder, given, "--config.fail=x64", JAX_ENABLE_X64="1", PYTHONIOENCODING="ascii")
    assert (told.returncode, told.stdout.split()[0]) == (0, "float32"), told.stderr
    if os.getuid() == 0:  # else no process can become a user without a home
        told = run(folder, given, "--config.fail=home")
        assert (told.returncode, "HOME" in told.stderr) == (2, True), told.stderr


@pytest.mark.parametrize(
    ("fail", "traceback", "says"),
    [("bug", True, "RuntimeError: a bug"), ("memory", False, "372529.0 GiB more")],
)
def test_failures_that_are_no_input(folder: Path, fail: str, traceback: bool, says: str) -> None:
    result = run(folder, "--config=small.py", f"--config.fail={fail}")
    assert result.returncode == 1
    assert says in result.stderr
    assert ("Traceback" in result.stderr) == traceback
