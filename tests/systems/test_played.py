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
from qrag_jax.systems.scoring import NOT_KEPT, Questions, Way

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

    def __call__(self, params: Any, part: Sequence[str], first: int) -> list[Played]:
        self.parts.append("".join(part))
        if len(self.parts) == self._stop_at:
            raise Stopped("SIGTERM")
        return [Played(name, first, place) for place, name in enumerate(part)]


ROWS = RowLog("letters", Played, "mend it")


def questions(asked: Sequence[str] = ASKED, size: int = SIZE) -> Questions[str, Played]:
    return Questions(ROWS, asked, lambda row, name: row.name == name, size)


def into(log: Path, play: Any, asked: Sequence[str] = ASKED, **more: Any) -> list[Played]:
    given = {"record": RECORD, "restart": False, **more}
    way = Way(log.stem, "letters", play)
    assert not questions(asked).into(
        log, way, given["record"], StopSignal(), restart=given["restart"]
    )
    return ROWS.read(log)


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


def test_a_way_is_played_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def way(name: str, params: str | None = None) -> Way[Played]:
        def read() -> str | None:
            calls.append(name)
            return params

        return Way(name, f"the way {name}", Player(), read, {"way": name})

    def played(**fields: Any) -> tuple[dict[str, list[Played]], list[str]]:
        given = {"record": RECORD, "restart": False, **fields}
        ways = [way("one"), way("two", NOT_KEPT)]
        logs, notes = questions(size=0).played(
            tmp_path, ways, given["record"], StopSignal(), restart=given["restart"]
        )
        return {name: ROWS.read(log) for name, log in logs.items()}, notes

    rows, notes = played()
    assert rows == {"one": [Played(name, 0, place) for place, name in enumerate(ASKED)]}
    assert notes == ["the way two is not here: its weights are not kept"]
    kept = [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")]
    assert sorted(kept) == ["one.json", "one.jsonl"]
    assert played() == (rows, notes)
    assert calls == ["one", "two", "two"]
    with pytest.raises(InputError, match="begun with other settings"):
        played(record={"kind": "numbers"})
    played(restart=True)
    assert calls == ["one", "two", "two", "one", "two"]


TOLD = """
from jax._src import xla_bridge
from qrag_jax import train
from qrag_jax.runtime import commandline
from qrag_jax.systems import config

def tell(asked):
    print("started:", xla_bridge.backends_are_initialized(), "asked:", asked)

def ask(deterministic, described=False):
    tell(deterministic)
    raise SystemExit(0)

config.leave_room = lambda llm: tell(llm.server.memory_share)
config.ask_determinism = ask
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
