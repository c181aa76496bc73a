"""A run's samples: paths and mixtures, what is held out, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.loading import DataConfig, LoadedSamples, load_split, without_questions
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.sources.registry import SOURCES
from qrag_jax.errors import InputError

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def config(sources: Mapping[str, float], path: str = "", limit: int = 0) -> DataConfig:
    made = SyntheticConfig(hops=(2,), comparison=0.0, chunks=8, seed=0, train=12, dev=5)
    return DataConfig(path=path, limit=limit, synthetic=made, sources=sources)


def records(source: str, count: int) -> list[dict[str, Any]]:
    make = SOURCES[source].to_record
    return [make(f"r{i}", f"{source} question {i}?", "Oslo", PARAGRAPHS, [0]) for i in range(count)]


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def load(settings: DataConfig, split: Any, cache: Path, hold_out: bool = True) -> LoadedSamples:
    return load_split(dataclasses.replace(settings, cache=str(cache)), split, hold_out=hold_out)


def refusal(settings: DataConfig, split: Any, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(settings, split, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hold_out_is_disjoint_and_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", records("hotpotqa", 300))
    settings = config({"hotpotqa": 1.0}, str(path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    train_ids, dev_ids = ({s.id for s in part.all} for part in (train, dev))
    assert not train_ids & dev_ids
    assert train_ids | dev_ids == {f"r{i}" for i in range(300)}
    assert 15 <= len(dev_ids) <= 45  # a tenth, drawn by hash
    assert len(load(settings, "dev", tmp_path, hold_out=False).all) == 300
    # A folder has its own split.
    write(tmp_path / "both" / "train.jsonl", records("two_wiki", 20))
    write(tmp_path / "both" / "dev.jsonl", records("two_wiki", 4))
    settings = config({"two_wiki": 1.0}, str(tmp_path / "both"))
    assert [len(load(settings, split, tmp_path).all) for split in ("train", "dev")] == [20, 4]


def test_hold_out_does_not_depend_on_the_other_records(tmp_path: Path) -> None:
    items = records("hotpotqa", 120)
    part = config({"hotpotqa": 1.0}, str(write(tmp_path / "part.jsonl", items[:60])))
    whole = config({"hotpotqa": 1.0}, str(write(tmp_path / "whole.jsonl", items[::-1])))
    few = {s.id for s in load(part, "dev", tmp_path).all}
    many = {s.id for s in load(whole, "dev", tmp_path).all}
    assert few == many & {f"r{i}" for i in range(60)}


def test_mixtures(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "train.jsonl", records("hotpotqa", 3)).parent
    two = write(tmp_path / "b.jsonl", records("musique", 4))
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}, musique={two}")
    loaded = load(settings, "train", tmp_path, hold_out=False)
    assert [s.source for s in loaded.all] == ["hotpotqa"] * 3 + ["musique"] * 4
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}")
    assert "musique" in refusal(settings, "train", tmp_path)
    # One folder for all; a limit counts for each source.
    for name in ("hotpotqa", "musique"):
        write(tmp_path / name / "train.jsonl", records(name, 5))
    settings = config({"hotpotqa": 1, "musique": 1}, str(tmp_path), limit=2)
    loaded = load(settings, "train", tmp_path)
    assert [len(part) for part in loaded.by_source.values()] == [2, 2]


def test_limit_keeps_the_first_invented_questions(tmp_path: Path) -> None:
    every = load(config({"synthetic": 1.0}), "train", tmp_path).all
    settings = config({"synthetic": 1.0}, limit=4)
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    assert train.all == every[:4]
    assert not {s.question for s in every} & {s.question for s in dev.all}
    # Invented files of a source are written once.
    settings = config({"hotpotqa": 1.0}, "synthetic")
    first = load(settings, "train", tmp_path)
    (folder,) = (tmp_path / "synthetic").iterdir()
    stamp = (folder / "train.jsonl").stat().st_mtime_ns
    assert load(settings, "train", tmp_path) == first
    assert (folder / "train.jsonl").stat().st_mtime_ns == stamp


def test_evaluation_questions_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", records("hotpotqa", 10))
    write(tmp_path / "dev.jsonl", records("hotpotqa", 3))
    settings = config({"hotpotqa": 1.0}, str(tmp_path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    kept = without_questions(train, dev.all)
    assert [s.id for s in kept.all] == [f"r{i}" for i in range(3, 10)]
    with pytest.raises(InputError, match="hotpotqa"):
        without_questions(train, train.all)


def test_bad_paths_and_files(tmp_path: Path) -> None:
    one = {"hotpotqa": 1.0}
    (tmp_path / "empty").mkdir()
    (tmp_path / "prose.jsonl").write_text("Once upon a time\n")
    write(tmp_path / "other.jsonl", records("musique", 2))
    for name in ("missing", "empty", "prose.jsonl", "other.jsonl"):
        assert str(tmp_path / name) in refusal(config(one, str(tmp_path / name)), "train", tmp_path)
    assert "'squad'" in refusal(config({"squad": 1.0}, "synthetic"), "train", tmp_path)
    assert "data.sources" in refusal(config({}, "synthetic"), "train", tmp_path)


def test_lazy_sources_keep_questions_that_are_asked_again(tmp_path: Path) -> None:
    stories = BabilongConfig(chunks=15, train=40, dev=40)
    settings = dataclasses.replace(config({"babilong": 1}, "synthetic"), babilong=stories)
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    assert {s.question for s in train.all} & {s.question for s in dev.all}
    assert len(without_questions(train, [*dev.all]).all) == 40
