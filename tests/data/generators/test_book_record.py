"""The record of a run's books: what is no record is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from qrag_jax.data.generators.book_record import NAME, check_unseen
from qrag_jax.data.generators.noise import NoiseConfig
from qrag_jax.errors import InputError


def refusal(workdir: Path) -> str:
    with pytest.raises(InputError) as caught:
        check_unseen(workdir, [NoiseConfig("books", source="babilong")])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[" * 100_000 + "]" * 100_000,
        '{"babilong": ["a book"]}',
        '{"babilong": {"a book": ["its digest"]}}',
        "null",
    ],
    ids=["no_json", "deep", "list", "list_of_digests", "null"],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert refusal(tmp_path) == (
        f"{tmp_path / NAME} is broken; restore it from a backup, or train anew."
    )


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert f"{tmp_path / NAME} cannot be read (Is a directory); " in refusal(tmp_path)
