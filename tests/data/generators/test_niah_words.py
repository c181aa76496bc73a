"""What needles hide: distinct, of the right form, the same for the same seed."""

from __future__ import annotations

import re
import uuid

import numpy as np
import pytest

from qrag_jax.data.generators.niah_words import FIRST, SECOND, distinct
from qrag_jax.errors import InputError

FORMS = {"words": r"[a-z]+-[a-z]+(-[a-z]+)?", "numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f-]{36}"}


def draw(kind: str, count: int, seed: int = 0) -> list[str]:
    return distinct(kind, np.random.default_rng(seed), count)


def test_lists_have_no_word_twice() -> None:
    assert len({*FIRST, *SECOND}) == len(FIRST) + len(SECOND)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("count", [0, 1, 500, 20_000])
def test_distinct_and_well_formed(kind: str, count: int) -> None:
    texts = draw(kind, count)
    assert len(set(texts)) == len(texts) == count
    assert all(re.fullmatch(FORMS[kind], text) for text in texts)
    assert draw(kind, count) == texts
    assert count == 0 or draw(kind, count, seed=1) != texts


def test_uuids_are_of_version_4() -> None:
    for text in draw("uuids", 300):
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert (parsed.version, parsed.variant) == (4, uuid.RFC_4122)


def test_words_grow_when_pairs_run_out() -> None:
    pairs = len(FIRST) * len(SECOND)
    assert {text.count("-") for text in draw("words", pairs)} == {1}
    assert {text.count("-") for text in draw("words", pairs + 1)} == {2}
    assert pairs * len(FIRST) > 400_000
    with pytest.raises(InputError, match=r"config.data"):
        draw("words", pairs * len(FIRST) + 1)
