"""Output whose reader goes away: a pipe, a terminal; and a disk that is full, which is told."""

from __future__ import annotations

import errno
import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest
from tqdm import tqdm

from qrag_jax.runtime.output import LastingOutput, lasting_output


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


def test_a_stream_that_was_closed_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with lasting_output():
        tqdm.write("a line")
        sys.stdout.flush()
    assert sys.stdout is None


def test_what_is_read_arrives_whole() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        lasting = LastingOutput(stream)
        assert lasting.write("héllo\n") == 6
        lasting.flush()
        assert lasting.encoding == stream.encoding
    with os.fdopen(read) as reader:
        assert reader.read() == "héllo\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_no_closed_output() -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115
    lasting = LastingOutput(stream)
    lasting.write("x")
    with pytest.raises(OSError, match="No space left"):
        lasting.flush()
    with pytest.raises(OSError):
        stream.close()
    assert isinstance(stream, io.TextIOBase)


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


@pytest.mark.parametrize("unbuffered", ["", "1"])  # "1": Python's stream has no lock of its own
def test_threads_that_go_on_say_nothing_after_the_last_line(unbuffered: str) -> None:
    own = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    for _ in range(5):
        command = [sys.executable, "-c", ENDS]
        ended = subprocess.run(command, capture_output=True, text=True, env=own)
        assert ended.returncode == 3
        *before, last = ended.stderr.splitlines()
        assert "RuntimeError: a thread fails" in before
        assert last == "error: the last line"
