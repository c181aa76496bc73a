"""Scoring one run on documents of several lengths: logs, table, plot, resuming, bad input."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.generators.noise import NoiseConfig, books_of
from qrag_jax.runtime.locks import log_locks
from tests.data.generators.test_noise import shelf
from tests.entry_points import Commands, refusal

pytestmark = pytest.mark.long

CHUNKS, SAMPLES = 20, 16  # what the tiny run is trained and scored on
LENGTHS = {12: 16, CHUNKS: 16, 300: 3}


BOOKS = {"ada": 300, "bob": 280, "cleo": 260, "dora": 240, "emil": 220}  # sentences of each


@pytest.fixture(scope="module")
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("babilong") / "run"
    books = workdir.parent / "books"
    books.mkdir()
    commands.succeed(
        *("train", "--config=configs/babilong.py:tiny", f"--workdir={workdir}"),
        f"--config.data.sources.babilong.noise={shelf(books, BOOKS)}",
        *("--config.train.steps=4", "--config.train.eval_every=4"),
        "--config.encoder.length_buckets=1",
        "--config.encoder.block_sizes=1",
    )
    return workdir


@pytest.fixture(scope="module")
def scored(trained: Path, commands: Commands) -> tuple[Path, str]:
    """The run with its documents played, and what the command printed."""
    # In another order: lengths are played from the shortest up, with the samples given for each.
    out = commands.succeed(
        "evaluate_lengths",
        *(f"--workdir={trained}", "--chunks=300,12,20", "--samples=3,16"),
        f"--embeddings={trained.parent / 'embeddings'}",
    )
    return trained, out


def folder(workdir: Path) -> Path:
    (found,) = (workdir / "lengths").glob("best-*")
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(workdir: Path) -> list[dict[str, Any]]:
    return json.loads((folder(workdir) / "eval_seed42_lengths.json").read_text())


def test_logs_hold_documents_of_each_length(scored: tuple[Path, str]) -> None:
    for length, count in LENGTHS.items():
        log = rows(folder(scored[0]) / f"eval_seed42_ns{length}.jsonl")
        assert len(log) == count
        for row in log:
            assert len(set(row["pred_idx"])) == len(row["q_values"]) == 2
            assert max(row["pred_idx"] + row["sf_idx"]) < length
            assert row["em"] == float(set(row["sf_idx"]) <= set(row["pred_idx"]))
    # The same questions at every length.
    short, long = (rows(folder(scored[0]) / f"eval_seed42_ns{n}.jsonl") for n in (12, 300))
    assert [row["sf_texts"] for row in short[:3]] == [row["sf_texts"] for row in long]


def test_table_and_plot(scored: tuple[Path, str]) -> None:
    workdir, printed = scored
    found = results(workdir)
    assert [result["chunks"] for result in found] == list(LENGTHS)
    for result in found:
        log = rows(folder(workdir) / f"eval_seed42_ns{result['chunks']}.jsonl")
        assert result["samples"] == len(log) == LENGTHS[result["chunks"]]
        assert result["fact_em"] == pytest.approx(np.mean([row["em"] for row in log]))
        assert result["fact_f1"] == pytest.approx(np.mean([row["f1"] for row in log]))
        # One fact: play that finds it at the first of the two steps ends there.
        assert all(len(row["sf_idx"]) == 1 for row in log)
        cut = [1.0 if row["pred_idx"][0] in row["sf_idx"] else row["f1"] for row in log]
        assert result["f1_until_found"] == pytest.approx(np.mean(cut))
        assert result["until_found"]["fact_f1"] == result["f1_until_found"] >= result["fact_f1"]
        assert result["until_found"]["fact_em"] == result["until_found"]["return"]
        assert (result["fits"], result["stories"]) == (16, 16)
        at_shortest = rows(folder(workdir) / "eval_seed42_ns12.jsonl")[: result["samples"]]
        assert result["em_shortest"] == pytest.approx(np.mean([row["em"] for row in at_shortest]))
        assert result["steps"] == 2
        assert result["seconds_per_episode"] > 0
        assert result["peak_memory_mib"] > 50
        assert 0 < result["embedded"] <= result["chunks"] * result["samples"]
        assert result["tokens"] / result["chunks"] == pytest.approx(found[0]["tokens"] / 12, 0.1)
    lines = [line.split() for line in printed.splitlines() if line.strip()]
    (heading,) = [i for i, line in enumerate(lines) if line[0] == "chunks"]
    assert [line[0] for line in lines[heading + 1 : heading + 4]] == ["12", "20", "300"]
    picture = folder(workdir) / "eval_seed42_lengths.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_stories_at_every_length(
    scored: tuple[Path, str], commands: Commands, tmp_path: Path
) -> None:
    """Of long stories those that fit the shortest documents, however long the others are."""
    for flag, counts in (("--noevery_story", (6, 6)), ("--every_story", (6, 16))):
        out = commands.succeed(
            *("evaluate_lengths", f"--workdir={scored[0]}", "--chunks=16,40", "--samples=16"),
            *("--config.data.sources.babilong.task=qa2", f"--out={tmp_path / flag}", flag),
        )
        (table,) = (tmp_path / flag).glob("*/*_lengths.json")
        found = json.loads(table.read_text())
        assert [(result["fits"], result["stories"]) for result in found] == [
            (count, 16) for count in counts
        ]
        assert f"16 chunks: fits {counts[0]} of 16 stories" in out
        assert ("40 chunks: fits 16 of 16 stories" in out) == (counts[1] == 16)
        assert (found[1]["em_shortest"] is None) == (counts[1] == 16)
        logs = [rows(table.parent / f"eval_seed42_ns{length}.jsonl") for length in (16, 40)]
        assert [len(log) for log in logs] == list(counts)
        short, long = ([row["id"] for row in log] for log in logs)
        assert (short == long) == (counts[1] == 6)
        assert set(short) <= set(long)
        meta = json.loads((table.parent / "eval_seed42_ns40.jsonl.meta.json").read_text())
        assert meta["samples"].endswith(f" of fits {counts[1]} of 16")


def test_at_its_own_length_the_run_scores_as_evaluate_says(
    scored: tuple[Path, str], commands: Commands
) -> None:
    workdir = scored[0]
    commands.succeed("evaluate", f"--workdir={workdir}")
    (log,) = (workdir / "eval").glob("best-*/eval_seed42.jsonl")
    planned = rows(folder(workdir) / f"eval_seed42_ns{CHUNKS}.jsonl")
    for row, other in zip(planned, rows(log), strict=True):
        assert row.pop("q_values") == pytest.approx(other.pop("q_values"), rel=1e-4, abs=1e-6)
        assert row == other


def test_killed_midway_and_again_with_what_was_kept(
    scored: tuple[Path, str], commands: Commands, tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(scored[0], tmp_path / "run"))
    log = folder(workdir) / "eval_seed42_ns300.jsonl"
    whole = rows(log)
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1][:50])
    out = commands.succeed(
        *("evaluate_lengths", f"--workdir={workdir}", "--chunks=12,300", "--samples=16,3"),
        f"--embeddings={scored[0].parent / 'embeddings'}",
    )
    assert "1 of 3 questions are in the log already" in out
    for row, other in zip(rows(log), whole, strict=True):
        assert row.pop("q_values") == pytest.approx(other.pop("q_values"), rel=1e-5, abs=1e-7)
        assert row == other
    done, long = results(workdir)
    assert (done["seconds_per_episode"], done["embedded"]) == (None, 0)  # all was in the log
    assert long["embedded"] == 0  # all was kept
    assert long["seconds_per_episode"] > 0


def test_other_settings_into_the_same_log(scored: tuple[Path, str], commands: Commands) -> None:
    arguments = (f"--workdir={scored[0]}", "--chunks=12", "--samples=16")
    text = refusal(commands.run("evaluate_lengths", *arguments, "--config.eval.beam=3"))
    assert "was begun with other settings, config.eval.beam (was 1, now 3)" in text
    assert "--restart" in text


def test_a_log_that_another_process_writes_is_left_alone(
    scored: tuple[Path, str], commands: Commands, tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(scored[0], tmp_path / "run"))
    log = folder(workdir) / "eval_seed42_ns12.jsonl"
    torn = log.read_bytes() + b'{"id": "qa1'  # a row that the other one is writing
    log.write_bytes(torn)
    arguments = (f"--workdir={workdir}", "--chunks=12", "--samples=16")
    with log_locks(log):
        text = refusal(commands.run("evaluate_lengths", *arguments))
        assert log.read_bytes() == torn
    assert f"{log} is being written by process {os.getpid()} on " in text
    lines = torn.splitlines(keepends=True)
    log.write_bytes(b"".join((*lines[:-1], lines[0])))  # as two processes would leave it
    text = refusal(commands.run("evaluate_lengths", *arguments))
    assert f"{log} has 17 rows, but there are 16 questions" in text


def test_texts_that_changed_are_other_documents(
    scored: tuple[Path, str], commands: Commands, tmp_path: Path
) -> None:
    """One sentence in the middle of the books, which neither end of the set shows."""
    workdir = Path(shutil.copytree(scored[0], tmp_path / "run"))
    books = scored[0].parent / "books"
    trained = json.loads((workdir / "books.json").read_text())["babilong"]
    changed = books / min({f"{name}.txt.gz" for name in BOOKS} - set(trained))  # one of dev
    before = changed.read_bytes()
    text = gzip.decompress(before).decode().replace("Sentence 100 of", "Sentence 1000 of")
    changed.write_bytes(gzip.compress(text.encode()))
    try:
        arguments = (f"--workdir={workdir}", "--chunks=12", "--samples=16")
        told = refusal(commands.run("evaluate_lengths", *arguments))
    finally:
        changed.write_bytes(before)
    assert "was begun with other settings, samples (was" in told


def test_books_of_training_are_never_scored_on(
    scored: tuple[Path, str], commands: Commands, tmp_path: Path
) -> None:
    workdir = scored[0]
    books = Path(shutil.copytree(workdir.parent / "books", tmp_path / "books"))
    shelf(books, {"frida": 290})  # with it bob, a book of training, is one for dev
    moved = f"--config.data.sources.babilong.noise={books}"
    more = (moved, f"--out={tmp_path / 'out'}")
    trained = set(json.loads((workdir / "books.json").read_text())["babilong"])
    now = {book.name for book in books_of(NoiseConfig(str(books)), "dev")}
    assert trained & now  # the split has changed
    for command in (("evaluate_lengths", "--chunks=12"), ("evaluate",)):
        text = refusal(commands.run(command[0], f"--workdir={workdir}", *command[1:], *more))
        assert f"would be scored on, but {workdir} was trained among them (books.json)" in text
        assert "config.data.sources.babilong.noise_dev" in text
        assert all(name in text for name in trained & now)


def test_refusals(
    scored: tuple[Path, str], finished_run: Path, commands: Commands, tmp_path: Path
) -> None:
    def refused(workdir: Path, *arguments: str) -> str:
        return refusal(commands.run("evaluate_lengths", f"--workdir={workdir}", *arguments))

    workdir = scored[0]
    assert "--chunks=12,0: give counts from 1 up" in refused(workdir, "--chunks=12,0")
    text = refused(workdir, "--chunks=12", "--samples=3,4")
    assert "--samples=3,4 has more counts than --chunks has lengths" in text
    text = refused(finished_run, "--chunks=12")
    assert "documents of hotpotqa cannot be made longer or shorter" in text
    text = refused(workdir, "--config.eval.beam=99", f"--out={tmp_path}", "--chunks=12")
    assert "config.eval.beam is 99; it must be from 1 to 16." in text
