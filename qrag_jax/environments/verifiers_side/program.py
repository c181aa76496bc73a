"""Loads an environment and plays it, as the trainer says."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, Protocol

from .wire import Link, Refused, told

_WANTED = "'verifiers>=0.4,<0.5'"


class Player(Protocol):
    """An environment that is open."""

    def about(self) -> dict[str, Any]:
        """The fields of `opened`: sizes, prompts, digest, code."""
        ...

    async def play(self, asked: Mapping[str, Any]) -> None:
        """Plays the episodes of one task, and says `played` for each."""
        ...

    async def start(self) -> None:
        """Before the first episode."""
        ...

    async def stop(self) -> None:
        """After the last one."""
        ...


def version_here() -> str:
    """The version of verifiers in this Python.

    Raises:
        Refused: it is not installed, or older than 0.4.
    """
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Refused(
            f"the Python of config.env.python has no verifiers; install {_WANTED} there, or name "
            "another"
        ) from None
    if [int(part) for part in version.split(".")[:2] if part.isdecimal()] < [0, 4]:
        raise Refused(
            f"the Python of config.env.python has verifiers {version}; name one that has {_WANTED}"
        )
    return version


def _opened(link: Link, asked: Mapping[str, Any]) -> tuple[Player, dict[str, Any]]:
    version = version_here()
    try:
        from .v1 import open_environment

        player: Player = open_environment(link, asked)
        return player, {"version": version, **player.about()}
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"the environment {asked['id']!r} cannot be opened ({told(error)}); mend it, or its "
            "config.env.arguments"
        ) from error


async def _run(link: Link, player: Player, about: Mapping[str, Any]) -> None:
    link.listen()
    await player.start()
    link.say("opened", **about)
    playing = set[asyncio.Task[None]]()
    while (asked := await link.asked.get()) is not None and asked["op"] == "play":
        task = asyncio.ensure_future(player.play(asked))
        playing.add(task)
        task.add_done_callback(playing.discard)
    for task in playing:
        task.cancel()
    await player.stop()


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
