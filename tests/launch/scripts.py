"""Runs the scripts of `launch/` as a user does, some of them with a stand-in for a trainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.entry_points import ROOT

LAUNCH = ROOT / "launch"

# Its first word says what it does. It prints a line with its number, its GPUs and its other words.
PEER = r"""
what=$1
shift
hosts=${*: -1}
number=${hosts##*,}
sleeping=
trap 'echo "stopped $number"; kill $sleeping; exit 143' TERM
trap 'echo "stopped $number"; kill $sleeping; exit 130' INT
echo "peer $number ${CUDA_VISIBLE_DEVICES-none}$(printf " '%s'" "$@")"
case $what in
refuse) exit 2 ;;
once) # the last one fails in the first attempt, and the first one with it
    if ((number > 0)) && [[ ! -e failed ]]; then
        : >failed
        kill -KILL $$
    elif [[ ! -e failed ]] && [[ $hosts == *,2,0 ]]; then
        sleep 0.5
        exit 1
    fi
    ;;
hang) ((number == 0)) || exit 1 ;;
esac
case $what in
hang | wait)
    sleep 60 &
    sleeping=$!
    wait
    ;;
esac
"""


def program(path: Path, text: str) -> Path:
    """Writes an executable bash script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}")
    path.chmod(0o755)
    return path


def peer(folder: Path) -> Path:
    """The stand-in, as a program in `folder`."""
    return program(folder / "peer", PEER)


def start(
    script: str, *words: str | Path, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts a script of `launch/` in `folder`, where GPUs are those that `environment` names."""
    outer = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.Popen(
        [LAUNCH / script, *words],
        cwd=folder,
        env={**outer, "JAX_PLATFORMS": "", **(environment or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A script can trap no signal that was ignored when it began, as a shell's background does.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Waits for the end; status and output."""
    out, err = process.communicate(timeout=20)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def peers(out: str) -> list[tuple[int, str, list[str]]]:
    """Number, GPUs and words of each stand-in that was started, sorted by number."""
    lines = [line.split(" ", 3) for line in out.splitlines() if line.startswith("peer ")]
    return sorted((int(line[1]), line[2], re.findall(r"'([^']*)'", line[3])) for line in lines)


def read_until(process: subprocess.Popen[str], count: int) -> str:
    """Reads the output until `count` stand-ins have said that they are there."""
    assert process.stdout is not None
    read = ""
    while len(peers(read)) < count:
        line = process.stdout.readline()
        assert line, ended(process)
        read += line
    return read
