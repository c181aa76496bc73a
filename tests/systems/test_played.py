"""Plays that are kept: parts, ways and tries; what is torn, broken off, or of others."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.run_flags import experiment_of
from qrag_jax.systems.scoring import NOT_KEPT, PlayedParts, Way, WayLogs

ASKED, SIZE = ("a", "b", "c", "d", "e"), 2


RECORD = {"kind": "letters"}


@dataclasses.dataclass(frozen=True)
class Played:
    name: str
    first: int
    place: int


class Player:
    """Notes its parts; is told to stop in call number `stop_at`, from 1."""

    def __init__(self, stop_at: int = 0) -> None:
        self.parts: list[str] = []
        self._stop_at = stop_at

    def __call__(self, part: Sequence[str], first: int) -> list[Played]:
        self.parts.append("".join(part))
        if len(self.parts) == self._stop_at:
            raise Stopped("SIGTERM")
        return [Played(name, first, place) for place, name in enumerate(part)]


def parts(play: Any, asked: Sequence[str] = ASKED) -> PlayedParts[str, Played]:
    return PlayedParts(
        rows=RowLog("letters", Played, "mend it"),
        asked=asked,
        size=SIZE,
        play=play,
        is_of=lambda row, name: row.name == name,
        names=("letter", "letters"),
    )


def into(log: Path, play: Any, asked: Sequence[str] = ASKED, **more: Any) -> list[Played]:
    given = {"record": RECORD, "restart": False, **more}
    parts(play, asked).into(log, given["record"], StopSignal(), restart=given["restart"])
    return RowLog("letters", Played, "mend it").read(log)


@pytest.mark.parametrize(("stop_at", "left"), [(1, ["ab", "cd", "e"]), (3, ["e"])])
def test_what_was_broken_off_goes_on(tmp_path: Path, stop_at: int, left: list[str]) -> None:
    whole, log = into(tmp_path / "whole.jsonl", Player()), tmp_path / "x.jsonl"
    with pytest.raises(Stopped):
        into(log, Player(stop_at))
    player = Player()
    assert into(log, player) == whole
    assert player.parts == left
    assert log.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_log_of_others_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    into(log, Player())
    for asked in ("abxde", "abcd"):
        with pytest.raises(InputError, match=r"x\.jsonl"):
            into(log, Player(), asked)
    with pytest.raises(InputError, match="begun with other settings"):
        into(log, Player(), record={"kind": "numbers"})
    rows = into(log, Player(), "xy", record={"kind": "numbers"}, restart=True)
    assert [row.name for row in rows] == ["x", "y"]


@dataclasses.dataclass(frozen=True)
class Scored:
    name: str


def way(name: str, calls: list[str], found: str = "") -> Way[Scored]:
    """Writes its own name; or is not here, as `found` says."""

    def play() -> list[Scored] | str:
        calls.append(name)
        return found or [Scored(name)]

    return Way(name, f"the way {name}", play)


def logs(folder: Path, settings: str = "ours") -> WayLogs[Scored]:
    rows: RowLog[Scored] = RowLog("scores", Scored, "mend it")

    return WayLogs(folder, rows, rows.read, lambda way: {"way": way.name, "settings": settings})


def test_a_way_is_played_once(tmp_path: Path) -> None:
    calls: list[str] = []
    ways = [way("one", calls), way("two", calls, NOT_KEPT)]
    rows, notes = logs(tmp_path).played(ways, StopSignal(), restart=False)
    assert rows == {"the way one": [Scored("one")]}
    assert notes == ["the way two is not here: its weights are not kept"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one.json", "one.jsonl"]
    again, _ = logs(tmp_path).played(ways, StopSignal(), restart=False)
    assert again == rows
    assert calls == ["one", "two", "two"]
    logs(tmp_path).played(ways, StopSignal(), restart=True)
    assert calls == ["one", "two", "two", "one", "two"]


TOLD = """
from jax._src import xla_bridge
from qrag_jax import train
from qrag_jax.runtime import commandline
from qrag_jax.systems import q_rag

def tell(asked):
    print("started:", xla_bridge.backends_are_initialized(), "asked:", asked)

def ask(deterministic, described=False):
    tell(deterministic)
    raise SystemExit(0)

q_rag.leave_room = lambda llm: tell(llm.server.memory_share)
q_rag.ask_determinism = ask
commandline.run(train.main)
"""


def told(workdir: Path, *words: str) -> list[str]:
    given = ["--config=configs/quickstart.py:tiny", f"--workdir={workdir}", *words]
    command = [sys.executable, "-c", TOLD, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_training_leaves_room_and_asks_for_determinism_in_time(tmp_path: Path) -> None:
    words = ["--config.reward.name=answer_f1", "--config.llm.server.model=org/name"]
    lines = told(tmp_path / "run", *words, "--config.llm.server.memory_share=0.4")
    assert lines == ["started: False asked: 0.4", "started: False asked: True"]


def stages(words: str) -> object:
    return experiment_of(["--config=configs/rlvr.py:tiny", f"--config.stages={words}"]).stages


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("sft, grpo", ("sft", "grpo")),
        ("grpo", ("grpo",)),
        ("('sft', 'grpo')", ("sft", "grpo")),
        ("a/b,c", ("a/b,c",)),
    ],
)
def test_names_with_commas_between(words: str, read: tuple[object, ...]) -> None:
    assert stages(words) == read
