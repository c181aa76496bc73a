"""The logs of ways: each is played once, those that are not here are told, others are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.row_log import RowLog
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.systems.scored_ways import NOT_KEPT, Way, WayLogs


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
    rows: RowLog[Scored] = RowLog(Scored, "mend it")

    def read(path: Path, way: Way[Scored]) -> list[Scored]:
        return rows.read(path)

    return WayLogs(folder, rows, read, lambda way: {"way": way.name, "settings": settings})


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


def test_a_log_of_other_settings_is_refused(tmp_path: Path) -> None:
    calls: list[str] = []
    logs(tmp_path).played([way("one", calls)], StopSignal(), restart=False)
    with pytest.raises(InputError, match=r"one\.jsonl was begun with other settings"):
        logs(tmp_path, "theirs").played([way("one", calls)], StopSignal(), restart=False)
    logs(tmp_path, "theirs").played([way("one", calls)], StopSignal(), restart=True)
    assert calls == ["one", "one"]
