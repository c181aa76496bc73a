"""The scripts start, stop and restart processes; stand-ins end as trainers, srun and models do.

The real vLLM under launch/sidecar.sh is tried by the tests marked `sidecar`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

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


def start(
    script: str, *words: str | Path, folder: Path, **environment: str
) -> subprocess.Popen[str]:
    """Starts a script of `launch/` in `folder`, where GPUs are those that `environment` names."""
    outer = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.Popen(
        [LAUNCH / script, *words],
        cwd=folder,
        env={**outer, "JAX_PLATFORMS": "", **environment},
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


# ---------------------------------------------------------------- local.sh


def local(
    folder: Path, count: str, what: str, *words: str, **environment: str
) -> subprocess.Popen[str]:
    given = (count, program(folder / "peer", PEER), what, *words)
    return start("local.sh", *given, folder=folder, **environment)


def test_each_process_is_told_where_the_others_are(tmp_path: Path) -> None:
    result = ended(
        local(tmp_path, "3", "end", "--a=x y", "$HOME *", CUDA_VISIBLE_DEVICES="3,5,6,7")
    )
    assert result.returncode == 0, result.stderr
    found = peers(result.stdout)
    address = found[0][2][-1].partition(",")[0]
    assert address.startswith("--hosts=127.0.0.1:")
    for number, gpu in enumerate("356"):  # a GPU of its own
        words = ["--a=x y", "$HOME *", f"{address},3,{number}"]
        assert found[number] == (number, gpu, words)


@pytest.mark.parametrize(
    ("what", "environment", "statuses", "starts"),
    [
        ("refuse", {"RESTARTS": "3"}, {2}, 2),  # input that cannot be used is not tried again
        ("once", {}, {137, 1}, 2),  # whose end was seen first
        ("once", {"RESTARTS": "1"}, {0}, 4),
        ("once", {"RESTARTS": "1", "LEFT": "1"}, {0}, 3),
        ("hang", {"GRACE": "1"}, {1}, 2),  # what hangs after a failure is killed
    ],
)
def test_a_failure_ends_or_restarts_all(
    tmp_path: Path, what: str, environment: dict[str, str], statuses: set[int], starts: int
) -> None:
    result = ended(local(tmp_path, "2", what, **environment))
    assert result.returncode in statuses, result.stderr
    assert len(peers(result.stdout)) == starts


def test_a_signal_stops_all_and_is_no_failure(tmp_path: Path) -> None:
    process = local(tmp_path, "2", "wait", RESTARTS="3")
    read_until(process, 2)
    process.send_signal(signal.SIGINT)
    result = ended(process)
    assert result.returncode == 143
    assert sorted(result.stdout.split()) == [
        "0",
        "1",
        "stopped",
        "stopped",
    ]  # and none started again


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    for words, name in ((("0", "true"), "COUNT"), (("2", "true"), "GPU")):
        result = ended(start("local.sh", *words, folder=tmp_path, CUDA_VISIBLE_DEVICES="0"))
        assert (result.returncode, name in result.stderr) == (2, True)


# ---------------------------------------------------------------- with a language model

MODEL = """
trap 'echo "model stopped" >&2; exit 0' TERM
echo "model $*" >&2
[[ $* != *=broken* ]] || exit 3
sleep 0.5
echo "--config.llm.url=http://127.0.0.1:8100/v1 --config.llm.model=my model"
while :; do sleep 0.1; done
"""
WORDS = ["--config.llm.url=http://127.0.0.1:8100/v1", "--config.llm.model=my model"]


def beside(folder: Path, model: str, *words: str | Path) -> subprocess.Popen[str]:
    given = (f"--config.llm.server.model={model}", *words)
    python = program(folder / "python", MODEL)
    return start("with_sidecar.sh", *given, folder=folder, QRAG_PYTHON=str(python))


def test_the_command_is_told_where_the_model_is(tmp_path: Path) -> None:
    show = program(tmp_path / "show", 'printf "%s|" "$@"\nexit 7\n')
    result = ended(beside(tmp_path, "a b", "--", show, "x y"))
    assert result.returncode == 7
    assert result.stdout == "|".join(["x y", *WORDS, ""])
    assert "--config.llm.server.model=a b" in result.stderr
    assert result.stderr.endswith("model stopped\n")


def test_a_model_that_fails_ends_it(tmp_path: Path) -> None:
    result = ended(beside(tmp_path, "broken", "--", "echo", "ran"))
    assert (result.returncode, result.stdout) == (3, "")


def test_a_signal_ends_the_command_and_then_the_model(tmp_path: Path) -> None:
    stand_in = program(tmp_path / "peer", PEER)
    last = program(tmp_path / "last", f'exec {stand_in} wait "$@" ,0\n')
    process = beside(tmp_path, "x", "--", last)
    read_until(process, 1)
    process.send_signal(signal.SIGTERM)
    result = ended(process)
    assert result.returncode == 143
    assert result.stderr.endswith("model stopped\n")


# ---------------------------------------------------------------- SLURM; no cluster has run it

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


def submitted(folder: Path, tasks: str, *words: str, **environment: str) -> subprocess.Popen[str]:
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
        env=os.environ | own | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


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
    result = ended(submitted(tmp_path, tasks, SLURM_RESTART_COUNT=restarts))
    assert result.returncode == status
    assert ("scontrol requeue 71" in result.stdout) == again


def test_at_the_time_limit_all_tasks_save_and_the_job_is_queued_again(tmp_path: Path) -> None:
    process = submitted(tmp_path, "wait wait", SLURM_RESTART_COUNT="99")
    assert process.stdout is not None
    assert {process.stdout.readline()[:7] for _ in range(2)} == {"task 0:", "task 1:"}
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    os.kill(int(found.stdout), signal.SIGTERM)  # srun: the tasks, not this script, are told
    result = ended(process)
    assert result.returncode == 143
    assert sorted(result.stdout.splitlines()) == ["saved 0", "saved 1", "scontrol requeue 71"]


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
    result = ended(submitted(tmp_path, "0 0", "--x", **given))
    assert result.returncode == 0, result.stderr
    flags = "-m|qrag_jax.train|--x|--hosts=auto|"
    url = "--config.llm.url=http://127.0.0.1:8100/v1|--config.llm.model=m|"
    assert {(tmp_path / f"task{n}").read_text() for n in (0, 1)} == {flags + url}
    served = (tmp_path / "served").read_text().splitlines()
    assert "--config.llm.server.model=a b" in served
    assert "--config.llm.server.devices=4,5" in served
    assert "--config.llm.server.arguments=('--tensor-parallel-size', '2')" in served
