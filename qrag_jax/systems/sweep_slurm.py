"""Writes the Slurm script of a sweep: an array with a task for each run."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from qrag_jax.errors import InputError
from qrag_jax.runtime import whole_files

NAME = "sweep.sbatch"
_SAFE = re.compile(r"[A-Za-z0-9_./+=@:-]+")  # in lines that begin with #SBATCH nothing is quoted
_SCRIPT = """\
#!/bin/bash
# Trains and scores each run of the sweep in {folder}, one in each task of an array:
#   sbatch {script}
# A task is stopped two minutes before its time limit, or when it is preempted. It saves then, is
# queued again, and goes on. A run that fails is not queued again; the table lists it:
#   qrag sweep --table {folder}
# Options of sbatch that stand before the script's name replace those here. QRAG_PYTHON names
# another interpreter.
#
#SBATCH --job-name=qrag-sweep
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# There is no B: before TERM: it would send the signal to this script alone, and srun need not pass
# it on.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/slurm-%A_%a.log
set -euo pipefail

cd {here}
python=${{QRAG_PYTHON:-{python}}}
export SRUN_CPUS_PER_TASK=${{SLURM_CPUS_PER_TASK:-1}} # srun no longer takes it from the job itself
trap : TERM INT HUP # while srun runs, bash waits for its end all the same

status=0
srun "$python" -m qrag_jax.sweep --out={folder} --run="$SLURM_ARRAY_TASK_ID" || status=$?
case $status in
129 | 130 | 143)
    echo "sweep.sbatch: the run was stopped; it is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID" # ends this script
    ;;
esac
exit "$status"
"""


def write(folder: Path, runs: int) -> Path:
    """Writes the script into the sweep's folder; returns its path.

    Raises:
        InputError: a path has characters that Slurm would not read.
        OSError: it cannot be written.
    """
    path = folder.absolute() / NAME
    here, python = Path.cwd(), sys.executable
    for each in (str(path), str(here), python):
        if not _SAFE.fullmatch(each):
            raise InputError(
                f"{each} has characters that a Slurm script cannot hold; use a path of letters, "
                "digits and ._/+=@:- alone."
            )
    text = _SCRIPT.format(
        folder=folder.absolute(),
        script=path,
        last=runs - 1,
        here=shlex.quote(str(here)),
        python=python,
    )
    whole_files.write_whole(path, text)
    return path
