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
            self._port = free.getsockname()[1]
        self.url, self._folder = f"http://127.0.0.1:{self._port}", folder
        self.start()

    def start(self) -> None:
        at = ("--data-dir", str(self._folder), "--host", "127.0.0.1", "--port", str(self._port))
        words = [sys.executable, "-m", "milvus_lite", "server", *at]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, "Milvus Lite has ended"
                time.sleep(0.1)
        raise TimeoutError("Milvus Lite does not listen")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
