"""The validation command: what it prints and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.sources import hotpotqa
from qrag_jax.validate_data import main
from tests.data.real_data import ROOT, real


def record(name: str, paragraphs: int) -> dict[str, Any]:
    context = [(f"T{place}", ["one two"] * (place + 1)) for place in range(paragraphs)]
    return hotpotqa.to_record(name, "Who?", "Ada", context, [0, 1])


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_all_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.jsonl", [record("a", 2), record("b", 3), record("c", 4)])
    assert main(["--source", "hotpotqa", "--path", str(path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"file     {path}",
        "records  3 read, 3 kept, 0 skipped",
        "chunks per question: min 2, median 3, max 4",
        "supporting facts per question: min 2, median 2, max 2",
        "steps that solve all: 2 (config.env.max_steps)",
        "words per chunk: min 3, median 5, max 9",
    ]


def test_some_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = record("x", 3) | {"supporting_facts": [["T9", 0]]}
    write(tmp_path / "dev.jsonl", [record("a", 2), bad, bad, record("a", 2)])
    write(tmp_path / "train.jsonl", [record("a", 2)])
    arguments = ["--source", "hotpotqa", "--path", str(tmp_path)]
    assert main([*arguments, "--split", "dev"]) == 1
    out = capsys.readouterr().out
    assert "records  4 read, 1 kept, 3 skipped\n" in out
    assert "skipped  2 support title not in the context, the first at dev.jsonl:2\n" in out
    assert "skipped  1 duplicate id, the first at dev.jsonl:4\n" in out
    assert main(arguments) == 0


def test_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beyond = record("b", 2) | {"supporting_facts": [["T1", 7], ["T0", 0]]}
    write(tmp_path / "dev.jsonl", [record("a", 2), beyond])
    assert main(["--source", "hotpotqa", "--path", str(tmp_path), "--split", "dev"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "records  2 read, 2 kept, 0 skipped",
        "mended   1 sentence index out of range, paragraph kept, the first at dev.jsonl:2",
        "chunks per question: min 2, median 2, max 2",
    ]


def test_fatal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.jsonl", [{"text": "no question"}])
    assert main(["--source", "hotpotqa", "--path", str(path)]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert "1 missing field '_id'" in caught.err
    assert main(["--source", "nonesuch", "--path", str(path)]) == 2
    assert "known ones are hotpotqa" in capsys.readouterr().err
    assert main(["--source", "hotpotqa", "--path", ""]) == 2
    assert "--path is empty" in capsys.readouterr().err


def test_story_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--source", "babilong", "--path", str(tmp_path)]
    assert main(arguments) == 2
    assert f"the folder {tmp_path} has no bAbI train file" in capsys.readouterr().err
    text = "1 Ada went to the hall.\n2 Bo went out.\n3 Where is Ada?\thall\t1\n"
    (tmp_path / "qa1_train.txt").write_text(text * 2)
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"file     {tmp_path / 'qa1_train.txt'}",
        "records  2 questions",
        "facts per question: min 2, median 2, max 2",
        "supporting facts per question: min 1, median 1, max 1",
    ]
    bad = tmp_path / "qa20_train.txt"
    bad.write_text(text.replace("\t1\n", "\t9\n"))
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {bad}, line 3, names the supporting id 9")


def test_needle_files(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(real("ruler_niah"))
    assert main(["--source", "niah", "--path", path, "--split", "dev"]) == 0
    assert "supporting facts per question: min 1, median 1, max 4" in capsys.readouterr().out


def test_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qrag_jax.validate_data", "--source", "hotpotqa", "--path"]
    missing = tmp_path / "none.jsonl"
    done = subprocess.run(
        [*command, str(missing)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {missing} does not exist")
    assert len(done.stderr.splitlines()) == 1


def test_real_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", "musique", "--path", str(real("musique")), "--split", "dev"]) == 0
    assert "chunks per question: min 20, median 20, max 20" in capsys.readouterr().out
