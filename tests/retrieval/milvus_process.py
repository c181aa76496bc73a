"""A Milvus server of the tests' own: Milvus Lite, the makers' server in one process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


class MilvusProcess:
    """It listens on `url` when it is made; `kill` and `start` are a crash and what follows it."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("milvus_lite", reason="make milvus installs Milvus Lite")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._at = free.getsockname()
        self.url, port = f"http://127.0.0.1:{self._at[1]}", str(self._at[1])
        where = ("--data-dir", str(folder), "--host", "127.0.0.1", "--port", port)
        self._words = [sys.executable, "-m", "milvus_lite", "server", *where]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        with socket.socket() as asks:
            while asks.connect_ex(self._at):
                assert self._process.poll() is None, "Milvus Lite has ended"
                time.sleep(0.1)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
