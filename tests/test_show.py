"""The command `show`: a page of a real run, and bad input in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.entry_points import EVAL_EVERY, STEPS, Commands, refusal
from tests.evaluators.shown_pages import Page

# ---------------------------------------------------------------------- the command


@pytest.mark.long
def test_a_scored_run(scored_run: Path, commands: Commands, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    told = commands.succeed("show", str(scored_run), f"--out={out}")
    assert f"{out}: 1 run, 4 episodes." in told
    read = Page(out)
    (section,) = read.sections
    assert section["title"] == f"my-run: episodes of last-{STEPS}/eval_seed42.jsonl"
    for episode in section["episodes"]:
        assert all(isinstance(q, float) for _, _, q in episode["steps"])
        assert episode["before"]["steps"]
        assert -1e-4 < episode["regret"] <= 1
    curves = {curve["name"]: curve for curve in read.runs[0]["curves"]}
    assert curves["train/loss"]["steps"] == [*range(1, STEPS + 1)]
    assert curves["eval/return"]["steps"] == [*range(0, STEPS + 1, EVAL_EVERY)]


@pytest.mark.long
def test_a_training_keeps_a_sample(finished_run: Path, commands: Commands, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (finished_run / "episodes.jsonl").open()]
    steps = sorted({line["step"] for line in lines})
    assert steps == [*range(0, STEPS + 1, EVAL_EVERY)]
    ids = [[line["row"]["id"] for line in lines if line["step"] == step] for step in steps]
    assert all(each == ids[0] for each in ids)
    assert 0 < len(ids[0]) <= 8
    boards = b"".join(path.read_bytes() for path in (finished_run / "tensorboard").iterdir())
    assert boards.count(b"of 2 facts, return") >= len(lines)
    out = tmp_path / "page.html"
    commands.succeed("show", str(finished_run), f"--out={out}")
    (section,) = Page(out).sections
    assert section["title"] == f"run: episodes of step {STEPS}"
    assert all(episode["before"]["steps"] for episode in section["episodes"])


@pytest.mark.long
def test_bad_input_in_one_sentence(commands: Commands, finished_run: Path, tmp_path: Path) -> None:
    assert "give the folder of a run, or a log in it" in refusal(commands.run("show"))
    none = commands.run("show", str(finished_run), str(tmp_path / "none"))
    assert "none does not exist; give the folder of a run" in refusal(none)
    other = commands.run("show", str(tmp_path))
    assert "is not the folder of a run" in refusal(other)
    folder = commands.run("show", str(finished_run), f"--out={tmp_path}")
    assert "is a folder; give the name of a file" in refusal(folder)
    assert [*tmp_path.iterdir()] == []
