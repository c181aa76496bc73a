"""Generated haystacks: RULER's knobs, the right needles, any length, the same at every access."""

from __future__ import annotations

import re

import numpy as np
import pytest

from qrag_jax.data.long_docs import (
    FILLER,
    FIRST,
    PRESETS,
    SECOND,
    NiahConfig,
    distinct,
    niah_documents,
)
from qrag_jax.data.noise import SHARED, NoiseConfig, noise
from qrag_jax.data.sample import drawn
from qrag_jax.errors import InputError


def documents(*args, **fields):
    return niah_documents(*args, **fields).samples


NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")


def config(preset: str, **fields) -> NiahConfig:
    return NiahConfig(preset, **{"chunks": 30, "train": 8, "dev": 5} | fields)


def needles(sample) -> dict[int, tuple[str, ...]]:
    """Place → (type, key, value) of every needle of a document."""
    found = {i: NEEDLE.fullmatch(text) for i, text in enumerate(sample.chunks)}
    return {i: match.groups() for i, match in found.items() if match}


def asked(sample) -> set[str]:
    query = re.fullmatch(r"What .* for (.*) mentioned in the provided text\?", sample.question)
    return set(re.split(r", and |, | and ", query[1]))


@pytest.mark.parametrize("preset", PRESETS)
def test_support_is_what_is_asked_for(preset: str) -> None:
    knobs = PRESETS[preset]
    for sample in documents(config(preset), "train"):
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


def test_what_the_needles_lie_in(tmp_path) -> None:
    repeated = documents(config("single_1"), "train")[0]
    hay = [text for text in repeated.chunks if not NEEDLE.fullmatch(text)]
    assert hay == (list(FILLER) * 6)[:29]
    pool = set(noise(NoiseConfig(), "train", 26).sentences)
    essay = documents(config("multivalue"), "train")[0]
    assert sum(text in pool for text in essay.chunks) == 26
    places = [i for s in documents(config("multivalue", train=200), "train") for i in s.support]
    assert {*places} == {*range(30)}
    # Knobs go before the preset.
    sample = documents(config("multiquery", queries=2, keys=6), "dev")[0]
    assert len(asked(sample)) == len(sample.support) == 2
    assert len(needles(sample)) == 6
    (long,) = documents(config("multivalue", chunks=0, tokens=2000), "train", count=1)
    assert 0.6 < sum(len(text) + 1 for text in long.chunks) / 4 / 2000 < 1.6
    with pytest.raises(InputError, match="11 chunks"):
        documents(config("multivalue", keys=3), "train", 11)
    (tmp_path / "a.txt").write_text("One here. Two here. Three here.")
    with pytest.raises(InputError, match=str(tmp_path)):
        documents(config("single_2", noise=str(tmp_path), noise_dev=SHARED), "train")


@pytest.mark.parametrize("preset", PRESETS)
def test_an_epoch_draws_another_haystack_around_the_same_needles(preset: str) -> None:
    train = documents(config(preset), "train")
    epochs = [[drawn(train, i, epoch).chunks for i in range(8)] for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for number in range(8):
        first, second = drawn(train, number, 0), drawn(train, number, 1)
        assert first == train[number]
        assert (first.question, first.answers) == (second.question, second.answers)
        texts = [{s.chunks[i] for i in s.support} for s in (first, second)]
        assert texts[0] == texts[1]
        assert sorted(needles(first).values()) == sorted(needles(second).values())
    fixed = documents(config(preset, redraw=False), "train")
    assert drawn(fixed, 3, 1) == fixed[3]


@pytest.mark.parametrize("preset", PRESETS)
def test_dev_documents_of_every_length_ask_the_same(preset: str) -> None:
    short, long = (documents(config(preset), "dev", length) for length in (20, 300))
    for one, other in zip(short, long, strict=True):
        assert (one.question, one.answers) == (other.question, other.answers)
        assert [len(one.chunks), len(other.chunks)] == [20, 300]
        texts = [{s.chunks[i] for i in s.support} for s in (one, other)]
        assert texts[0] == texts[1]
        assert len(set(needles(other).values())) == len(needles(other))


FORMS = {"words": r"[a-z]+-[a-z]+(-[a-z]+)?", "numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f-]{36}"}


def draw(kind: str, count: int, seed: int = 0) -> list[str]:
    return distinct(kind, np.random.default_rng(seed), count)


@pytest.mark.parametrize("kind", FORMS)
def test_distinct_and_well_formed(kind: str) -> None:
    for count in (0, 1, 2000):
        texts = draw(kind, count)
        assert len(set(texts)) == len(texts) == count
        assert all(re.fullmatch(FORMS[kind], text) for text in texts)
        assert draw(kind, count) == texts
    assert draw(kind, count, seed=1) != texts


def test_words_grow_when_pairs_run_out() -> None:
    pairs = len(FIRST) * len(SECOND)
    assert len({*FIRST, *SECOND}) == len(FIRST) + len(SECOND)
    assert {text.count("-") for text in draw("words", pairs)} == {1}
    assert {text.count("-") for text in draw("words", pairs + 1)} == {2}
    with pytest.raises(InputError, match=r"config\.data"):
        draw("words", pairs * len(FIRST) + 1)
