"""Loads an environment and plays it, as the trainer says."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Mapping
from typing import Any, Protocol

from .wire import Link, Refused, told

V0, V1 = "v0", "v1"
_EXTRA = {V0: "'verifiers>=0.2,<0.4'", V1: "'verifiers>=0.4,<0.5'"}


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


def protocol_of(asked: str) -> tuple[str, str]:
    """The protocol to speak, and the version of verifiers here.

    Raises:
        Refused: verifiers is not here, or does not speak it.
    """
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Refused(
            f"the Python of config.env.python has no verifiers; install {_EXTRA[asked or V1]} "
            "there, or name another"
        ) from None
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    own = V1 if numbers >= [0, 4] else V0
    if asked and asked != own:
        raise Refused(
            f"config.env.protocol is {asked}, and verifiers {version}, which is installed there, "
            f"speaks {own}; name a Python that has {_EXTRA[asked]} in config.env.python"
        )
    return own, version


def _opened(link: Link, asked: Mapping[str, Any]) -> tuple[Player, dict[str, Any]]:
    protocol, version = protocol_of(asked["protocol"])
    try:
        if protocol == V0:
            from .v0 import open_environment
        else:
            from .v1 import open_environment  # type: ignore[assignment]
        player: Player = open_environment(link, asked)
        return player, {"protocol": protocol, "version": version, **player.about()}
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
