"""A run's samples and questions: files, parts, mixtures, what is held out or skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets.arrow_reader import ReadInstruction

from qrag_jax.data.loading import (
    DataConfig,
    LoadedSamples,
    load_questions,
    load_split,
    load_splits,
    without_questions,
)
from qrag_jax.data.reading import (
    WITHOUT,
    DatasetPart,
    load_samples,
    parse_parts,
    read_parts,
    without_asked,
)
from qrag_jax.data.sample import BadRecord, Passage, Sample, is_held_out
from qrag_jax.data.sources import SOURCES, Source, answer_rule
from qrag_jax.errors import InputError
from tests.machine import real
from tests.support import worlds
from tests.support.worlds import record_of, write_lines

PARAGRAPHS = [("Dusk", ["By Ada."]), ("Dawn", ["A film."]), ("Ada", ["Born in Oslo."])]


def two_facts(source: str, count: int, prefix: str = "r") -> list[dict[str, Any]]:
    return [
        record_of(source, f"{prefix}{number}", f"Question {number}?", "Oslo", PARAGRAPHS, [0, 2])
        for number in range(count)
    ]


def test_real_data_is_kept_whole() -> None:
    for source, kept in (("hotpotqa", 189 + 465), ("musique", 221), ("two_wiki", 152)):
        samples, report = load_samples(source, str(real("README.md").parent), "dev")
        assert len(samples) == report.read == report.kept == kept


def config(sources: Mapping[str, float], path: str = "", limit: int = 0) -> DataConfig:
    return DataConfig(path=path, limit=limit, sources=sources)


def load(settings: DataConfig, split: Any, cache: Path, hold_out: bool = True) -> LoadedSamples:
    return load_split(dataclasses.replace(settings, cache=str(cache)), split, hold_out=hold_out)


def test_a_tenth_of_one_file_or_one_split_of_the_hub_is_held_out(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = write_lines(tmp_path / "train.jsonl", two_facts("own", 300))
    for where in (str(path), f"hub:{tmp_path},,train"):
        settings = config({"own": 1.0}, where)
        train, dev = (
            {sample.id for sample in load(settings, split, tmp_path).all}
            for split in ("train", "dev")
        )
        assert not train & dev
        assert train | dev == {f"r{i}" for i in range(300)}
        assert 15 <= len(dev) <= 45  # drawn by hash
        assert len(load(settings, "dev", tmp_path, hold_out=False).all) == 300
    write_lines(tmp_path / "both" / "train.jsonl", two_facts("two_wiki", 20))
    write_lines(tmp_path / "both" / "dev.jsonl", two_facts("two_wiki", 4))
    settings = config({"two_wiki": 1.0}, str(tmp_path / "both"))  # which has its own split
    assert [len(load(settings, split, tmp_path).all) for split in ("train", "dev")] == [20, 4]


def test_mixtures_of_paths_or_of_one_folder(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "hotpotqa" / "train.jsonl", two_facts("hotpotqa", 5)).parent
    two = write_lines(tmp_path / "musique" / "train.jsonl", two_facts("musique", 4))
    sources = {"hotpotqa": 1, "musique": 3}
    for path, limit, counts in (
        (f"hotpotqa={one}, musique={two}", 0, [5, 4]),
        (tmp_path, 2, [2, 2]),
    ):
        settings = config(sources, str(path), limit)  # the limit is a source's
        loaded = load(settings, "train", tmp_path, hold_out=False)
        assert [len(part) for part in loaded.by_source.values()] == counts


def test_questions_of_both_splits_are_evaluated_on_alone(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", two_facts("hotpotqa", 10))
    write_lines(tmp_path / "dev.jsonl", two_facts("hotpotqa", 3))
    settings = config({"hotpotqa": 1.0}, str(tmp_path))
    train, dev = (load(settings, split, tmp_path) for split in ("train", "dev"))
    kept = without_questions(train, dev.all)
    assert [s.id for s in kept.all] == [f"r{i}" for i in range(3, 10)]
    with pytest.raises(InputError, match="hotpotqa"):
        without_questions(train, train.all)
    assert without_asked([*train.all], dev.all) == [*kept.all]
    with pytest.raises(InputError, match=r"config\.questions\.train"):
        without_asked([*dev.all], dev.all)


def test_a_data_set_is_a_row_and_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(record: dict[str, Any]) -> Sample:
        if not record["needs"]:
            raise BadRecord("no supporting facts")
        texts, needs = tuple(record["texts"]), tuple(record["needs"])
        return Sample(record["key"], record["ask"], texts, needs, (record["right"],), "quiz")

    row = Source(parse, "quiz_train.jsonl", "quiz_dev.jsonl", ("quiz",), rule="ruler", ordered=True)
    monkeypatch.setitem(SOURCES, "quiz", row)
    for split, count in (("train", 4), ("dev", 2)):
        rows = [
            {"key": f"{split}-{n}", "ask": f"{split} {n}?", "texts": ["a", "b"], "right": "a"}
            | {"needs": [1, 0] if n else []}
            for n in range(count)
        ]
        write_lines(tmp_path / "quiz" / f"quiz_{split}.jsonl", rows)
    settings = config({"quiz": 1.0}, str(tmp_path))
    train, dev = load_splits(settings, settings, hold_out=True)
    assert [sample.id for sample in train.all] == ["train-1", "train-2", "train-3"]
    assert [sample.support for sample in dev.all] == [(1, 0)]
    assert "1 no supporting facts" in train.report[0]
    assert settings.ordered == {"quiz"}
    assert answer_rule("quiz") == "ruler"


def test_paths_and_sources_that_are_refused(tmp_path: Path) -> None:
    one = {"hotpotqa": 1.0}
    (tmp_path / "empty").mkdir()
    write_lines(tmp_path / "other.jsonl", two_facts("musique", 2))
    alone = write_lines(tmp_path / "alone.jsonl", two_facts("hotpotqa", 1))
    for sources, path, named in (
        *((one, str(tmp_path / name), str(tmp_path / name)) for name in ("none", "empty")),
        (one, str(tmp_path / "other.jsonl"), "other.jsonl"),
        (one | {"musique": 1.0}, f"hotpotqa={alone}", "musique"),
        ({"own": 1.0}, "hub:a,b,c,d", "hub:NAME,CONFIG,SPLIT"),
        ({"squad": 1.0}, "a", "'squad'"),
        ({}, "a", "data.sources"),
        (one, str(alone), "config.eval.path"),  # the one record is in the other part
    ):
        with pytest.raises(InputError) as caught:
            load(config(sources, path), "train" if is_held_out("r0") else "dev", tmp_path)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- path,config,split

LAKES = [("J. R. R. Lake", ["It is deep. ", "Old."]), ("Ada Berg", ["She sails."])]
GOLD = (Passage("", "It is deep. Old.", "J. R. R. Lake"), Passage("", "She sails.", "Ada Berg"))


def test_strings_of_several_parts() -> None:
    text = "bdsaglam/musique,answerable,train[:256]; bdsaglam/musique-mini , , validation"
    assert parse_parts(text) == (
        DatasetPart("bdsaglam/musique", "answerable", "train", "[:256]"),
        DatasetPart("bdsaglam/musique-mini", "", "validation"),
    )
    assert parse_parts("ir/scifact,dev", WITHOUT) == (DatasetPart("ir/scifact", "", "dev"),)
    for text in (" ", "a,train", ",b,train", "a,b,train[16]", "a,b,train[10:50%]"):
        with pytest.raises(InputError):
            parse_parts(text)
    with pytest.raises(InputError, match="path,split"):
        parse_parts("a,b,train", WITHOUT)


BOUNDS = "|[:]|[:16]|[3:]|[2:20]|[-5:]|[:-1]|[10%:90%]|[-33%:]|[:5%]"


@pytest.mark.parametrize("count", [1, 117])
def test_slices_are_those_of_datasets(count: int) -> None:
    for bounds in BOUNDS.split("|"):
        (part,) = parse_parts(f"a,b,train{bounds}")
        (theirs,) = ReadInstruction.from_spec(f"train{bounds}").to_absolute({"train": count})
        if theirs.from_ >= theirs.to:
            with pytest.raises(InputError, match=str(count)):
                part.of(count)
        else:
            assert part.of(count) == range(theirs.from_, theirs.to)


def test_parts_of_a_folder_are_read_with_titles(tmp_path: Path) -> None:
    for name, source, count in (("train", "musique", 12), ("dev", "hotpotqa", 5)):
        rows = [record_of(source, f"{name}{i}", "Where?", "a lake", LAKES, [0]) for i in range(12)]
        write_lines(tmp_path / f"{name}.jsonl", rows[:count])
    samples, _ = read_parts(f"{tmp_path},answerable,train[2:5]")
    assert [each.id for each in samples] == ["train2", "train3", "train4"]
    assert samples[0].titles == ("J. R. R. Lake", "Ada Berg")
    assert samples[0].chunks[0] == "J. R. R. Lake. It is deep. Old."
    samples, _ = read_parts(f"{tmp_path},hotpotqa,validation")
    assert [each.source for each in samples] == ["hotpotqa"] * 5
    assert samples[0].chunks[1] == "Ada Berg She sails."
    assert len(read_parts(f"{tmp_path / 'train.jsonl'},,anything[:1]")[0]) == 1


FACTS = [["Ada Berg", 0]]
CLAIM = {"uid": "h0", "claim": "Ada sails.", "supporting_facts": FACTS, "label": "SUPPORTED"}
OPEN_RECORD = {"_id": "w0", "question": "Who sails?", "answer": "Ada", "supporting_facts": FACTS}
OPEN_RECORD |= {"gold_doc_ids": ["doc7"]}


def test_gold_passages_of_each_data_set(tmp_path: Path) -> None:
    rows = {
        "hotpot": record_of("hotpotqa", "a", "Where?", "a lake", LAKES, [1, 0]),
        "musique": record_of("musique", "b", "Where else?", "a lake", LAKES, [1]),
        "hover": CLAIM,
        "open": OPEN_RECORD,
    }
    paths = [write_lines(tmp_path / f"{name}.jsonl", [row]) for name, row in rows.items()]
    samples, _ = read_parts(";".join(f"{path},,dev" for path in paths), from_corpus=True)
    claim = "Is the following claim supported: Ada sails?"
    assert [
        (each.id, each.question, each.answers, each.gold, each.passages, each.source)
        for each in samples
    ] == [
        ("a", "Where?", ("a lake",), GOLD[::-1], GOLD, "hotpotqa"),
        ("b", "Where else?", ("a lake",), GOLD[1:], GOLD, "musique"),
        ("h0", claim, ("yes",), (Passage(title="Ada Berg"),), (), ""),
        ("w0", "Who sails?", ("Ada",), (Passage("doc7", title="Ada Berg"),), (), ""),
    ]
    assert GOLD[0].whole == "J. R. R. Lake It is deep. Old."


# ---------------------------------------------------------------- questions taken apart


def questions(config: DataConfig, max_hops: int = 4) -> Any:
    return load_questions(config, config, taken_apart=True, max_hops=max_hops)[:2]


def test_questions_of_files_with_their_decompositions(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        record = record_of("musique", split, f"{split}?", "Norway", PARAGRAPHS, [0, 2])
        for step, text in zip(record["question_decomposition"], ("Ada?", "Where is #1 ?")):
            step |= {"question": text, "answer": "Oslo" if text == "Ada?" else "Norway"}
        write_lines(tmp_path / f"{split}.jsonl", [record])
    _, (question,) = questions(DataConfig(path=str(tmp_path), sources={"musique": 1.0}))
    assert question.hops[1].filled(["Oslo"]) == "Where is Oslo ?"
    assert [page.whole for page in question.gold] == ["Dusk By Ada.", "Ada Born in Oslo."]
    for source, path in (("hotpotqa", "a"), ("musique", "")):  # without decompositions, or files
        with pytest.raises(InputError, match=source):
            questions(DataConfig(path=path, sources={source: 1.0}))
    # Of the invented world those with few enough hops.
    chains = DataConfig(path=worlds.path_of("chains"), sources={"own": 1.0})
    few, _ = questions(chains, max_hops=2)
    assert {len(each.hops) for each in few} == {2}
    with pytest.raises(InputError, match="max_hops"):
        questions(chains, max_hops=1)
