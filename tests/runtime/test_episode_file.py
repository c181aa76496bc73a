from __future__ import annotations

import json
from pathlib import Path

from qrag_jax.runtime.episode_file import EpisodeFile


def steps(folder: Path) -> list[tuple[int, int]]:
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    return [(line["step"], line["row"]["n"]) for line in map(json.loads, lines)]


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    kept = EpisodeFile(tmp_path)
    for step in (0, 5, 10, 15):
        kept.write(step, "chunks", [{"n": 1}, {"n": 2}])
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"step": 20, "row"')  # torn by a kill
    resumed = EpisodeFile(tmp_path, 10)
    assert steps(tmp_path) == [(0, 1), (0, 2), (5, 1), (5, 2), (10, 1), (10, 2)]
    resumed.write(10, "chunks", [{"n": 3}])  # an evaluation that is repeated
    resumed.write(15, "chunks", [{"n": 4}])
    assert steps(tmp_path) == [(0, 1), (0, 2), (5, 1), (5, 2), (10, 3), (15, 4)]


def test_a_new_run_begins_anew(tmp_path: Path) -> None:
    EpisodeFile(tmp_path).write(5, "chunks", [{"n": 1}])
    kept = EpisodeFile(tmp_path)
    assert not (tmp_path / "episodes.jsonl").exists()
    kept.write(0, "chunks", [{"n": 2}])
    assert steps(tmp_path) == [(0, 2)]


def test_broken_lines_are_dropped_when_a_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "episodes.jsonl"
    file.write_text('no JSON\n[]\n{"step": "5"}\n{"step": 5, "kind": "chunks", "row": {"n": 1}}\n')
    EpisodeFile(tmp_path, 5)
    assert steps(tmp_path) == [(5, 1)]
