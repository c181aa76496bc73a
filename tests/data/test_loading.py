"""A run's samples: the files of a source, mixtures, what is held out, skipped and refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets.arrow_reader import ReadInstruction

from qrag_jax.data.config import DataConfig, mix_weights
from qrag_jax.data.loading import LoadedSamples, load_split, without_questions
from qrag_jax.data.reading import WITHOUT, DatasetPart, load_samples, parse_parts, read_parts
from qrag_jax.data.sample import is_held_out
from qrag_jax.data.sources import SOURCES
from qrag_jax.errors import InputError
from qrag_jax.runtime.retriever_config import passage_text
from tests.data.real_data import real
from tests.support.worlds import record_of, write_lines

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def two_facts(source: str, count: int, prefix: str = "r") -> list[dict[str, Any]]:
    return [
        record_of(source, f"{prefix}{number}", f"Question {number}?", "Oslo", PARAGRAPHS, [0, 2])
        for number in range(count)
    ]


def test_bad_records_are_skipped_counted_and_placed(tmp_path: Path) -> None:
    good = two_facts("hotpotqa", 3)
    broken = two_facts("hotpotqa", 4, "bad")
    broken[0]["supporting_facts"] = []
    broken[1]["supporting_facts"] = [["Dusk", 9]]
    broken[2]["supporting_facts"] = []
    del broken[3]["context"]
    write_lines(tmp_path / "train_a.jsonl.gz", [good[0], *broken, good[1]])
    write_lines(tmp_path / "train_b.jsonl", [good[0], good[2]])
    samples, report = load_samples("hotpotqa", str(tmp_path), "train")
    assert [sample.id for sample in samples] == ["r0", "bad1", "r1", "r2"]
    assert (report.read, report.kept) == (8, 4)
    assert [*report.mended.values()] == [1]
    assert [*report.skipped.values()] == [2, 1, 1]  # no facts, no context, one id twice
    assert sorted(report.first.values()) == [
        *(f"train_a.jsonl.gz:{line}" for line in (2, 3, 5)),
        "train_b.jsonl:1",
    ]


def test_real_data_is_kept_whole() -> None:
    for source, kept in (("hotpotqa", 189 + 465), ("musique", 221), ("two_wiki", 152)):
        samples, report = load_samples(source, str(real("README.md").parent), "dev")
        assert len(samples) == report.read == report.kept == kept


def config(sources: Mapping[str, float], path: str = "", limit: int = 0) -> DataConfig:
    return DataConfig(path=path, limit=limit, sources=sources)


def load(settings: DataConfig, split: Any, cache: Path, hold_out: bool = True) -> LoadedSamples:
    return load_split(dataclasses.replace(settings, cache=str(cache)), split, hold_out=hold_out)


def refusal(settings: DataConfig, split: Any, cache: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(settings, split, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_hold_out_is_disjoint_and_complete(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.jsonl", two_facts("hotpotqa", 300))
    settings = config({"hotpotqa": 1.0}, str(path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    train_ids, dev_ids = ({s.id for s in part.all} for part in (train, dev))
    assert not train_ids & dev_ids
    assert train_ids | dev_ids == {f"r{i}" for i in range(300)}
    assert 15 <= len(dev_ids) <= 45  # a tenth, drawn by hash
    assert len(load(settings, "dev", tmp_path, hold_out=False).all) == 300
    # A folder has its own split.
    write_lines(tmp_path / "both" / "train.jsonl", two_facts("two_wiki", 20))
    write_lines(tmp_path / "both" / "dev.jsonl", two_facts("two_wiki", 4))
    settings = config({"two_wiki": 1.0}, str(tmp_path / "both"))
    assert [len(load(settings, split, tmp_path).all) for split in ("train", "dev")] == [20, 4]


def test_mixtures(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a" / "train.jsonl", two_facts("hotpotqa", 3)).parent
    two = write_lines(tmp_path / "b.jsonl", two_facts("musique", 4))
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}, musique={two}")
    loaded = load(settings, "train", tmp_path, hold_out=False)
    assert [s.source for s in loaded.all] == ["hotpotqa"] * 3 + ["musique"] * 4
    settings = config({"hotpotqa": 1, "musique": 3}, f"hotpotqa={one}")
    assert "musique" in refusal(settings, "train", tmp_path)
    # One folder for all; a limit counts for each source.
    for name in ("hotpotqa", "musique"):
        write_lines(tmp_path / name / "train.jsonl", two_facts(name, 5))
    settings = config({"hotpotqa": 1, "musique": 1}, str(tmp_path), limit=2)
    loaded = load(settings, "train", tmp_path)
    assert [len(part) for part in loaded.by_source.values()] == [2, 2]


def test_evaluation_questions_are_left_out(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", two_facts("hotpotqa", 10))
    write_lines(tmp_path / "dev.jsonl", two_facts("hotpotqa", 3))
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
    write_lines(tmp_path / "other.jsonl", two_facts("musique", 2))
    for name in ("missing", "empty", "prose.jsonl", "other.jsonl"):
        assert str(tmp_path / name) in refusal(config(one, str(tmp_path / name)), "train", tmp_path)
    alone = config(one, str(write_lines(tmp_path / "alone.jsonl", two_facts("hotpotqa", 1))))
    empty = "train" if is_held_out("r0") else "dev"  # the record is in the other part
    assert "config.eval.path" in refusal(alone, empty, tmp_path)
    assert "'squad'" in refusal(config({"squad": 1.0}, "a"), "train", tmp_path)
    assert "data.sources" in refusal(config({}, "a"), "train", tmp_path)


def test_shares_by_size() -> None:
    """Those of HotpotQA, MuSiQue and 2WikiMultihopQA, whole, as one heap."""
    sizes = {"hotpotqa": 90_447, "musique": 19_938, "two_wiki": 167_454}
    shares = mix_weights(dict.fromkeys(sizes, 1.0), sizes)
    assert [round(share, 2) for share in shares.values()] == [0.33, 0.07, 0.60]
    assert mix_weights({"a": 1, "b": 3}, {"a": 30, "b": 10}) == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("name", ["hotpotqa", "musique", "two_wiki"])
def test_titles_of_a_corpus_are_joined_as_those_of_the_training(name: str) -> None:
    (record,) = two_facts(name, 1)
    separator = DataConfig(sources={name: 1.0}).passage_separator
    chunks = SOURCES[name].parse(record).chunks
    assert chunks[0] == passage_text("Dusk", "By Ada.", separator)


# ---------------------------------------------------------------- path,config,split

LAKES = [("J. R. R. Lake", ["It is deep."]), ("Ada Berg", ["She sails there. ", "Often."])]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve questions of MuSiQue for training, five of HotpotQA for evaluation."""
    for name, source, count in (("train", "musique", 12), ("dev", "hotpotqa", 5)):
        records = [
            record_of(source, f"{name}{number}", "Where?", "a lake", LAKES, [0])
            for number in range(count)
        ]
        write_lines(tmp_path / f"{name}.jsonl", records)
    return tmp_path


def test_strings_of_several_parts() -> None:
    text = "bdsaglam/musique,answerable,train[:256]; bdsaglam/musique-mini , , validation"
    assert parse_parts(text) == (
        DatasetPart("bdsaglam/musique", "answerable", "train", "[:256]"),
        DatasetPart("bdsaglam/musique-mini", "", "validation"),
    )
    assert parse_parts("ir/scifact,dev", WITHOUT) == (DatasetPart("ir/scifact", "", "dev"),)
    for text in ("a,b,train", "a", ""):
        with pytest.raises(InputError, match="path,split"):
            parse_parts(text, WITHOUT)


@pytest.mark.parametrize(
    "text",
    [
        *(" ", "a,b,train;", "a,train", "a,b,train,16", ",b,train", "a,b,", "a,b,train[16]"),
        *("a,b,train[:16", "a,b,train[:16]+dev[:2]", "a,b,train[10:50%]", "a,b,train[:120%]"),
    ],
)
def test_a_string_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_parts(text)
    assert "\n" not in str(caught.value)


BOUNDS = "|[:]|[:16]|[3:]|[2:20]|[-5:]|[:-1]|[10%:90%]|[-33%:]|[:5%]"


@pytest.mark.parametrize("count", [1, 7, 117])
@pytest.mark.parametrize("bounds", BOUNDS.split("|"))
def test_slices_are_those_of_datasets(bounds: str, count: int) -> None:
    (part,) = parse_parts(f"a,b,train{bounds}")
    (theirs,) = ReadInstruction.from_spec(f"train{bounds}").to_absolute({"train": count})
    if theirs.from_ >= theirs.to:
        with pytest.raises(InputError, match=str(count)):
            part.of(count)
    else:
        assert part.of(count) == range(theirs.from_, theirs.to)


def test_files_are_read_with_titles(folder: Path) -> None:
    samples, (report,) = read_parts(f"{folder},answerable,train[2:5]")
    assert [each.id for each in samples] == ["train2", "train3", "train4"]
    assert samples[0].titles == ("J. R. R. Lake", "Ada Berg")
    assert samples[0].chunks[0] == "J. R. R. Lake. It is deep."
    assert (report.read, report.kept) == (3, 3)
    samples, _ = read_parts(f"{folder},hotpotqa,validation")
    assert [each.source for each in samples] == ["hotpotqa"] * 5
    assert samples[0].titles == ("J. R. R. Lake", "Ada Berg")
    assert samples[0].chunks[1] == "Ada Berg She sails there. Often."
    assert len(read_parts(f"{folder / 'train.jsonl'},,anything[:1]")[0]) == 1
