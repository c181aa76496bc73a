"""Command lines: bad input is one sentence, exit statuses, output whose reader goes away."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import pytest
from ml_collections import ConfigDict, config_flags
from tqdm import tqdm

from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.runtime.output import lasting_output
from qrag_jax.runtime.whole_files import default_cache
from tests.entry_points import ROOT
from tests.support.forks import Forked


def get_config() -> ConfigDict:
    """This file is also the experiment of the command that it is."""
    return ConfigDict({"fail": "", "rate": 0.5, "seed": 1})


def main() -> int:
    """A command that fails as its config says."""
    import jax
    import jax.numpy as jnp

    fail = CONFIG.value.fail
    if fail == "input":
        raise InputError("data.jsonl: field 'id' is missing; add it.")
    if fail == "bug":
        raise RuntimeError("a bug")
    if fail == "memory":
        jnp.zeros(10**14).block_until_ready()
    if fail == "devices":
        jax.devices()
    if fail == "home":
        os.setuid(54321)
        default_cache()
    print(jnp.arange(2.0).sum().dtype, "é\ud800")
    return 0


ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": ""}


def run(*words: str) -> tuple[int | None, str, str]:
    """Status, output and errors."""
    command = Forked(__name__, [f"--config={__file__}", *words], ROOT, ENVIRONMENT)
    out, err = command.communicate(timeout=100)
    return command.returncode, out, err


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--workdri=x", "workdri"),
        ("--config.rate=nan", "--config.rate"),
        ("--config.seed=-1", "--config.seed"),
        ("more", "'more'"),
        ("--config.fail=input", "data.jsonl: field 'id' is missing; add it."),
    ],
)
def test_bad_input_is_one_sentence(word: str, named: str) -> None:
    status, out, err = run(word)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert named in err


def test_failures_that_are_no_bad_input_end_with_another_status() -> None:
    status, _, err = run("--config.fail=bug")
    assert status == 1
    assert "Traceback" in err
    assert "RuntimeError: a bug" in err
    status, _, err = run("--config.fail=memory")
    assert (status, "Traceback" in err) == (1, False)
    assert "372529.0 GiB" in err
    if os.getuid() == 0:  # else no process can become a user without a home
        status, _, err = run("--config.fail=home")
        assert (status, "HOME" in err) == (2, True), err


@pytest.mark.parametrize(
    ("fail", "variables", "status", "named"),
    [
        ("devices", {"JAX_PLATFORMS": "cuda"}, 2, "JAX_PLATFORMS"),
        ("", {"JAX_ENABLE_X64": "1", "PYTHONIOENCODING": "ascii"}, 0, "float32"),
    ],
)
def test_variables_of_the_environment(
    fail: str, variables: dict[str, str], status: int, named: str
) -> None:
    command = [sys.executable, "-m", __name__, f"--config={__file__}", f"--config.fail={fail}"]
    ended = subprocess.run(
        command, env=ENVIRONMENT | variables, cwd=ROOT, text=True, capture_output=True
    )
    assert ended.returncode == status, ended.stderr
    assert named in (ended.stderr if status else ended.stdout)
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------------- output


def broken_pipe() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def closed_terminal() -> TextIO:
    terminal, ours = pty.openpty()
    os.close(terminal)
    return os.fdopen(ours, "w")


@pytest.fixture(params=[broken_pipe, closed_terminal])
def gone(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    make: Callable[[], TextIO] = request.param
    stream = make()
    yield stream
    stream.close()  # flushes what is left: that does not fail either


def test_what_nobody_reads_goes_nowhere(gone: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError) as caught:
        os.write(gone.fileno(), b"as it is")
    assert caught.value.errno in (errno.EPIPE, errno.EIO)
    monkeypatch.setattr(sys, "stdout", gone)
    monkeypatch.setattr(sys, "stderr", gone)
    with lasting_output():
        for _ in range(3):
            print("x" * 10_000, flush=True)  # longer than the buffer
            tqdm.write("a line")
            for _ in tqdm(range(3)):
                pass
        sys.stdout.writelines(["a\n", "b\n"])
        os.write(gone.fileno(), b"a library of another language")
    assert sys.stdout is gone


ENDS = """
import sys, threading, time
from qrag_jax.runtime.output import end_process, lasting_output

def complain():
    while True:
        sys.excepthook(RuntimeError, RuntimeError("a thread fails"), None)

with lasting_output():
    for _ in range(3):
        threading.Thread(target=complain).start()  # the process would never end by itself
    time.sleep(0.05)
    end_process("error: the last line", 3)
"""


def test_threads_that_go_on_say_nothing_after_the_last_line() -> None:
    ended = subprocess.run([sys.executable, "-u", "-c", ENDS], capture_output=True, text=True)
    assert ended.returncode == 3
    *before, last = ended.stderr.splitlines()
    assert "RuntimeError: a thread fails" in before
    assert last == "error: the last line"


if __name__ == "__main__":
    CONFIG: Any = config_flags.DEFINE_config_file("config")
    commandline.run(main)
