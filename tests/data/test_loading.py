"""A run's samples: paths and mixtures, what is held out, what is refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.generators.haystacks import NiahConfig
from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.lazy_samples import LazySamples
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


# ---------------------------------------------------------------------- one file for all


def test_hold_out_is_disjoint_and_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", records("hotpotqa", 300))
    settings = config({"hotpotqa": 1.0}, str(path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    train_ids, dev_ids = ({s.id for s in part.all} for part in (train, dev))
    assert not train_ids & dev_ids
    assert train_ids | dev_ids == {f"r{i}" for i in range(300)}
    assert 15 <= len(dev_ids) <= 45  # a tenth, drawn by hash
    assert train.report[0].endswith(f"; {len(train_ids)} of them for train")
    assert dev.report[0].endswith(f"; {len(dev_ids)} of them for dev")


def test_hold_out_does_not_depend_on_the_other_records(tmp_path: Path) -> None:
    items = records("hotpotqa", 120)
    part = config({"hotpotqa": 1.0}, str(write(tmp_path / "part.jsonl", items[:60])))
    whole = config({"hotpotqa": 1.0}, str(write(tmp_path / "whole.jsonl", items[::-1])))
    few = {s.id for s in load(part, "dev", tmp_path).all}
    many = {s.id for s in load(whole, "dev", tmp_path).all}
    assert few == many & {f"r{i}" for i in range(60)}


def test_without_hold_out_a_file_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", records("musique", 30))
    settings = config({"musique": 1.0}, str(path))
    for split in ("train", "dev"):
        assert len(load(settings, split, tmp_path, hold_out=False).all) == 30


def test_too_few_records_to_hold_out(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", records("hotpotqa", 1))
    settings = config({"hotpotqa": 1.0}, str(path))
    texts = []
    for split in ("train", "dev"):
        try:
            load(settings, split, tmp_path)
        except InputError as error:
            texts.append(str(error))
    assert len(texts) == 1  # the record is in one of the two
    assert f"{path}: too few records to hold some out" in texts[0]
    assert "config.eval.path" in texts[0]


# ---------------------------------------------------------------------- folders and mixtures


def test_folder_is_not_held_out(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", records("two_wiki", 20))
    write(tmp_path / "dev.jsonl", records("two_wiki", 4))
    settings = config({"two_wiki": 1.0}, str(tmp_path))
    assert len(load(settings, "train", tmp_path).all) == 20
    assert len(load(settings, "dev", tmp_path).all) == 4


def test_mixture_with_a_path_for_each_source(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "train.jsonl", records("hotpotqa", 3)).parent
    two = write(tmp_path / "b.jsonl", records("musique", 4))
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}, musique={two}")
    loaded = load(settings, "train", tmp_path, hold_out=False)
    assert {name: len(part) for name, part in loaded.by_source.items()} == {
        "hotpotqa": 3,
        "musique": 4,
    }
    assert [s.source for s in loaded.all] == ["hotpotqa"] * 3 + ["musique"] * 4
    assert len(loaded.report) == 2
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}")
    assert "gives no path for musique; write name=path" in refusal(settings, "train", tmp_path)


def test_one_folder_for_a_mixture(tmp_path: Path) -> None:
    for name in ("hotpotqa", "musique"):
        write(tmp_path / name / "train.jsonl", records(name, 2))
    loaded = load(config({"hotpotqa": 1, "musique": 1}, str(tmp_path)), "train", tmp_path)
    assert {name: len(part) for name, part in loaded.by_source.items()} == {
        "hotpotqa": 2,
        "musique": 2,
    }


def test_limit_counts_per_source(tmp_path: Path) -> None:
    for name in ("hotpotqa", "musique"):
        write(tmp_path / name / "train.jsonl", records(name, 5))
    settings = config({"hotpotqa": 1, "musique": 1}, str(tmp_path), limit=2)
    assert len(load(settings, "train", tmp_path).all) == 4


# ---------------------------------------------------------------------- invented questions


def test_source_synthetic_needs_no_path(tmp_path: Path) -> None:
    settings = config({"synthetic": 1.0})
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    assert (len(train.all), len(dev.all)) == (12, 5)
    assert train.report == ["synthetic: made 12 train questions"]
    assert not {s.question for s in train.all} & {s.question for s in dev.all}


def test_limit_keeps_the_first_invented_questions(tmp_path: Path) -> None:
    every = load(config({"synthetic": 1.0}), "train", tmp_path).all
    settings = config({"synthetic": 1.0}, limit=4)
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    assert train.all == every[:4]
    assert train.report == ["synthetic: made 4 train questions"]
    assert len(dev.all) == 5
    assert len(load(config({"synthetic": 1.0}, limit=99), "train", tmp_path).all) == 12


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "niah"])
def test_path_synthetic_writes_the_sources_own_files_once(tmp_path: Path, source: str) -> None:
    settings = config({source: 1.0}, "synthetic")
    first = load(settings, "train", tmp_path)
    assert (len(first.all), len(load(settings, "dev", tmp_path).all)) == (12, 5)
    (folder,) = (tmp_path / "synthetic").iterdir()
    stamp = (folder / "train.jsonl").stat().st_mtime_ns
    assert load(settings, "train", tmp_path) == first
    assert (folder / "train.jsonl").stat().st_mtime_ns == stamp
    assert list((tmp_path / "synthetic").iterdir()) == [folder]


# ---------------------------------------------------------------------- evaluation questions


def test_evaluation_questions_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", records("hotpotqa", 10))
    write(tmp_path / "dev.jsonl", records("hotpotqa", 3))
    settings = config({"hotpotqa": 1.0}, str(tmp_path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    kept = without_questions(train, dev.all)
    assert [s.id for s in kept.all] == [f"r{i}" for i in range(3, 10)]
    assert kept.report[1:] == ["hotpotqa: 3 training questions left out, evaluation has them too"]
    with pytest.raises(InputError, match="every hotpotqa training"):
        without_questions(train, train.all)


# ---------------------------------------------------------------------- bad input


def test_bad_paths_and_files(tmp_path: Path) -> None:
    one = {"hotpotqa": 1.0}
    missing = tmp_path / "missing"
    assert f"{missing} does not exist" in refusal(config(one, str(missing)), "train", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "is empty" in refusal(config(one, str(tmp_path / "empty")), "train", tmp_path)
    blank = tmp_path / "blank.jsonl"
    blank.write_text("")
    assert f"{blank} is empty" in refusal(config(one, str(blank)), "train", tmp_path)
    other = write(tmp_path / "other.jsonl", records("musique", 2))
    text = refusal(config(one, str(other)), "train", tmp_path)
    assert f"{other} has no usable hotpotqa record among 2" in text
    assert "missing field 'context'" in text
    prose = tmp_path / "prose.jsonl"
    prose.write_text("Once upon a time\n")
    assert f"{prose}, line 1, is not JSON" in refusal(config(one, str(prose)), "train", tmp_path)


def test_truncated_gzip(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", records("hotpotqa", 200))
    data = gzip.compress((tmp_path / "a.jsonl").read_bytes())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    text = refusal(config({"hotpotqa": 1.0}, str(path)), "train", tmp_path)
    assert f"{path} is truncated after record" in text


def test_bad_records_are_counted_in_the_report(tmp_path: Path) -> None:
    items = records("hotpotqa", 6)
    items[1]["supporting_facts"] = []
    items[2]["supporting_facts"] = [["Dusk", 5]]
    items[3]["supporting_facts"] = [["Nowhere", 0]]
    path = write(tmp_path / "train.jsonl", items).parent
    loaded = load(config({"hotpotqa": 1.0}, str(path)), "train", tmp_path)
    assert [s.id for s in loaded.all] == ["r0", "r2", "r4", "r5"]
    (line,) = loaded.report
    for loss in (
        "1 no supporting facts",
        "1 with sentence index out of range, paragraph kept",
        "1 support title not in the context",
    ):
        assert loss in line
    write(tmp_path / "train.jsonl", [items[1], items[3], items[1]])
    text = refusal(config({"hotpotqa": 1.0}, str(path)), "train", tmp_path)
    assert "no usable hotpotqa record among 3" in text


def test_sources_that_are_none(tmp_path: Path) -> None:
    for path in ("synthetic", str(tmp_path)):
        text = refusal(config({"squad": 1.0}, path), "train", tmp_path)
        assert "'squad'" in text
        assert "known" in text
        assert "hotpotqa, musique, two_wiki, " in text
    assert "names no source" in refusal(config({}, "synthetic"), "train", tmp_path)
    text = refusal(config({"hotpotqa": 0.0}, "synthetic"), "train", tmp_path)
    assert "the weight of data source 'hotpotqa' is 0.0" in text


# ---------------------------------------------------------------------- documents made on access


def test_babilong_is_generated_without_a_path(tmp_path: Path) -> None:
    for path in ("", "synthetic"):
        settings = dataclasses.replace(
            config({"babilong": 1.0}, path), babilong=BabilongConfig(chunks=15, train=9, dev=4)
        )
        train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
        assert isinstance(train.all, LazySamples)
        assert ([len(part.all) for part in (train, dev)]) == [9, 4]
        assert train.report == [
            "babilong: 9 of 9 qa1 stories of the generator, 15 chunks each; drawn anew in every "
            "epoch; 5,000 noise sentences of the invented world"
        ]
        assert [len(s.chunks) for s in train.all] == [15] * 9
    assert not (tmp_path / "synthetic").exists()


def test_babilong_of_files_in_a_mixture(tmp_path: Path) -> None:
    line = "1 Ada went to the hall.\n2 Where is Ada?\thall\t1\n"
    (tmp_path / "qa1_train.txt").write_text(line * 5)
    other = write(tmp_path / "train.jsonl", records("hotpotqa", 3))
    settings = dataclasses.replace(
        config({"hotpotqa": 1, "babilong": 1}, f"hotpotqa={other},babilong={tmp_path}", limit=2),
        babilong=BabilongConfig(chunks=15),
    )
    loaded = load(settings, "train", tmp_path, hold_out=False)
    assert [s.id for s in loaded.all] == ["r0", "r1", "qa1-train-0", "qa1-train-1"]
    assert loaded.all[3].source == "babilong"
    with pytest.raises(InputError, match="has no qa1_valid"):
        load(settings, "dev", tmp_path, hold_out=False)


def test_niah_is_generated_or_read(tmp_path: Path) -> None:
    needles = NiahConfig(chunks=15, train=9, dev=4)
    for path in ("", "synthetic"):
        settings = dataclasses.replace(config({"niah": 1.0}, path, limit=5), niah=needles)
        loaded = load(settings, "train", tmp_path)
        assert isinstance(loaded.all, LazySamples)
        assert loaded.report == [
            "niah: made 5 train documents, drawn anew in every epoch; "
            "5,000 noise sentences of the invented world"
        ]
        assert [(s.source, len(s.chunks)) for s in loaded.all] == [("niah", 15)] * 5
    path = write(tmp_path / "dev.jsonl", records("niah", 3))
    settings = dataclasses.replace(config({"niah": 1.0}, str(tmp_path)), niah=needles)
    loaded = load(settings, "dev", tmp_path)
    assert [s.id for s in loaded.all] == ["r0", "r1", "r2"]
    assert loaded.report == [f"niah: kept 3 of 3 records of {path.name}"]


def test_lazy_sources_keep_questions_that_are_asked_again(tmp_path: Path) -> None:
    other = write(tmp_path / "train.jsonl", records("hotpotqa", 3))
    settings = dataclasses.replace(
        config({"hotpotqa": 1, "babilong": 1}, f"hotpotqa={other},babilong=synthetic"),
        babilong=BabilongConfig(chunks=15, train=40, dev=40),
    )
    train, dev = (load(settings, split, tmp_path, hold_out=False) for split in ("train", "dev"))
    dev_asked = list(dev.by_source["babilong"])
    asked = {s.question for s in dev_asked}
    assert asked & {s.question for s in train.by_source["babilong"]}
    kept = without_questions(train, [*dev_asked, train.by_source["hotpotqa"][0]])
    assert {name: len(part) for name, part in kept.by_source.items()} == {
        "hotpotqa": 2,
        "babilong": 40,
    }
    only = LoadedSamples({"babilong": train.by_source["babilong"]}, [])
    assert len(without_questions(only, dev.all).all) == 40
