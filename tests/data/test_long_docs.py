"""Long documents: facts or needles among noise, the same at every access and every length."""

from __future__ import annotations

import dataclasses
import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.long_docs import (
    PRESETS,
    BabilongConfig,
    NiahConfig,
    Story,
    babilong_documents,
    find_story_file,
    niah_documents,
    read_stories,
    stories,
)
from qrag_jax.data.noise import DocumentsConfig, noise
from qrag_jax.data.sample import SPLITS, Sample, drawn
from qrag_jax.errors import InputError


def story_documents(*args: Any, **fields: Any) -> Any:
    return babilong_documents(*args, **fields).samples


SHORT = "1 Ada went to the hall.\n2 Where is Ada?\thall\t1\n"
LONG = (
    "1 Bo moved to the yard.\n2 Bo got the lamp.\n3 Where is Bo?\tyard\t1\n"
    "4 Bo went to the hall.\n5 Where is the lamp?\thall\t4 2\n"
)


def folder(tmp_path: Path) -> str:
    (tmp_path / "qa2_train.txt").write_text(SHORT + LONG)
    (tmp_path / "qa2_valid.txt").write_text(SHORT)
    return str(tmp_path)


def story_config(**fields: Any) -> BabilongConfig:
    return BabilongConfig(**{"chunks": 12, "train": 20, "dev": 10} | fields)


def test_facts_stand_in_order_among_noise(tmp_path: Path) -> None:
    settings = story_config(task="qa2", stories=folder(tmp_path))
    made = story_documents(settings, "train")
    assert [s.id for s in made] == ["qa2-train-0", "qa2-train-1", "qa2-train-2"]
    last = made[2]
    facts = ["Bo moved to the yard.", "Bo got the lamp.", "Bo went to the hall."]
    assert (last.question, last.answers, last.source) == (
        "Where is the lamp?",
        ("hall",),
        "babilong",
    )
    assert len(last.chunks) == 12
    assert [text for text in last.chunks if text.startswith("Bo ")] == facts
    assert [last.chunks[i] for i in last.support] == facts[1:]  # sorted, though named "4 2"
    pool = set(noise(DocumentsConfig(), "train", 12).sentences)
    assert sum(text in pool for text in last.chunks) == 9
    assert [s.id for s in story_documents(settings, "dev")] == ["qa2-valid-0"]


def test_the_same_stories_at_every_length() -> None:
    lengths = (12, 50, 3000)
    for task in ("qa1", "qa2", "qa4"):
        settings = story_config(task=task, dev=60, most_facts=12)
        sets = [story_documents(settings, "dev", chunks, 4) for chunks in lengths]
        for versions in zip(*sets, strict=True):
            assert [len(s.chunks) for s in versions] == list(lengths)
            facts = [[s.chunks[i] for i in s.support] for s in versions]
            assert facts[0] == facts[1] == facts[2]
            assert len({(s.id, s.question, s.answers) for s in versions}) == 1


def test_stories_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    settings = story_config(task="qa2", stories=folder(tmp_path), chunks=2)
    made, _, line = babilong_documents(settings, "train")
    assert [s.id for s in made] == ["qa2-train-0", "qa2-train-1"]
    assert "2 of 3" in line
    assert made[1].chunks == ("Bo moved to the yard.", "Bo got the lamp.")  # no noise at all
    fewer = dataclasses.replace(settings, chunks=50, most_facts=1)
    made, _, line = babilong_documents(fewer, "train", count=5)
    assert [s.id for s in made] == ["qa2-train-0"]
    assert len(story_documents(story_config(), "train", count=3)) == 3
    # Changed files are read again.
    (tmp_path / "qa2_train.txt").write_text(LONG)
    with pytest.raises(InputError, match="1 chunks"):
        story_documents(dataclasses.replace(settings, chunks=1), "train")


def test_an_epoch_draws_other_noise_and_places_for_the_same_story() -> None:
    settings = story_config(task="qa2", chunks=40)
    train, dev = story_documents(settings, "train"), story_documents(settings, "dev")
    again, other = (
        story_documents(settings, "train"),
        story_documents(dataclasses.replace(settings, seed=1), "train"),
    )
    assert other[7].chunks != train[7].chunks
    for number in range(20):
        epochs = [drawn(train, number, epoch) for epoch in range(3)]
        assert epochs[0] == train[number]
        told = stories(settings, "train")[2][number].facts
        for epoch, sample in enumerate(epochs):
            assert drawn(again, number, epoch) == sample
            assert [text for text in sample.chunks if text in told] == list(told)
            assert sample.support == tuple(sorted(sample.support))
        assert len({(s.id, s.question, s.answers) for s in epochs}) == 1
        assert len({tuple(s.chunks[i] for i in s.support) for s in epochs}) == 1
        noises = [set(s.chunks) - set(told) for s in epochs]
        assert noises[0] != noises[1] != noises[2] != noises[0]
        places = {tuple(i for i, text in enumerate(s.chunks) if text in told) for s in epochs}
        assert len(places) == 3
    assert drawn(dev, 3, 1) == dev[3]  # what is scored stays
    once = story_documents(dataclasses.replace(settings, redraw=False), "train")
    assert drawn(once, 3, 1) == once[3]


def needle_documents(*args: Any, **fields: Any) -> Any:
    return niah_documents(*args, **fields).samples


NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def needle_config(preset: str, **fields: Any) -> NiahConfig:
    return NiahConfig(preset, **{"chunks": 30, "train": 8, "dev": 5} | fields)


def needles(sample: Sample) -> dict[int, tuple[str, ...]]:
    """Place → (type, key, value) of every needle of a document."""
    found = {i: NEEDLE.fullmatch(text) for i, text in enumerate(sample.chunks)}
    return {i: match.groups() for i, match in found.items() if match}


def asked(sample: Sample) -> set[str]:
    query = re.fullmatch(r"What .* for (.*) mentioned in the provided text\?", sample.question)
    return set(re.split(r", and |, | and ", query[1]))


@pytest.mark.parametrize("preset", PRESETS)
def test_support_is_what_is_asked_for(preset: str) -> None:
    knobs = PRESETS[preset]
    for sample in needle_documents(needle_config(preset), "train"):
        found = needles(sample)
        assert len(sample.chunks) == 30
        assert len(asked(sample)) == knobs.queries
        meant = {place for place, (_, key, _) in found.items() if key in asked(sample)}
        assert set(sample.support) == meant
        assert len(meant) == knobs.queries * knobs.values
        values = {found[i][2] for i in meant}
        assert set(sample.answers) == values
        assert len(values) == len(meant)
        assert {kind for kind, _, _ in found.values()} == {knobs.value_type}
        assert ("What is the" in sample.question) == (len(meant) == 1)
        total = 30 if knobs.haystack == "needle" else knobs.keys * knobs.values
        assert len(found) == total
        assert len({key for _, key, _ in found.values()}) == total // knobs.values
        is_uuid = knobs.key_type == "uuids"
        assert all((len(key) == 36) == is_uuid for _, key, _ in found.values())


def test_no_sentence_of_a_dev_document_is_in_the_noise_of_training() -> None:
    settings = story_config(chunks=20, train=60)
    seen = {text for s in story_documents(settings, "train") for text in s.chunks}
    pool = set(noise(settings, "train", 20).sentences)
    facts = {fact for split in SPLITS for s in stories(settings, split)[2] for fact in s.facts}
    assert seen - facts <= pool
    for length in (20, 500):
        for sample in story_documents(settings, "dev", length):
            assert not (set(sample.chunks) - facts) & pool


def test_dev_documents_of_every_length_ask_the_same() -> None:
    short, long = (needle_documents(needle_config("multivalue"), "dev", n) for n in (20, 300))
    for one, other in zip(short, long, strict=True):
        assert (one.question, one.answers) == (other.question, other.answers)
        assert {one.chunks[i] for i in one.support} == {other.chunks[i] for i in other.support}


TEXT = """\
1 Ada went to the hall.
2 Ada got the lamp there.
3 Where is Ada? \thall\t1
4 Ada moved to the yard.
5 Where is the lamp? \tyard\t4 2
1 Bo is in the hall.
2 Where is Bo?\thall\t1
"""


def write(folder: Path, text: str, name: str = "qa1_train.txt") -> Path:
    path = folder / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_one_story_a_question(tmp_path: Path) -> None:
    one, two = "Ada went to the hall.", "Ada got the lamp there."
    expected = [
        Story((one, two), "Where is Ada?", "hall", (0,)),
        Story((one, two, "Ada moved to the yard."), "Where is the lamp?", "yard", (2, 1)),
        Story(("Bo is in the hall.",), "Where is Bo?", "hall", (0,)),
    ]
    assert read_stories(write(tmp_path, TEXT)) == expected
    assert read_stories(write(tmp_path, TEXT, "a.txt.gz")) == expected
    windows = "\ufeff" + TEXT.replace("\n", "\r\n") + "\r\n"
    assert read_stories(write(tmp_path, windows)) == expected


def test_file_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "babi").mkdir()  # under a parent that several sources share
    for task, split, name, part in (
        ("qa11", "train", "qa11_train.txt", "train"),
        ("qa11", "dev", "qa11_test.txt.gz", "test"),
        ("qa11", "dev", "qa11_valid.txt", "valid"),  # goes before the test
        ("qa1", "train", "qa1_single-supporting-fact_train.txt", "train"),
        ("qa2", "train", "babi/qa2_train.txt", "train"),
    ):
        path = write(tmp_path, TEXT, name)
        assert find_story_file(tmp_path, task, split) == (path, part)


def test_bad_lines_are_named(tmp_path: Path) -> None:
    for text, line in (
        ("Ada went.\n", "1"),
        ("1 Ada went.\n2\n", "2"),
        ("2 Ada went.\n", "1"),
        ("1 A.\n2 B.\n2 C.\n", "3"),
        ("1 A.\n2 Where is A?\n", "2"),
        ("1 A.\n2 Where is A?\t\t1\n", "2"),
        ("1 A.\n2 \thall\t1\n", "2"),
        ("1 A.\n2 Where?\thall\t2\n", "2"),
        (TEXT + "3 Where?\thall\t2\n", "8"),
        ("1 Ada went.\n", ""),
    ):
        path = write(tmp_path, text)
        with pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{line}"):
            read_stories(path)
    for task, named in (("qa1", r"qa1_valid\.txt"), ("qa21", "'qa21'")):
        with pytest.raises(InputError, match=named):
            stories(BabilongConfig(task=task, stories=str(tmp_path)), "dev")
