"""Background sentences: the split, the draws and their limits, the invented default."""

from __future__ import annotations

import collections
import gzip
import time
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.data.noise import RUN, Noise, noise, sentences_of
from qrag_jax.errors import InputError
from tests.data.real_data import real


def book(name: str, count: int) -> str:
    return " ".join(f"Sentence {i} of {name} is here." for i in range(count))


def shelf(folder: Path, sizes: dict[str, int]) -> str:
    for name, size in sizes.items():
        (folder / f"{name}.txt.gz").write_bytes(gzip.compress(book(name, size).encode()))
    return str(folder)


def pool_of(sizes: list[int]) -> Noise:
    starts = np.cumsum([0, *sizes])
    return Noise("x", np.array([f"s{i}" for i in range(starts[-1])], object), starts)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_sentences() -> None:
    text = (
        '“Go home.” he said.\nShe   asked, "Why? I\nlive here." * * *\n\n 12. 13.\n\nMr. Fox ran.'
    )
    assert sentences_of(text) == [
        "Go home.",
        "he said.",
        "She asked, Why?",
        "I live here.",
        "Mr. Fox ran.",
    ]


def test_single_quotation_marks_do_not_hold_sentences_together() -> None:
    text = "'Tis late. The wind 'gan to blow. ‘Come in. Sit,’ he said. It is Ada's. 'No.' So it is."
    assert sentences_of(text) == [
        "'Tis late.",
        "The wind 'gan to blow.",
        "‘Come in.",
        "Sit,’ he said.",
        "It is Ada's.",
        "'No.",
        "So it is.",
    ]


def test_books_of_a_folder(tmp_path: Path) -> None:
    path = shelf(tmp_path, {"b": 3, "a": 2})
    (tmp_path / "c.txt").write_text(" \n 17 \n")  # no sentence: not a book to draw from
    pool = noise(path, "train", 1, 1, 0)
    assert pool.starts.tolist() == [0, 2, 5]
    assert pool.sentences[2] == "Sentence 0 of b is here."
    assert noise(path, "dev", 1, 1, 7).sentences is pool.sentences  # split once
    (tmp_path / "d.txt").write_text("One more.")
    assert noise(path, "train", 1, 1, 0).starts.tolist() == [0, 2, 5, 6]


def runs_of(places: np.ndarray, pool: Noise) -> list[tuple[int, int]]:
    """(first place, length) of the stretches of consecutive places of one book."""
    book_of = np.searchsorted(pool.starts, places, side="right")
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(book_of) != 0)) + 1
    return [(int(part[0]), len(part)) for part in np.split(places, breaks)]


def test_draws_are_runs_from_all_books() -> None:
    pool = pool_of([400, 30, 5000])
    places = pool.draw(rng(), 3000, 0)
    assert len(places) == 3000
    runs = runs_of(places, pool)
    # Two runs drawn one after the other may happen to join: hardly ever.
    assert sum(length > RUN for _, length in runs) <= 1
    assert sorted(length for _, length in runs)[len(runs) // 2] > 25
    books = np.searchsorted(pool.starts, [first for first, _ in runs], side="right")
    shares = np.bincount(books, minlength=4)[1:] / len(runs)
    assert (np.abs(shares - 1 / 3) < 0.2).all()  # books, not sentences, are as likely


def test_draws_differ_by_seed_alone() -> None:
    pool = pool_of([400, 300])
    assert (pool.draw(rng(1), 200) == pool.draw(rng(1), 200)).all()
    assert (pool.draw(rng(1), 200) != pool.draw(rng(2), 200)).any()
    assert len(pool.draw(rng(1), 0)) == 0


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_no_place_is_used_too_often(repeats: int) -> None:
    pool = pool_of([10, 400, 1, 89])
    for count in (1, 99, 500 * repeats - 1, 500 * repeats):
        used = collections.Counter(pool.draw(rng(count), count, repeats).tolist())
        assert used.total() == count
        assert max(used.values()) <= repeats
    assert set(used.values()) == {repeats}
    # An early stop of a run is rare as long as much is free.
    few = pool_of([100_000]).draw(rng(), 10_000, repeats)
    assert len(few) / len(runs_of(few, pool_of([100_000]))) > 60


def test_any_number_of_repeats() -> None:
    pool = pool_of([3, 2])
    assert set(pool.draw(rng(), 1000, 0).tolist()) == set(range(5))


def test_four_hundred_thousand_in_a_moment() -> None:
    pool = pool_of([5000] * 16)
    started = time.perf_counter()
    pool.draw(rng(), 400_000, 5)  # every sentence five times
    assert time.perf_counter() - started < 1


def test_too_few_sentences(tmp_path: Path) -> None:
    path = shelf(tmp_path, {"a": 20, "b": 30})
    noise(path, "train", 100, 2, 0)
    with pytest.raises(InputError) as caught:
        noise(path, "train", 101, 2, 0, "niah")
    message = str(caught.value)
    assert message.startswith(f"the noise of {path} gives 100 sentences (50, each 2 times at most)")
    assert "asks for 101; add books, lower the number of chunks, or raise" in message
    assert "config.data.niah.noise_repeats" in message
    assert "\n" not in message
    with pytest.raises(InputError, match="asks for 51"):
        noise(path, "train", 50, 1, 0).draw(rng(), 51)


def test_bad_folders(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("None here.")
    with pytest.raises(InputError, match=r"the noise folder .* has no books; put .txt or"):
        noise(str(tmp_path), "train", 1, 1, 0)
    (tmp_path / "a.txt").write_text(" 1 2 3 \n")
    with pytest.raises(InputError, match="have no sentence; add others"):
        noise(str(tmp_path), "train", 1, 1, 0)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"b.txt, line 1, is not UTF-8"):
        noise(str(tmp_path), "train", 1, 1, 0)
    with pytest.raises(InputError, match="does not exist"):
        noise(str(tmp_path / "none"), "train", 1, 1, 0)


def test_invented_sentences() -> None:
    pool = noise("", "train", 4000, 1, 0)
    assert len(pool.sentences) == 5000
    assert all(text.endswith((".", "?", "!")) for text in pool.sentences)
    assert len(set(pool.sentences)) > 0.9 * len(pool.sentences)
    more = noise("", "train", 8000, 1, 0)
    assert len(more.sentences) == 10_000
    assert (more.sentences[:5000] == pool.sentences).all()
    assert len(noise("", "train", 8000, 0, 0).sentences) == 5000
    # Only what names nothing ("She plays chess on Sundays.") is said in other worlds too.
    for other in (noise("", "dev", 4000, 1, 0), noise("", "train", 4000, 1, 1)):
        shared = set(pool.sentences) & set(other.sentences)
        assert len(shared) < 0.05 * len(pool.sentences)


def test_real_books() -> None:
    pool = noise(str(real("gutenberg")), "dev", 40_000, 1, 0)
    assert 60_000 < len(pool.sentences) < 80_000
    assert len(pool.starts) == 18
    assert not any(mark in text for text in pool.sentences for mark in '"“”\n')
    words = np.array([len(text.split()) for text in pool.sentences])
    assert 8 <= np.median(words) <= 25
    assert words.max() < 1500  # a list in a poem; not pages between two apostrophes
    started = time.perf_counter()
    assert len(pool.draw(rng(), 400_000, 6)) == 400_000
    assert time.perf_counter() - started < 1
