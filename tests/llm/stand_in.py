"""A real child process that, seen from outside, behaves like a vLLM server.

It is an interpreter that ignores which module it is told to run. Instead it serves, hesitates, dies
or refuses to stop.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = """
import http.server, json, os, signal, socket, subprocess, sys, time

values = {word: sys.argv[i + 1] for i, word in enumerate(sys.argv[:-1])}
record = os.path.join(os.path.dirname(__file__), "starts.jsonl")
starts = sum(1 for line in open(record)) if os.path.exists(record) else 0
mode, pids = os.environ.get("STAND_IN", ""), [os.getpid()]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True)\\n"
    child = subprocess.Popen([sys.executable, "-c", code + "time.sleep(600)"],
                             stdout=subprocess.PIPE)
    child.stdout.readline()
    pids.append(child.pid)
with open(record, "a") as file:
    file.write(json.dumps({"argv": sys.argv, "env": dict(os.environ), "pids": pids}) + "\\n")
print("loading the weights", flush=True)
if mode == "dies" or (mode == "dies again" and starts):
    print("the weights are broken", flush=True)
    sys.exit(3)
if mode == "hangs":
    time.sleep(600)
time.sleep(float(os.environ.get("STAND_IN_DELAY", "0")))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": values["--served-model-name"]}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"message": {"content": "ours"}, "finish_reason": "stop"}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())
    def log_message(self, *args):
        pass

class OnSocket(http.server.ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0
    def get_request(self):
        return self.socket.accept()[0], ("localhost", 0)

OnSocket(values["--uds"], Handler).serve_forever()
"""


class StandIn:
    """The executable; it records how each of its processes was started."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.python = folder / "python"
        self.python.write_text(f"#!{sys.executable}\n{SCRIPT}")
        self.python.chmod(0o755)

    def starts(self) -> list[dict[str, Any]]:
        """argv, environment and process numbers of each start so far."""
        record = self.python.with_name("starts.jsonl")
        lines = record.read_text().splitlines() if record.exists() else []
        return [json.loads(line) for line in lines]

    def pids(self) -> list[int]:
        """Numbers of all processes started so far."""
        return [pid for start in self.starts() for pid in start["pids"]]


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "environment" / "bin")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "little"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(root: int) -> list[int]:
    """The process `root` and all its descendants that still exist."""
    return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
