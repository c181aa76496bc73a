"""`local.sh` and `with_sidecar.sh` start, stop and restart processes; stand-ins end as trainers do.

The real vLLM under launch/sidecar.sh is tried by the tests marked `sidecar`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.entry_points import ROOT, Commands, losses
from tests.launch.scripts import LAUNCH, ended, peer, peers, program, read_until, start


@pytest.mark.parametrize("path", [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
def test_a_script_may_be_started(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


def local(
    folder: Path, count: str, what: str, *words: str, **environment: str
) -> subprocess.Popen[str]:
    given = (count, peer(folder), what, *words)
    return start("local.sh", *given, folder=folder, environment=environment)


def test_each_process_is_told_where_the_others_are(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "3", "end", "--a=x y", "$HOME *", CUDA_VISIBLE_DEVICES="3,5,6,7"))
    assert told.returncode == 0, told.stderr
    found = peers(told.stdout)
    address = found[0][2][-1].partition(",")[0]
    assert address.startswith("--hosts=127.0.0.1:")
    for number, gpu in enumerate("356"):  # a GPU of its own
        words = ["--a=x y", "$HOME *", f"{address},3,{number}"]
        assert found[number] == (number, gpu, words)


def test_input_that_cannot_be_used_is_not_tried_again(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "refuse", RESTARTS="3"))
    assert told.returncode == 2
    assert len(peers(told.stdout)) == 2


@pytest.mark.parametrize(("left", "second"), [({}, 2), ({"LEFT": "1"}, 1)])
def test_after_a_failure_all_start_again(tmp_path: Path, left: dict[str, str], second: int) -> None:
    told = ended(local(tmp_path, "2", "once"))
    assert told.returncode in (137, 1)  # whose end was seen first
    assert len(peers(told.stdout)) == 2
    (tmp_path / "failed").unlink()
    told = ended(local(tmp_path, "2", "once", RESTARTS="1", **left))
    assert told.returncode == 0, told.stderr
    assert len(peers(told.stdout)) == 2 + second


def test_a_process_that_hangs_after_a_failure_is_killed(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "hang", GRACE="1"), limit=20)
    assert told.returncode == 1
    assert "process 1" in told.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_stops_all_and_is_no_failure(tmp_path: Path, name: str) -> None:
    process = local(tmp_path, "2", "wait", RESTARTS="3")
    read_until(process, 2)
    process.send_signal(getattr(signal, name))
    told = ended(process, limit=20)
    assert told.returncode == 143
    assert sorted(told.stdout.split()) == ["0", "1", "stopped", "stopped"]  # and none started again


def test_a_second_ctrl_c_ends_what_hangs(tmp_path: Path) -> None:
    process = local(tmp_path, "2", "deaf")
    read_until(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process, limit=20).returncode == 137


def test_gpus_are_counted_again_after_a_failure(tmp_path: Path) -> None:
    """The second attempt finds a GPU less, so it has a process less."""
    counts = "echo GPU-a\n[[ -e failed ]] || echo GPU-b\n"
    program(tmp_path / "bin" / "nvidia-smi", f"[[ $* == *--query-gpu=uuid* ]] || exit 9\n{counts}")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    told = ended(local(tmp_path, "2", "once", RESTARTS="1", PATH=path))
    assert told.returncode == 0, told.stderr
    found = [(number, gpu, words[-1][-4:]) for number, gpu, words in peers(told.stdout)]
    first = [(0, "GPU-a", ",2,0"), (1, "GPU-b", ",2,1")]
    assert sorted(found) == sorted([*first, (0, "GPU-a", ",1,0")])


@pytest.mark.parametrize(
    ("words", "environment", "name"),
    [
        (("2",), {}, "command"),
        (("two", "true"), {}, "COUNT"),
        (("0", "true"), {}, "COUNT"),
        (("2", "true"), {"RESTARTS": "-1"}, "RESTARTS"),
        (("2", "true"), {"CUDA_VISIBLE_DEVICES": "0"}, "GPU"),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], name: str
) -> None:
    told = ended(start("local.sh", *words, folder=tmp_path, environment=environment))
    assert told.returncode == 2
    assert told.stderr.startswith("local.sh: error: ")
    assert name in told.stderr


@pytest.mark.nightly
def test_after_a_kill_a_training_of_two_goes_on_to_its_end(
    commands: Commands, tmp_path: Path
) -> None:
    workdir, steps = tmp_path / "run", 12
    fields = {"steps": steps, "checkpoint_every": 2, "eval_every": steps, "log_every": 1}
    words = [LAUNCH / "local.sh", "2", sys.executable, "-m", "qrag_jax.train"]
    words += ["--config=configs/quickstart.py:tiny", f"--workdir={workdir}"]
    process = subprocess.Popen(
        [*words, *(f"--config.train.{name}={value}" for name, value in fields.items())],
        cwd=ROOT,
        env={**commands.environment, "RESTARTS": "1", "GRACE": "20"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until = time.monotonic() + 300
    while not (found := losses(workdir)) or found[-1][0] < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    # -ww: whole lines, also where readline has put a width into the environment.
    listed = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True)
    (second,) = (
        int(line.split()[0])
        for line in listed.stdout.splitlines()
        if f"--workdir={workdir} " in line and line.endswith(",2,1")
    )
    os.kill(second, signal.SIGKILL)
    told = ended(process, limit=300)
    assert told.returncode == 0, told.stderr[-3000:]
    assert [step for step, _ in losses(workdir)] == list(range(1, steps + 1))


# ---------------------------------------------------------------- with a language model

MODEL = """
trap 'echo "model stopped" >&2; exit 0' TERM
echo "model $*" >&2
[[ $* != *=broken* ]] || exit 3
sleep 0.5
while [[ $* == *=slow* ]]; do sleep 0.1; done
echo "--config.llm.url=http://127.0.0.1:8100/v1 --config.llm.model=my model"
while :; do sleep 0.1; done
"""
WORDS = ["--config.llm.url=http://127.0.0.1:8100/v1", "--config.llm.model=my model"]


def beside(folder: Path, model: str, *words: str | Path) -> subprocess.Popen[str]:
    environment = {"QRAG_PYTHON": str(program(folder / "python", MODEL))}
    given = (f"--config.llm.server.model={model}", *words)
    return start("with_sidecar.sh", *given, folder=folder, environment=environment)


def test_the_command_is_told_where_the_model_is(tmp_path: Path) -> None:
    show = program(tmp_path / "show", 'printf "%s|" "$@"\nexit 7\n')
    told = ended(beside(tmp_path, "a b", "--", show, "x y"))
    assert told.returncode == 7
    assert told.stdout == "|".join(["x y", *WORDS, ""])
    assert "-m qrag_jax.serve_llm" in told.stderr
    assert "--config.llm.server.model=a b" in told.stderr
    assert told.stderr.endswith("model stopped\n")


def test_a_model_that_fails_or_no_command_ends_it(tmp_path: Path) -> None:
    told = ended(beside(tmp_path, "broken", "--", "echo", "ran"))
    assert (told.returncode, told.stdout) == (3, "")
    told = ended(beside(tmp_path, "x"))
    assert told.returncode == 2
    assert "with_sidecar.sh: error: " in told.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_command_and_then_the_model(tmp_path: Path, name: str) -> None:
    last = program(tmp_path / "last", f'exec {peer(tmp_path)} wait "$@" ,0\n')
    process = beside(tmp_path, "x", "--", last)
    read_until(process, 1)
    process.send_signal(getattr(signal, name))
    told = ended(process)
    assert told.returncode == (143 if name == "SIGTERM" else 130)
    assert told.stderr.endswith("model stopped\n")


def test_a_stop_before_the_model_answers_starts_no_command(tmp_path: Path) -> None:
    process = beside(tmp_path, "slow", "--", "echo", "ran")
    assert process.stderr is not None
    assert "model" in process.stderr.readline()
    process.terminate()
    told = ended(process)
    assert (told.returncode, told.stdout) == (143, "")
    assert "model stopped" in told.stderr
