"""Play part by part: the draws of parts, a play that is broken off, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.systems.played_parts import PlayedParts

ASKED, SIZE = ("a", "b", "c", "d", "e"), 2
RECORD = {"kind": "letters"}


@dataclasses.dataclass(frozen=True)
class Played:
    name: str
    stream: int
    place: int


class Player:
    """Notes its parts; is told to stop in call number `stop_at`, from 1."""

    def __init__(self, stop_at: int = 0) -> None:
        self.parts: list[str] = []
        self._stop_at = stop_at

    def __call__(self, part: Sequence[str], stream: int) -> list[Played]:
        self.parts.append("".join(part))
        if len(self.parts) == self._stop_at:
            raise Stopped("SIGTERM")
        return [Played(name, stream, place) for place, name in enumerate(part)]


def parts(play: Any, asked: Sequence[str] = ASKED) -> PlayedParts[str, Played]:
    return PlayedParts(
        rows=RowLog(Played, "mend it"),
        asked=asked,
        size=SIZE,
        play=play,
        is_of=lambda row, name: row.name == name,
        names=("letter", "letters"),
    )


def into(log: Path, play: Any, asked: Sequence[str] = ASKED, **more: Any) -> list[Played]:
    given = {"record": RECORD, "restart": False, **more}
    return parts(play, asked).into(log, given["record"], StopSignal(), restart=given["restart"])


def test_each_part_has_draws_of_its_own(tmp_path: Path) -> None:
    log, player = tmp_path / "new" / "x.jsonl", Player()
    rows = into(log, player)
    assert player.parts == ["ab", "cd", "e"]
    assert [row.name for row in rows] == [*ASKED]
    first = rows[0].stream
    assert [row.stream - first for row in rows] == [0, 0, 1, 1, 2]
    assert [row.place for row in rows] == [0, 1, 0, 1, 0]
    again = Player()
    assert into(log, again) == rows
    assert again.parts == []


@pytest.mark.parametrize(("stop_at", "left"), [(1, ["ab", "cd", "e"]), (3, ["e"])])
def test_what_was_broken_off_goes_on(tmp_path: Path, stop_at: int, left: list[str]) -> None:
    whole, log = into(tmp_path / "whole.jsonl", Player()), tmp_path / "x.jsonl"
    with pytest.raises(Stopped):
        into(log, Player(stop_at))
    player = Player()
    assert into(log, player) == whole
    assert player.parts == left
    assert log.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_part_that_was_cut_off_is_played_again(tmp_path: Path) -> None:
    log, player = tmp_path / "x.jsonl", Player()
    into(log, Player())
    whole = log.read_bytes()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]) + b'{"name"')
    into(log, player)
    assert player.parts == ["cd", "e"]
    assert log.read_bytes() == whole


def test_a_log_of_others_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "x.jsonl"
    into(log, Player())
    for asked in ("abxde", "abcd"):
        with pytest.raises(InputError, match=r"x\.jsonl has other letters; give --restart"):
            into(log, Player(), asked)
    with pytest.raises(InputError, match="begun with other settings"):
        into(log, Player(), record={"kind": "numbers"})
    rows = into(log, Player(), "xy", record={"kind": "numbers"}, restart=True)
    assert [row.name for row in rows] == ["x", "y"]
