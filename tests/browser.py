"""A headless Chromium for tests of pages, asked over its own pipe: no driver and no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Debian's packages chromium and chromium-headless-shell, and what others call them.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def path_of_browser() -> str | None:
    """The browser that is installed here; None: there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab of the browser; errors of the page and all its requests are kept."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers
        self._number, self._buffer, self._session = 0, b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and waits for its answer."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        left = memoryview(json.dumps(asked).encode() + b"\0")
        while left:
            left = left[os.write(self._to, left) :]
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def open(self, file: Path) -> float:
        """Opens a file; returns the seconds until the page says that it is ready."""
        began = time.monotonic()
        self.ask("Page.navigate", url=file.absolute().as_uri())
        while self.value("document.body && document.body.dataset.ready") != "yes":
            assert time.monotonic() - began < 120, self.problems
            time.sleep(0.02)
        return time.monotonic() - began

    def value(self, script: str) -> Any:
        """What an expression gives in the page, as JSON has it; a promise is waited for."""
        options = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key and lets it go."""
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.ask("Input.dispatchKeyEvent", **event, **({"text": text} if text else {}))

    def write(self, text: str) -> None:
        """Types a text where the focus is."""
        self.ask("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, file: Path) -> None:
        """Writes what the window shows, as a PNG."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], 120)
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 2**20)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {given['message']}")
        return message


@contextlib.contextmanager
def opened_browser(path: str) -> Iterator[Page]:
    """Starts the browser with an empty profile, and ends it."""
    with tempfile.TemporaryDirectory() as profile:
        reads, to = os.pipe()
        answers, writes = os.pipe()

        def pipes() -> None:  # the browser reads from 3 and writes to 4
            for end, number in ((os.dup(reads), 3), (os.dup(writes), 4)):
                os.dup2(end, number)

        flags = ["--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it has no other way
        process = subprocess.Popen(
            [path, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        try:
            yield Page(to, answers)
        finally:
            os.close(to)  # at its end the browser ends, too
            os.close(answers)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
