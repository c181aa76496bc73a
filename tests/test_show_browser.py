"""The command `show`, and its page in a headless Chromium: filters, hostile texts, the keyboard.

Without a browser the page's tests are skipped; Debian has one as `chromium-headless-shell`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.metrics.rows import PREDICTIONS, RETRIEVALS, TOOL_EPISODES
from tests.entry_points import EVAL_EVERY, STEPS, Commands, refusal
from tests.evaluators.shown_pages import HOSTILE, prediction, read_page
from tests.retrieval_logs import played_rows

EPISODES = 10_000
# Debian's packages chromium and chromium-headless-shell, and what others call them.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


# ---------------------------------------------------------------- the command


def test_a_scored_run_and_a_training(
    scored_run: Path, finished_run: Path, commands: Commands, tmp_path: Path
) -> None:
    out = f"--out={tmp_path / 'page.html'}"
    commands.succeed("show", str(scored_run), out)
    read = read_page(tmp_path / "page.html")
    (section,) = read["sections"]
    assert "my-run" in section["title"]
    assert len(section["episodes"]) == 4
    for episode in section["episodes"]:
        assert all(isinstance(step["found"][0][1], float) for step in episode["steps"])
        assert episode["before"]["steps"]
        assert -1e-4 < episode["regret"] <= 1
    curves = {curve["name"]: curve for curve in read["runs"][0]["curves"]}
    assert curves["train/loss"]["steps"] == [*range(1, STEPS + 1)]
    assert curves["eval/return"]["steps"] == [*range(0, STEPS + 1, EVAL_EVERY)]
    # A training keeps a sample: the same episodes at each evaluation.
    lines = [json.loads(line) for line in (finished_run / "episodes.jsonl").open()]
    steps = sorted({line["step"] for line in lines})
    assert steps == [*range(0, STEPS + 1, EVAL_EVERY)]
    ids = [[line["row"]["id"] for line in lines if line["step"] == step] for step in steps]
    assert all(each == ids[0] for each in ids)
    assert 0 < len(ids[0]) <= 8
    commands.succeed("show", str(finished_run), out)
    (section,) = read_page(tmp_path / "page.html")["sections"]
    assert all(episode["before"]["steps"] for episode in section["episodes"])


def test_bad_input(commands: Commands, finished_run: Path, tmp_path: Path) -> None:
    run, none = str(finished_run), str(tmp_path / "none")
    for words in ([], [run, none], [str(tmp_path)], [run, f"--out={tmp_path}"]):
        assert (words[-1].removeprefix("--out=") if words else "run") in refusal(
            commands.run("show", *words)
        )
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the browser


class Page:
    """A tab of the browser, asked over its own pipe: no driver and no port.

    Errors of the page and all its requests are kept.
    """

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._answers = to, answers
        self._number, self._buffer = 0, b""
        self._session: dict[str, Any] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol and waits for its answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **self._session}
        left = memoryview(json.dumps(asked).encode() + b"\0")
        while left:
            left = left[os.write(self._to, left) :]
        while (message := self._read()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    def open(self, file: Path) -> None:
        """Opens a file, and waits until the page says that it is ready."""
        began = time.monotonic()
        self.ask("Page.navigate", url=file.absolute().as_uri())
        while self.value("document.body && document.body.dataset.ready") != "yes":
            assert time.monotonic() - began < 30, self.problems  # about 1 s on a free machine
            time.sleep(0.02)

    def value(self, script: str, wait: int = 0) -> Any:
        """What an expression gives in the page after so many milliseconds."""
        if wait:
            script = f"new Promise((done) => setTimeout(() => done({script}), {wait}))"
        options = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self.ask("Runtime.evaluate", **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], 120)
            assert ready, "the browser does not answer"
            piece = os.read(self._answers, 2**20)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        method = message.get("method")
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")
        self.problems += [text.decode()] if method in wrong else []
        return message


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser with an empty profile. It reads commands from 3 and writes answers to 4."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"there is no browser here: none of {', '.join(NAMES)}")
    (reads, to), (answers, writes) = os.pipe(), os.pipe()

    def pipes() -> None:
        for end, number in ((os.dup(reads), 3), (os.dup(writes), 4)):
            os.dup2(end, number)

    flags = ["--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # as root it has no other way
    flags += ["--remote-debugging-pipe", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]
    process = subprocess.Popen(
        [path, *flags, "about:blank"],
        preexec_fn=pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(reads)
    os.close(writes)
    page = Page(to, answers)
    page.resize(1200, 900)
    yield page
    os.close(to)  # at its end the browser ends, too
    os.close(answers)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def many(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 10,000 long episodes of Q-RAG, and of a few of tokens."""
    folder = tmp_path_factory.mktemp("many")
    for label, seed in (("best-10", 0), ("untrained", 1)):
        rows = [
            dataclasses.replace(
                row,
                question=f"Question {n}, of how many facts?",
                pred_texts=[f"{n}: {text} " + "some words " * 40 for text in row.pred_texts],
            )
            for n, row in enumerate(played_rows(EPISODES, seed))
        ]
        rows[17] = dataclasses.replace(rows[17], question=HOSTILE, answer=HOSTILE)
        RETRIEVALS.append(folder / "run" / "eval" / label / "eval_seed42.jsonl", rows)
    config = {"pqn": {"gamma": 0.9}, "env": {"max_steps": 5}, "system": "q_rag"}
    (folder / "run" / "config.json").write_text(json.dumps(config))
    lines = [{"step": n, "eval/return": n / 10, "untrained/return": 0.1} for n in range(8)]
    lines[3][HOSTILE] = 1.0
    for name in ("run", "other"):
        (folder / name).mkdir(exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "metrics.jsonl").write_text(text)
    PREDICTIONS.append(folder / "tokens.jsonl", [prediction(n, n / 4) for n in range(3)])
    (folder / "tokens.json").write_text(json.dumps({"kind": TOOL_EPISODES}))
    given = [str(folder / name) for name in ("run", "other", "tokens.jsonl")]
    commands.succeed("show", *given, f"--out={folder / 'page.html'}")
    return folder / "page.html"


@pytest.fixture
def opened(browser: Page, many: Path) -> Iterator[Page]:
    """The page, freshly loaded; at the end nothing may have gone wrong in it."""
    browser.problems.clear()
    browser.requests.clear()
    browser.open(many)
    yield browser
    assert browser.problems == []
    assert browser.requests == [many.absolute().as_uri()]


FIRST = "document.querySelector('section[data-kind=chunks]')"
SHOWN = f"{FIRST}.querySelector('output').textContent"


def chosen(page: Page, number: int, value: str) -> str:
    """Chooses in one of the filters; returns what the list then says."""
    select = f"{FIRST}.querySelectorAll('select')[{number}]"
    page.value(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('change'))")
    return page.value(SHOWN)


def test_an_episode_opens_by_the_keyboard_and_shows_its_path(opened: Page, many: Path) -> None:
    section = read_page(many)["sections"][0]
    chosen(opened, 2, "log")
    opened.value(f"{FIRST}.querySelector('summary').focus()")
    for kind in ("keyDown", "keyUp"):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        opened.ask("Input.dispatchKeyEvent", type=kind, **key)
    shown = opened.value(f"{FIRST}.querySelector('details').innerText", wait=300)
    for step in section["episodes"][0]["steps"]:
        ((name, q, _, _),) = step["found"]
        assert f"Q {q:.3f}" in shown
        assert section["pool"][name] in shown


def test_planted_markup_does_not_run(opened: Page) -> None:
    opened.value(f"{FIRST}.querySelector('input').value = 'onerror'")
    opened.value(f"{FIRST}.querySelector('input').dispatchEvent(new Event('input'))")
    opened.value("0", wait=1500)
    opened.value("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
    assert HOSTILE in opened.value(f"{FIRST}.querySelector('details').textContent", wait=500)
    assert opened.value("document.title").startswith("run, other, many")
    assert opened.value("document.querySelectorAll('img, iframe, a, form').length") == 0
