"""Environments of the package verifiers itself, played with a scripted model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qrag_jax.environments.verifiers_process import EnvironmentProcess, ProcessSpec
from qrag_jax.llm.text.chat_rendering import ChatRenderer
from qrag_jax.llm.text.tool_calls import HERMES
from qrag_jax.rollouts.called_turns import TurnLimits
from qrag_jax.rollouts.environment_play import EnvironmentPlay, hands_over
from qrag_jax.rollouts.generate_server import GenerateServer
from qrag_jax.rollouts.played_units import PlayCounts, PlayedUnit, PlaySettings, Unit
from tests.environments.verifiers_pythons import PYTHON
from tests.rollouts.chats import ScriptedSampler, chat_tokenizer

TURN, ROOM, SIDE_BY_SIDE = 200, 1500, 8


class NoStop:
    def check(self) -> None:
        return None


class Foreign:
    """One environment, and what plays it."""

    def __init__(self, folder: Path, name: str, **arguments: Any) -> None:
        self.log = folder / "verifiers.log"
        fields = {
            "id": name,
            "arguments": arguments,
            "model": "policy",
            "limits": {"seconds": 60.0, "turns": 5, "tokens": 0, "turn_tokens": TURN},
            "tasks": 100,
            "harness": "direct",
            "renderer": None,
        }
        self.process = EnvironmentProcess(ProcessSpec(PYTHON, self.log, fields))
        self.tokenizer = chat_tokenizer()
        self.tokenizer.save_pretrained(folder / "tokenizer")
        self.renderer = ChatRenderer(self.tokenizer, HERMES)
        self.counts, self._folder = PlayCounts(), folder

    def play(
        self, say: Callable[[str], str], *tasks: int, members: int = 1, attempts: int = 1
    ) -> list[PlayedUnit]:
        """Plays tasks by a model that says what a function makes of the text before."""
        self.sampler = ScriptedSampler(self.tokenizer, say)
        limits = TurnLimits(turn=TURN, room=ROOM, turns=5, tokens=0, temperature=1.0)
        units = [
            Unit("train", task, tuple(np.array([task, n], np.uint32) for n in range(members)))
            for task in tasks
        ]

        with GenerateServer("policy", ROOM, self.renderer, hands_over(self.process)) as server:
            served = {
                "url": server.url,
                "key": server.key,
                "tokenizer": str(self._folder / "tokenizer"),
                "stop_ids": [*self.renderer.stop_ids()],
                "temperature": 1.0,
            }
            settings = PlaySettings(limits, 60.0, attempts, SIDE_BY_SIDE, served)
            play = EnvironmentPlay(self.process, self.renderer, settings, self.counts)
            played = play.play(units, self.sampler, NoStop())
            # The server has a thread for each connection that is open.
            names = [thread.name for thread in threading.enumerate()]
            self.connections = sum("process_request_thread" in name for name in names)
            return played


@contextlib.contextmanager
def foreign(folder: Path, name: str, **arguments: Any) -> Iterator[Foreign]:
    found = Foreign(folder, name, **arguments)
    try:
        yield found
    finally:
        found.process.end()


def counts_letters(text: str) -> str:
    """A model that calls the tool, then answers with what it said."""
    if "tool_response" in text.rpartition("<|im_end|>\n<|im_start|>user")[2]:
        said = text.rpartition("<tool_response>\n")[2].partition("\n")[0]
        return f"It has {said} letters."
    word = text.rpartition("How many letters has ")[2].partition("?")[0]
    call = f'{{"name": "count_letters", "arguments": {{"word": "{word}"}}}}'
    return f"I count.\n<tool_call>\n{call}\n</tool_call>"
