"""Long documents: stories or needles among background sentences, the same at every access.

Story files go round, and are damaged, in tests/conformance/test_sources.py.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.data.long_docs import (
    DEV_SHARE,
    PRESETS,
    RUN,
    SHARED,
    BabilongConfig,
    DocumentsConfig,
    NiahConfig,
    Noise,
    Shelf,
    babilong_documents,
    find_story_file,
    niah_documents,
    noise,
    read_stories,
    stories,
)
from qrag_jax.data.sample import SPLITS, Sample, Split, drawn
from qrag_jax.data.sources import BABILONG, sentences_of
from qrag_jax.errors import InputError

# ---------------------------------------------------------------- stories

TEXT = """\
1 Ada went to the hall.
2 Ada got the lamp there.
3 Where is Ada? \thall\t1
4 Ada moved to the yard.
5 Where is the lamp? \tyard\t4 2
1 Bo is in the hall.
2 Where is Bo?\thall\t1
"""
FACTS = ("Ada went to the hall.", "Ada got the lamp there.", "Ada moved to the yard.")


def test_one_story_a_question(tmp_path: Path) -> None:
    expected = [
        Sample("", "Where is Ada?", FACTS[:2], (0,), ("hall",), BABILONG),
        Sample("", "Where is the lamp?", FACTS, (1, 2), ("yard",), BABILONG),  # named "4 2"
        Sample("", "Where is Bo?", ("Bo is in the hall.",), (0,), ("hall",), BABILONG),
    ]
    windows = "\ufeff" + TEXT.replace("\n", "\r\n") + "\r\n"
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_bytes(windows.encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    for path in tmp_path.iterdir():
        assert read_stories(path) == expected


def test_the_story_file_of_a_split(tmp_path: Path) -> None:
    (tmp_path / "babi").mkdir()  # under a parent that several sources share
    for task, split, name, part in (
        ("qa11", "dev", "qa11_test.txt.gz", "test"),
        ("qa11", "dev", "qa11_valid.txt", "valid"),  # goes before the test
        ("qa1", "train", "qa1_single-supporting-fact_train.txt", "train"),
        ("qa2", "train", "babi/qa2_train.txt", "train"),
    ):
        (tmp_path / name).touch()
        assert find_story_file(tmp_path, task, split) == (tmp_path / name, part)
    with pytest.raises(InputError, match=r"qa2_train\.txt"):  # no question in it
        read_stories(tmp_path / "babi" / "qa2_train.txt")
    with pytest.raises(InputError, match=r"qa1_valid\.txt"):
        stories(BabilongConfig(task="qa1", stories=str(tmp_path)), "dev")


def story_config(**fields: Any) -> BabilongConfig:
    return BabilongConfig(**{"chunks": 12, "train": 20, "dev": 10} | fields)


def story_documents(*args: Any, **fields: Any) -> Any:
    return babilong_documents(*args, **fields).samples


def needle_documents(preset: str, *args: Any) -> Any:
    return niah_documents(NiahConfig(preset, chunks=30, train=8, dev=5), *args).samples


def test_facts_stand_in_order_among_noise(tmp_path: Path) -> None:
    (tmp_path / "qa2_train.txt").write_text(TEXT)
    (tmp_path / "qa2_valid.txt").write_text(TEXT)
    settings = story_config(task="qa2", stories=str(tmp_path))
    samples = story_documents(settings, "train")
    assert [s.id for s in samples] == ["qa2-train-0", "qa2-train-1", "qa2-train-2"]
    sample = samples[1]
    assert (sample.question, sample.answers) == ("Where is the lamp?", ("yard",))
    assert len(sample.chunks) == 12
    assert [text for text in sample.chunks if text.startswith("Ada ")] == [*FACTS]
    assert [sample.chunks[i] for i in sample.support] == [*FACTS[1:]]
    pool = set(noise(DocumentsConfig(), "train", 12).sentences)
    assert sum(text in pool for text in sample.chunks) == 9
    assert story_documents(settings, "dev")[0].id == "qa2-valid-0"
    # Stories that are too long are left out and counted.
    documents, *_, line = babilong_documents(dataclasses.replace(settings, chunks=2), "train")
    assert [s.id for s in documents] == ["qa2-train-0", "qa2-train-2"]
    assert "2 of 3" in line
    assert documents[0].chunks == FACTS[:2]  # no noise at all
    fewer = dataclasses.replace(settings, chunks=50, most_facts=1)
    assert [s.id for s in story_documents(fewer, "train", count=5)] == ["qa2-train-2"]


@pytest.mark.parametrize("task", ["qa2", "needles"])
def test_documents_of_every_length_ask_the_same(task: str) -> None:
    lengths, settings = (32, 50, 3000), story_config(task=task, dev=60, most_facts=12)
    if task == "needles":
        sets = [needle_documents("multivalue", "dev", chunks) for chunks in lengths]
    else:
        sets = [story_documents(settings, "dev", chunks, 4) for chunks in lengths]
    for versions in zip(*sets, strict=True):
        assert [len(s.chunks) for s in versions] == list(lengths)
        assert len({frozenset(s.chunks[i] for i in s.support) for s in versions}) == 1
        assert len({(s.id, s.question, s.answers) for s in versions}) == 1


def test_an_epoch_draws_other_noise_and_places_for_the_same_story() -> None:
    settings = story_config(task="qa2", chunks=40)
    train, again = (story_documents(settings, "train") for _ in range(2))
    other = story_documents(dataclasses.replace(settings, seed=1), "train")
    assert other[7].chunks != train[7].chunks
    for number in range(20):
        epochs = [drawn(train, number, epoch) for epoch in range(3)]
        assert epochs == [drawn(again, number, epoch) for epoch in range(3)]
        facts = stories(settings, "train")[2][number].chunks
        for sample in epochs:
            assert [text for text in sample.chunks if text in facts] == [*facts]
        assert len({(s.id, s.question, s.answers) for s in epochs}) == 1
        assert len({tuple(s.chunks[i] for i in s.support) for s in epochs}) == 1
        assert len({frozenset(s.chunks) for s in epochs}) == 3
        assert len({tuple(text in facts for text in s.chunks) for s in epochs}) == 3
    dev = story_documents(settings, "dev")
    once = story_documents(dataclasses.replace(settings, redraw=False), "train")
    assert all(drawn(every, 3, 1) == every[3] for every in (dev, once))  # what is scored stays


# ---------------------------------------------------------------- needles

NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def needles(sample: Sample) -> dict[int, tuple[str, ...]]:
    """Place → (type, key, value) of every needle of a document."""
    found = {i: NEEDLE.fullmatch(text) for i, text in enumerate(sample.chunks)}
    return {i: match.groups() for i, match in found.items() if match}


@pytest.mark.parametrize("preset", PRESETS)
def test_support_is_what_is_asked_for(preset: str) -> None:
    knobs = PRESETS[preset]
    for sample in needle_documents(preset, "train"):
        found = needles(sample)
        query = re.fullmatch(r"What .* for (.*) mentioned in the provided text\?", sample.question)
        asked = set(re.split(r", and |, | and ", query[1]))
        meant = {place for place, (_, key, _) in found.items() if key in asked}
        assert set(sample.support) == meant
        assert (len(sample.chunks), len(asked)) == (30, knobs.queries)
        assert len(meant) == knobs.queries * knobs.values == len({found[i][2] for i in meant})
        assert set(sample.answers) == {found[i][2] for i in meant}
        assert {kind for kind, _, _ in found.values()} == {knobs.value_type}
        total = 30 if knobs.haystack == "needle" else knobs.keys * knobs.values
        assert len(found) == total
        assert len({key for _, key, _ in found.values()}) == total // knobs.values
        is_uuid = knobs.key_type == "uuids"
        assert all((len(key) == 36) == is_uuid for _, key, _ in found.values())


# ---------------------------------------------------------------- background sentences


def shelf(folder: Path, sizes: dict[str, int]) -> str:
    """A folder of books, of so many sentences each."""
    for name, size in sizes.items():
        book = " ".join(f"Sentence {i} of {name} is here." for i in range(size))
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(book.encode()))
    return str(folder)


def test_sentences_of_books() -> None:
    for text, expected in {
        "“Go home.” he said.": "Go home.|he said.",
        "* *\n\n 12. 13.\n\nMr. Fox ran.": "Mr. Fox ran.",
        # Single quotation marks do not hold sentences together.
        "‘Come in. Sit,’ he said. 'No.' So be it.": "‘Come in.|Sit,’ he said.|'No.|So be it.",
    }.items():
        assert sentences_of(text) == expected.split("|")


@pytest.mark.parametrize("repeats", [1, 5])
def test_no_sentence_is_drawn_too_often(repeats: int) -> None:
    def draw(sizes: list[int], count: int, repeats: int) -> np.ndarray:
        return Shelf(np.cumsum([0, *sizes])).draw(np.random.default_rng(count), count, repeats)

    books = [10, 400, 1, 89]
    for count in (0, 99, 500 * repeats):
        used = collections.Counter(draw(books, count, repeats).tolist())
        assert used.total() == count
        assert not used or max(used.values()) <= repeats
    assert set(used.values()) == {repeats}
    assert {*draw([3, 2], 1000, 0).tolist()} == {*range(5)}  # any number of times
    # Runs of neighbours, begun in any book as often as in another, hardly ever longer than `RUN`.
    places = draw([40_000, 10_000], 10_000, repeats)
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    assert sum(len(run) > RUN for run in runs) <= 2
    assert len(places) / len(runs) > 50
    assert abs(np.mean([run[0] < 40_000 for run in runs]) - 0.5) < 0.2


def test_no_book_is_in_both_splits(tmp_path: Path) -> None:
    path = shelf(tmp_path, {"a": 50, "b": 300, "c": 120, "d": 20, "e": 90})
    parts: dict[Split, Noise] = {
        s: noise(DocumentsConfig(noise=path), s, 100) for s in ("train", "dev")
    }
    books = {split: {text.split()[3] for text in pool.sentences} for split, pool in parts.items()}
    assert books["train"] | books["dev"] == set("abcde")
    assert not books["train"] & books["dev"]
    assert abs(len(parts["dev"].sentences) / 580 - DEV_SHARE) < 0.1
    # Whatever else is asked for.
    other = noise(DocumentsConfig(noise=path, seed=5), "dev", 3).sentences
    assert other.tolist() == parts["dev"].sentences.tolist()


def test_invented_sentences_of_the_splits_are_disjoint() -> None:
    for repeats in (1, 0):
        config = DocumentsConfig(noise_repeats=repeats)
        train, dev = noise(config, "train", 6000), noise(config, "dev", 9000, 6000)
        assert not set(train.sentences) & set(dev.sentences)
        assert dev.left_out > 0
        assert len(dev.sentences) >= (9000 if repeats else 1)
    before = noise(DocumentsConfig(noise_dev=SHARED), "dev", 4000)  # all are dev's
    assert (before.left_out, len(before.sentences)) == (0, 5000)
    # In documents, too.
    settings = story_config(chunks=20, train=60)
    train_pool = set(noise(settings, "train", 20).sentences)
    facts = {fact for split in SPLITS for s in stories(settings, split)[2] for fact in s.chunks}
    seen = {text for s in story_documents(settings, "train") for text in s.chunks}
    assert seen - facts <= train_pool
    for length in (20, 500):
        for sample in story_documents(settings, "dev", length):
            assert not (set(sample.chunks) - facts) & train_pool
