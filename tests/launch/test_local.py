"""`local.sh` and `with_sidecar.sh` start, stop and restart processes; stand-ins end as trainers do.

The real vLLM under launch/sidecar.sh is tried by the tests marked `sidecar`.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import ended, peer, peers, program, read_until, start


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
    told = ended(local(tmp_path, "2", what, **environment))
    assert told.returncode in statuses, told.stderr
    assert len(peers(told.stdout)) == starts


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_all_and_is_no_failure(tmp_path: Path, name: str) -> None:
    process = local(tmp_path, "2", "wait", RESTARTS="3")
    read_until(process, 2)
    process.send_signal(getattr(signal, name))
    told = ended(process)
    assert told.returncode == 143
    assert sorted(told.stdout.split()) == ["0", "1", "stopped", "stopped"]  # and none started again


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    for words, name in ((("2",), "command"), (("0", "true"), "COUNT"), (("2", "true"), "GPU")):
        one_gpu = {"CUDA_VISIBLE_DEVICES": "0"}
        told = ended(start("local.sh", *words, folder=tmp_path, environment=one_gpu))
        assert told.returncode == 2
        assert told.stderr.startswith("local.sh: error: ")
        assert name in told.stderr


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
