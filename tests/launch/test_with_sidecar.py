"""`launch/with_sidecar.sh` serves a model while a command runs; the model is a stand-in's.

The real vLLM under launch/sidecar.sh is tried by the tests marked `sidecar`.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import ended, peer, program, read_until, start

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


def beside(folder: Path, *words: str | Path) -> subprocess.Popen[str]:
    python = program(folder / "python", MODEL)
    given = {"QRAG_PYTHON": str(python)}
    return start("with_sidecar.sh", *words, folder=folder, environment=given)


def test_the_command_is_told_where_the_model_is(tmp_path: Path) -> None:
    show = program(tmp_path / "show", 'printf "%s|" "$@"\nexit 7\n')
    told = ended(beside(tmp_path, "--config.llm.server.model=a b", "--", show, "x y"))
    assert told.returncode == 7
    assert told.stdout == "|".join(["x y", *WORDS, ""])
    assert "-m qrag_jax.serve_llm" in told.stderr
    assert "--config.llm.server.model=a b" in told.stderr
    assert told.stderr.endswith("model stopped\n")


def test_a_model_that_fails_ends_it(tmp_path: Path) -> None:
    told = ended(beside(tmp_path, "--config.llm.server.model=broken", "--", "echo", "ran"))
    assert (told.returncode, told.stdout) == (3, "")
    assert told.stderr.endswith("error: the language model has ended with 3; see above.\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_command_and_then_the_model(tmp_path: Path, name: str) -> None:
    last = program(tmp_path / "last", f'exec {peer(tmp_path)} wait "$@" ,0\n')
    process = beside(tmp_path, "--config.llm.server.model=x", "--", last)
    read_until(process, 1)
    process.send_signal(signal.SIGTERM if name == "SIGTERM" else signal.SIGINT)
    told = ended(process)
    assert told.returncode == (143 if name == "SIGTERM" else 130)
    assert told.stderr.endswith("model stopped\n")


def test_a_stop_before_the_model_answers_starts_no_command(tmp_path: Path) -> None:
    process = beside(tmp_path, "--config.llm.server.model=slow", "--", "echo", "ran")
    assert process.stderr is not None
    assert "model" in process.stderr.readline()
    process.terminate()
    told = ended(process)
    assert (told.returncode, told.stdout) == (143, "")
    assert "model stopped" in told.stderr


def test_without_a_command_it_is_refused(tmp_path: Path) -> None:
    told = ended(beside(tmp_path, "--config.llm.server.model=x"))
    assert told.returncode == 2
    assert told.stderr.startswith("with_sidecar.sh: error: give -- and a command")
