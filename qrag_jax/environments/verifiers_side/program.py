"""Loads an environment and plays it, as the trainer says in lines of JSON.

The trainer says (`op`):
    open    id, arguments, limits, …: load this environment
    play    task, episode, …: play an episode of a task
    answer  call, prompt, follows, ids, log_probs, finish, content, calls; or error, status
The program says:
    opened  version, tasks, prompts, digest, code
    refused message: one sentence; the program ends
    turn    call, episode, messages, tools, before, tail, sampling: sample a turn
    played  episode, reward, parts, stop, truncated, failure, nodes, record
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")
_WANTED = "'verifiers>=0.4,<0.5'"
_LOOK_EVERY = 0.2  # seconds


class Refused(Exception):
    """The environment cannot be used; the message is one sentence, which the user reads."""


class EpisodeFailed(Exception):
    """An episode has no reward; `cause` is a short word for counting."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def one_line(text: object, most: int = 300) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[:most]}…"


def reason(error: BaseException) -> str:
    """What was raised, and what raised that, in one line."""
    causes, cause = dict[str, None](), error
    for _ in range(4):
        causes[": ".join(filter(None, (type(cause).__name__, one_line(cause))))] = None
        cause = cause.__cause__ or cause.__context__ or cause
    return one_line(" ← ".join(causes), 400)


def code_of(module: ModuleType) -> str:
    """A digest of the Python files of a module or of its package."""
    digest, path = hashlib.sha256(), Path(module.__file__ or "")
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(path.parent)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def imported(name: str, module: str) -> ModuleType:
    """The module of an environment, which the user knows by its name."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise Refused(
            f"config.env.python cannot import {module} ({reason(error)}); install it there"
        ) from error


class Clock:
    """Seconds that an environment has worked by itself; a limit of 0 is none."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._began, self._spoken, self._speaking, self._since = time.monotonic(), 0.0, 0, 0.0

    def speaks(self, *, on: bool) -> None:
        """The model begins, or ends, to speak; several turns may overlap."""
        if on and not self._speaking:
            self._since = time.monotonic()
        self._speaking += 1 if on else -1
        if not on and not self._speaking:
            self._spoken += time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        now = time.monotonic()
        spoken = self._spoken + (now - self._since if self._speaking else 0.0)
        return now - self._began - spoken

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=_LOOK_EVERY))[0]:
                if self.limit and self.seconds > self.limit:
                    raise EpisodeFailed(
                        "timeout", f"it worked for more than config.env.seconds, {self.limit:g} s"
                    )
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # It may refuse to end; then nobody waits for it.
                await asyncio.wait({task}, timeout=2.0)


class Link:
    """This process's end. What an environment prints goes to standard error, not between lines."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._in = os.fdopen(os.dup(0), "r", encoding="utf-8")
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        sys.stdout = sys.stderr
        # The messages of the trainer but its answers; None: it has gone.
        self.asked: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._numbers = itertools.count()
        # What the trainer has not answered
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}

    def read(self) -> dict[str, Any] | None:
        """The next message, before `listen` was called; None: the trainer has gone."""
        line = self._in.readline()
        return json.loads(line) if line else None

    def say(self, op: str, **fields: Any) -> None:
        """Sends a message."""
        line = json.dumps({"op": op, **fields}, default=_plain)
        self._out.write(line + "\n")
        self._out.flush()

    def ask(self, op: str, **fields: Any) -> asyncio.Future[dict[str, Any]]:
        """Asks the trainer for something; the result is its answer."""
        number = next(self._numbers)
        self._calls[number] = answer = asyncio.get_running_loop().create_future()
        self.say(op, call=number, **fields)
        return answer

    def listen(self) -> None:
        """Begins to read in a thread; called from the loop that plays."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                for line in self._in:
                    loop.call_soon_threadsafe(self._take, json.loads(line))
            finally:
                # The trainer may have been killed; an environment must not go on without it.
                try:
                    loop.call_soon_threadsafe(self._take, None)
                except RuntimeError:
                    os._exit(1)
                threading.Timer(10.0, os._exit, (1,)).start()

        threading.Thread(target=read, name="trainer", daemon=True).start()

    def _take(self, message: dict[str, Any] | None) -> None:
        if message is None or message["op"] == "play":
            self.asked.put_nowait(message)
        elif not (answer := self._calls.pop(message["call"])).done():
            answer.set_result(message)


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def version_here() -> str:
    """The version of verifiers in this Python."""
    installed = next(iter(importlib.metadata.distributions(name="verifiers")), None)
    version = installed.version if installed else "none"
    if version.split(".")[:2] != ["0", "4"]:
        raise Refused(f"config.env.python has verifiers {version}; install {_WANTED} there")
    return version


def _opened(link: Link, asked: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The environment's player, and what the trainer reads of it."""
    version = version_here()
    try:
        from .v1 import TasksetPlayer

        player = TasksetPlayer(link, asked)
        return player, {"version": version, **player.about()}
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"environment {asked['id']!r} cannot be opened ({reason(error)})") from error


async def _run(link: Link, player: Any, about: Mapping[str, Any]) -> None:
    link.listen()
    async with player.serving():
        link.say("opened", **about)
        playing = set[asyncio.Task[None]]()
        while (asked := await link.asked.get()) is not None:
            task = asyncio.ensure_future(player.play(asked))
            playing.add(task)
            task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()


def main() -> int:
    """Speaks with the trainer until it closes; returns the exit status."""
    link = Link()
    asked = link.read()
    if asked is None:
        return 1
    try:
        # In the main thread: environments set handlers of signals when they are made.
        player, about = _opened(link, asked)
        asyncio.run(_run(link, player, about))
    except Refused as refused:
        link.say("refused", message=str(refused))
        return 1
    # Threads of an environment may never end.
    os._exit(0)
