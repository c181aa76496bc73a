"""BABILong documents: facts in order among noise, the same at every access and every length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from qrag_jax.data.long_docs import BabilongConfig, babilong_documents, stories
from qrag_jax.data.noise import SHARED, NoiseConfig, noise
from qrag_jax.data.sample import SPLITS, drawn
from qrag_jax.errors import InputError


def documents(*args, **fields):
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


def config(**fields) -> BabilongConfig:
    return BabilongConfig(**{"chunks": 12, "train": 20, "dev": 10} | fields)


def test_facts_stand_in_order_among_noise(tmp_path: Path) -> None:
    settings = config(task="qa2", stories=folder(tmp_path))
    made = documents(settings, "train")
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
    pool = set(noise(NoiseConfig(), "train", 12).sentences)
    assert sum(text in pool for text in last.chunks) == 9
    assert [s.id for s in documents(settings, "dev")] == ["qa2-valid-0"]


def test_the_same_stories_at_every_length() -> None:
    lengths = (12, 50, 3000)
    for task in ("qa1", "qa2", "qa4"):
        settings = config(task=task, dev=60, most_facts=12)
        sets = [documents(settings, "dev", chunks, 4) for chunks in lengths]
        for versions in zip(*sets, strict=True):
            assert [len(s.chunks) for s in versions] == list(lengths)
            facts = [[s.chunks[i] for i in s.support] for s in versions]
            assert facts[0] == facts[1] == facts[2]
            assert len({(s.id, s.question, s.answers) for s in versions}) == 1


def test_stories_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    settings = config(task="qa2", stories=folder(tmp_path), chunks=2)
    made, _, line = babilong_documents(settings, "train")
    assert [s.id for s in made] == ["qa2-train-0", "qa2-train-1"]
    assert "2 of 3" in line
    assert made[1].chunks == ("Bo moved to the yard.", "Bo got the lamp.")  # no noise at all
    fewer = dataclasses.replace(settings, chunks=50, most_facts=1)
    made, _, line = babilong_documents(fewer, "train", count=5)
    assert [s.id for s in made] == ["qa2-train-0"]
    assert len(documents(config(), "train", count=3)) == 3
    # Changed files are read again.
    (tmp_path / "qa2_train.txt").write_text(LONG)
    with pytest.raises(InputError, match="1 chunks"):
        documents(dataclasses.replace(settings, chunks=1), "train")


def test_what_cannot_be_drawn_from_is_refused(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for fields in ({"task": "qa7"}, {"task": "qa7x", "stories": folder(tmp_path)}):
        with pytest.raises(InputError, match=f"'{fields['task']}'"):
            documents(config(**fields), "train")
    with pytest.raises(InputError, match="books"):
        documents(config(noise=str(books)), "train")
    (books / "a.txt").write_text("One here. Two here. Three here.")
    both = {"noise": str(books), "noise_dev": SHARED}
    for fields in ({"noise": str(books)}, both):  # one book for two splits; too few sentences
        with pytest.raises(InputError, match="books"):
            documents(config(**fields), "train")
    # Where every story leaves little room for noise, few sentences are enough.
    assert len(documents(config(**both, task="qa4", chunks=5), "dev")) == 10


def test_no_sentence_of_a_dev_document_is_in_the_noise_of_training() -> None:
    settings = config(chunks=20, train=60)
    seen = {text for s in documents(settings, "train") for text in s.chunks}
    pool = set(noise(settings.background, "train", 20).sentences)
    facts = {fact for split in SPLITS for s in stories(settings, split).items for fact in s.facts}
    assert seen - facts <= pool
    for length in (20, 500):
        for sample in documents(settings, "dev", length):
            assert not (set(sample.chunks) - facts) & pool


def test_an_epoch_draws_other_noise_and_places_for_the_same_story() -> None:
    settings = config(task="qa2", chunks=40)
    train, dev = documents(settings, "train"), documents(settings, "dev")
    again, other = (
        documents(settings, "train"),
        documents(dataclasses.replace(settings, seed=1), "train"),
    )
    assert other[7].chunks != train[7].chunks
    for number in range(20):
        epochs = [drawn(train, number, epoch) for epoch in range(3)]
        assert epochs[0] == train[number]
        told = stories(settings, "train").items[number].facts
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
    once = documents(dataclasses.replace(settings, redraw=False), "train")
    assert drawn(once, 3, 1) == once[3]
