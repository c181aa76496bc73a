"""`launch/local.sh` starts, stops and restarts processes; stand-ins end as trainers do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.scripts import ended, peer, peers, program, read_until, start


def local(
    folder: Path, count: str, what: str, *words: str, **environment: str
) -> subprocess.Popen[str]:
    given = (count, peer(folder), what, *words)
    return start("local.sh", *given, folder=folder, environment=environment)


def test_each_process_is_told_where_the_others_are(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "3", "end", "--a=x y", "$HOME *"))
    assert told.returncode == 0, told.stderr
    found = peers(told.stdout)
    assert [number for number, _, _ in found] == [0, 1, 2]
    address = found[0][2][-1].partition(",")[0]
    assert address.startswith("--hosts=127.0.0.1:")
    for number, _, words in found:
        assert words == ["--a=x y", "$HOME *", f"{address},3,{number}"]


def test_input_that_cannot_be_used_is_not_tried_again(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "refuse", RESTARTS="3"))
    assert told.returncode == 2
    assert len(peers(told.stdout)) == 2
    assert "restart" not in told.stderr


@pytest.mark.parametrize(("left", "second"), [("", 2), ("1", 1)])
def test_after_a_failure_all_start_again(tmp_path: Path, left: str, second: int) -> None:
    environment = {"RESTARTS": "1"} | ({"LEFT": left} if left else {})
    told = ended(local(tmp_path, "2", "once", **environment))
    assert told.returncode == 0, told.stderr
    assert len(peers(told.stdout)) == 2 + second
    assert "restart 1 of 1, from the last checkpoint" in told.stderr


def test_without_restarts_the_first_failure_is_the_status(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "once"))
    assert told.returncode in (137, 1)  # whose end was seen first
    assert "process 1 has ended with 137" in told.stderr or told.returncode == 1
    assert len(peers(told.stdout)) == 2


def test_a_process_that_hangs_after_a_failure_is_killed(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "hang", GRACE="1"), limit=20)
    assert told.returncode == 1
    assert "process 1 has ended with 1" in told.stderr
    assert "others go on without it; they are killed" in told.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_stops_all_and_is_no_failure(tmp_path: Path, name: str) -> None:
    process = local(tmp_path, "2", "wait", RESTARTS="3")
    read_until(process, 2)
    process.send_signal(getattr(signal, name))
    told = ended(process, limit=20)
    assert told.returncode == 143
    assert sorted(told.stdout.split()) == ["0", "1", "stopped", "stopped"]
    assert "restart" not in told.stderr


def test_a_second_ctrl_c_ends_what_hangs(tmp_path: Path) -> None:
    process = local(tmp_path, "2", "deaf")
    read_until(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert ended(process, limit=20).returncode == 137


def test_each_process_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    told = ended(local(tmp_path, "2", "end", CUDA_VISIBLE_DEVICES="3,5,6"))
    assert told.returncode == 0, told.stderr
    assert [gpu for _, gpu, _ in peers(told.stdout)] == ["3", "5"]


def test_gpus_are_found_and_counted_anew_after_a_failure(tmp_path: Path) -> None:
    """The second attempt finds a GPU less, so it has a process less."""
    program(
        tmp_path / "bin" / "nvidia-smi",
        '[[ $* == "--query-gpu=uuid --format=csv,noheader" ]] || exit 9\n'
        "echo GPU-a\n[[ -e failed ]] || echo GPU-b\n",
    )
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    told = ended(local(tmp_path, "2", "once", RESTARTS="1", PATH=path))
    assert told.returncode == 0, told.stderr
    assert "GPUs left: 1; as many processes are started" in told.stderr
    found = [(number, gpu, words[-1][-4:]) for number, gpu, words in peers(told.stdout)]
    first = [(0, "GPU-a", ",2,0"), (1, "GPU-b", ",2,1")]
    assert sorted(found) == sorted([*first, (0, "GPU-a", ",1,0")])


@pytest.mark.parametrize(
    ("words", "environment", "why"),
    [
        (("2",), {}, "give a number of processes and a command"),
        (("two", "true"), {}, "COUNT is 'two'; give a whole number."),
        (("0", "true"), {}, "COUNT is 0; give 1 or more."),
        (("2", "true"), {"RESTARTS": "-1"}, "RESTARTS is '-1'"),
        (("2", "true"), {"LEFT": "x"}, "LEFT is 'x'"),
        (
            ("2", "true"),
            {"CUDA_VISIBLE_DEVICES": "0"},
            "2 processes need a GPU each, and the number of GPUs is 1",
        ),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str], why: str
) -> None:
    told = ended(start("local.sh", *words, folder=tmp_path, environment=environment))
    assert told.returncode == 2
    assert told.stderr.startswith(f"local.sh: error: {why}")
