"""Background sentences: the split, the draws and their limits, the invented default."""

from __future__ import annotations

import collections
import gzip
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.data.noise import (
    DEV_SHARE,
    RUN,
    SHARED,
    DocumentsConfig,
    Noise,
    Shelf,
    noise,
    sentences_of,
)
from qrag_jax.data.sample import Split


def book(name: str, count: int) -> str:
    return " ".join(f"Sentence {i} of {name} is here." for i in range(count))


def shelf(folder: Path, sizes: dict[str, int]) -> str:
    for name, size in sizes.items():
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(book(name, size).encode()))
    return str(folder)


def pool_of(sizes: list[int]) -> Noise:
    starts = np.cumsum([0, *sizes])
    return Noise("x", np.array([f"s{i}" for i in range(starts[-1])], object), Shelf(starts))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_sentences() -> None:
    text = '“Go home.” he said.\nShe   asked, "Why? I\nlive here." * *\n\n 12. 13.\n\nMr. Fox ran.'
    assert sentences_of(text) == [
        *("Go home.", "he said.", "She asked, Why?", "I live here.", "Mr. Fox ran.")
    ]
    # Single quotation marks do not hold sentences together.
    text = "'Tis late. The wind 'gan to blow. ‘Come in. Sit,’ he said. It is Ada's. 'No.' So be it."
    assert sentences_of(text) == [
        *("'Tis late.", "The wind 'gan to blow.", "‘Come in.", "Sit,’ he said."),
        *("It is Ada's.", "'No.", "So be it."),
    ]


@pytest.mark.parametrize("repeats", [1, 5])
def test_no_place_is_used_too_often(repeats: int) -> None:
    pool = pool_of([10, 400, 1, 89])
    for count in (0, 1, 99, 500 * repeats - 1, 500 * repeats):
        used = collections.Counter(pool.shelf.draw(rng(count), count, repeats).tolist())
        assert used.total() == count
        assert not used or max(used.values()) <= repeats
    assert set(used.values()) == {repeats}
    assert (pool.shelf.draw(rng(1), 200) == pool.shelf.draw(rng(1), 200)).all()
    assert (pool.shelf.draw(rng(1), 200) != pool.shelf.draw(rng(2), 200)).any()
    assert set(pool_of([3, 2]).shelf.draw(rng(), 1000, 0).tolist()) == set(
        range(5)
    )  # of any number
    # Runs of neighbours, begun in any book as often as in another, hardly ever longer than `RUN`.
    starts = np.array([0, 40_000, 50_000])
    places = pool_of([40_000, 10_000]).shelf.draw(rng(), 10_000, repeats)
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    assert sum(len(run) > RUN for run in runs) <= 2
    assert len(places) / len(runs) > 50
    books = np.searchsorted(starts, [run[0] for run in runs], side="right")
    assert abs(np.mean(books == 1) - 0.5) < 0.2


def test_no_book_is_in_both_splits(tmp_path: Path) -> None:
    path = shelf(tmp_path, {"a": 50, "b": 300, "c": 120, "d": 20, "e": 90})
    parts: dict[Split, Noise] = {
        s: noise(DocumentsConfig(noise=path), s, 100) for s in ("train", "dev")
    }
    books = {split: {text.split()[3] for text in pool.sentences} for split, pool in parts.items()}
    assert books["train"] | books["dev"] == set("abcde")
    assert not books["train"] & books["dev"]
    sizes = {split: len(pool.sentences) for split, pool in parts.items()}
    assert sizes["train"] + sizes["dev"] == 580
    assert abs(sizes["dev"] / 580 - DEV_SHARE) < 0.1
    # The same whenever it is asked, and whatever else is.
    assert noise(DocumentsConfig(noise=path, seed=5), "dev", 3).sentences.tolist() == list(
        parts["dev"].sentences
    )


def test_invented_worlds_of_the_splits_share_no_sentence() -> None:
    pool, more = noise(DocumentsConfig(), "train", 4000), noise(DocumentsConfig(), "train", 8000)
    assert (len(pool.sentences), len(more.sentences)) == (5000, 10_000)
    assert (more.sentences[:5000] == pool.sentences).all()
    assert len(set(pool.sentences)) > 0.9 * len(pool.sentences)
    for repeats in (1, 0):
        config = DocumentsConfig(noise_repeats=repeats)
        train, dev = noise(config, "train", 6000), noise(config, "dev", 9000, 6000)
        assert not set(train.sentences) & set(dev.sentences)
        assert dev.left_out > 0
        assert len(dev.sentences) >= (9000 if repeats else 1)
    before = noise(DocumentsConfig(noise_dev=SHARED), "dev", 4000)  # all are dev's
    assert (before.left_out, len(before.sentences)) == (0, 5000)
