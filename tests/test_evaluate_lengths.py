"""Scoring one run on documents of several lengths: logs, results, resuming, books of training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.noise import NoiseConfig, books_of
from tests.data.test_noise import shelf
from tests.entry_points import Commands, refusal

CHUNKS = 20  # what the tiny run is trained and scored on
LENGTHS = {12: 16, CHUNKS: 16, 300: 3}  # documents of each length
BOOKS = {"ada": 300, "bob": 280, "cleo": 260, "dora": 240, "emil": 220}  # sentences of each


@pytest.fixture(scope="module")
def scored(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its documents played."""
    workdir = tmp_path_factory.mktemp("babilong") / "run"
    books = workdir.parent / "books"
    books.mkdir()
    commands.succeed(
        *("train", "--config=configs/babilong.py:tiny", f"--workdir={workdir}"),
        f"--config.data.sources.babilong.noise={shelf(books, BOOKS)}",
        *("--config.train.steps=4", "--config.train.eval_every=4"),
        *("--config.encoder.length_buckets=1", "--config.encoder.block_sizes=1"),
    )
    # In another order: lengths are played from the shortest up, with the samples given for each.
    commands.succeed(
        *("evaluate", f"--workdir={workdir}", "--chunks=300,12,20", "--samples=3,16"),
        f"--embeddings={workdir.parent / 'embeddings'}",
    )
    return workdir


def log_of(workdir: Path, length: int) -> Path:
    (found,) = (workdir / "lengths").glob(f"best-*/eval_seed42_ns{length}.jsonl")
    return found


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def results(workdir: Path) -> list[dict[str, Any]]:
    (path,) = workdir.glob("lengths/best-*/eval_seed42_lengths.json")
    return json.loads(path.read_text())


def test_logs_and_results_of_each_length(scored: Path) -> None:
    found = results(scored)
    assert [result["chunks"] for result in found] == list(LENGTHS)
    for result in found:
        log = rows(log_of(scored, result["chunks"]))
        assert len(log) == result["samples"] == LENGTHS[result["chunks"]]
        for row in log:
            assert len(set(row["pred_idx"])) == len(row["q_values"]) == 2
            assert max(row["pred_idx"] + row["sf_idx"]) < result["chunks"]
            assert row["em"] == float(set(row["sf_idx"]) <= set(row["pred_idx"]))
            assert len(row["sf_idx"]) == 1
        assert result["fact_em"] == pytest.approx(np.mean([row["em"] for row in log]))
        assert result["fact_f1"] == pytest.approx(np.mean([row["f1"] for row in log]))
        # One fact: play that finds it at the first of the two steps ends there.
        cut = [1.0 if row["pred_idx"][0] in row["sf_idx"] else row["f1"] for row in log]
        assert result["until_found"]["fact_f1"] == pytest.approx(np.mean(cut))
        at_shortest = rows(log_of(scored, 12))[: result["samples"]]
        assert result["em_shortest"] == pytest.approx(np.mean([row["em"] for row in at_shortest]))
        assert 0 < result["embedded"] <= result["chunks"] * result["samples"]
    # The same questions at every length.
    short, long = (rows(log_of(scored, length)) for length in (12, 300))
    assert [row["sf_texts"] for row in short[:3]] == [row["sf_texts"] for row in long]
    assert list(scored.glob("lengths/best-*/eval_seed42_lengths.png"))


def test_books_of_training_are_never_scored_on(
    scored: Path, commands: Commands, tmp_path: Path
) -> None:
    books = Path(shutil.copytree(scored.parent / "books", tmp_path / "books"))
    shelf(books, {"frida": 290})  # with it bob, a book of training, is one for dev
    more = (f"--config.data.sources.babilong.noise={books}", f"--out={tmp_path / 'out'}")
    trained = set(json.loads((scored / "books.json").read_text())["babilong"])
    now = {book.name for book in books_of(NoiseConfig(str(books)), "dev")}
    assert trained & now  # the split has changed
    for words in (("--chunks=12",), ()):
        text = refusal(commands.run("evaluate", f"--workdir={scored}", *words, *more))
        assert "config.data.sources.babilong.noise_dev" in text
        assert all(name in text for name in trained & now)
