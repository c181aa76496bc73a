"""`launch/slurm.sbatch` under stand-ins for srun and scontrol, which start tasks on this machine.

No cluster has run it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import LAUNCH, ended, program

# As SLURM's: a failed task ends the others, a stop reaches the tasks, its status is the highest.
SRUN = r"""
kills=
count=$SLURM_NTASKS
while [[ $1 == --* ]]; do
    case $1 in
    --ntasks=*) count=${1#*=} ;;
    --kill-on-bad-exit=1) kills=yes ;;
    --nodes=* | --ntasks-per-node=* | --overlap) ;;
    *) echo "srun: unknown option $1" >&2; exit 77 ;;
    esac
    shift
done
set -m
for ((task = 0; task < count; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_NODES=1 SLURM_NTASKS=$count \
        SLURM_STEP_NODELIST=localhost SLURMD_NODENAME=localhost "$@" &
    pids[task]=$!
done
trap 'for pid in "${pids[@]}"; do kill -TERM -- "-$pid"; done' TERM
highest=0
while ((${#pids[@]} > 0)); do
    for task in "${!pids[@]}"; do
        kill -0 "${pids[task]}" 2>/dev/null && continue
        status=0
        wait "${pids[task]}" || status=$?
        unset "pids[task]"
        ((status <= highest)) || highest=$status
        if ((status > 0)) && [[ -n $kills ]]; then
            for pid in "${pids[@]}"; do kill -KILL -- "-$pid"; done
        fi
    done
    sleep 0.05
done 2>/dev/null
exit "$highest"
"""
# The trainer: each word is what a task does, by its number.
PYTHON = r"""
echo "task $SLURM_PROCID: $*"
what=$(cut -d" " -f"$((SLURM_PROCID + 1))" "$PWD/tasks")
case $what in
wait)
    trap 'sleep 0.3; echo "saved $SLURM_PROCID"; exit 143' TERM
    for _ in {1..200}; do sleep 0.1; done
    ;;
die) kill -KILL $$ ;;
*) exit "$what" ;;
esac
"""


def submitted(
    folder: Path, tasks: str, *words: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """Starts the script as sbatch does, in a folder with the scripts; `tasks` do what they say."""
    (folder / "launch").symlink_to(LAUNCH)
    (folder / "tasks").write_text(tasks)
    program(folder / "bin" / "srun", SRUN)
    program(folder / "bin" / "scontrol", 'echo "scontrol $*"\n')
    own = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "QRAG_PYTHON": str(program(folder / "python", PYTHON)),
        "SLURM_JOB_ID": "71",
        "SLURM_NTASKS": str(len(tasks.split())),
        "SLURM_JOB_NUM_NODES": "1",
    }
    return subprocess.Popen(
        ["bash", LAUNCH / "slurm.sbatch", *words],
        cwd=folder,
        env=os.environ | own | (environment or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_all_tasks_train_and_the_job_is_done(tmp_path: Path) -> None:
    told = ended(submitted(tmp_path, "0 0", "--config=a b", "--workdir=w"))
    assert told.returncode == 0, told.stderr
    trainer = "-m qrag_jax.train --config=a b --workdir=w --hosts=auto"
    assert sorted(told.stdout.splitlines()) == [f"task {n}: {trainer}" for n in (0, 1)]
    assert not list(tmp_path.glob("slurm-*"))


@pytest.mark.parametrize(
    ("tasks", "restarts", "status", "again"),
    [
        # Input that cannot be used, though the other task is killed for it, by 137.
        ("wait 2", "0", 2, False),
        ("die wait", "9", 137, True),
        ("wait 1", "10", 137, False),
    ],
)
def test_a_failure_queues_the_job_again_ten_times(
    tmp_path: Path, tasks: str, restarts: str, status: int, again: bool
) -> None:
    told = ended(submitted(tmp_path, tasks, environment={"SLURM_RESTART_COUNT": restarts}))
    assert told.returncode == status
    assert ("scontrol requeue 71" in told.stdout) == again


def test_at_the_time_limit_all_tasks_save_and_the_job_is_queued_again(tmp_path: Path) -> None:
    process = submitted(tmp_path, "wait wait", environment={"SLURM_RESTART_COUNT": "99"})
    assert process.stdout is not None
    assert {process.stdout.readline()[:7] for _ in range(2)} == {"task 0:", "task 1:"}
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout), signal.SIGTERM)  # srun: the tasks, not this script, are told
    told = ended(process)
    assert told.returncode == 143
    assert sorted(told.stdout.splitlines()) == ["saved 0", "saved 1", "scontrol requeue 71"]


def test_tasks_wait_for_the_model_of_their_node(tmp_path: Path) -> None:
    model = r"""
if [[ $* == *serve_llm* ]]; then
    printf "%s\n" "$@" >served
    sleep 0.5
    echo "--config.llm.url=http://127.0.0.1:8100/v1 --config.llm.model=m"
    exit 0
fi
printf "%s|" "$@" >"task$SLURM_PROCID"
"""
    python = program(tmp_path / "other", model)
    given = {"SIDECAR_MODEL": "a b", "SIDECAR_DEVICES": "4,5", "QRAG_PYTHON": str(python)}
    told = ended(submitted(tmp_path, "0 0", "--x", environment=given))
    assert told.returncode == 0, told.stderr
    flags = "-m|qrag_jax.train|--x|--hosts=auto|"
    url = "--config.llm.url=http://127.0.0.1:8100/v1|--config.llm.model=m|"
    assert {(tmp_path / f"task{n}").read_text() for n in (0, 1)} == {flags + url}
    served = (tmp_path / "served").read_text().splitlines()
    assert "--config.llm.server.model=a b" in served
    assert "--config.llm.server.devices=4,5" in served
    assert "--config.llm.server.arguments=('--tensor-parallel-size', '2')" in served
    assert f"--config.llm.server.log={tmp_path}/slurm-71.vllm-localhost.log" in served
