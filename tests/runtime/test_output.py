"""Output whose reader goes away: a pipe, a terminal; and a disk that is full, which is told."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest
from tqdm import tqdm

from qrag_jax.runtime.output import lasting_output


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
    for unbuffered in ((), ("-u",)):
        command = [sys.executable, *unbuffered, "-c", ENDS]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 3
        *before, last = ended.stderr.splitlines()
        assert "RuntimeError: a thread fails" in before
        assert last == "error: the last line"
