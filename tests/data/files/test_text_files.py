"""Text files: both kinds are read, and everything unreadable is one sentence."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from qrag_jax.data.files.text_files import read_text, text_files
from qrag_jax.errors import InputError


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_text(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_plain_and_gzip_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    text = "Zoë said:\nno.\n"
    for data in (text.encode(), b"\xef\xbb\xbf" + text.encode()):
        (tmp_path / "a.txt").write_bytes(data)
        (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data))
        assert read_text(tmp_path / "a.txt") == text
        assert read_text(tmp_path / "b.txt.gz") == text


def test_unreadable_files(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.txt")
    cut = tmp_path / "cut.txt.gz"
    cut.write_bytes(gzip.compress(bytes(range(256)) * 99)[:100])
    assert "is truncated gzip; download it again" in refusal(cut)
    plain = tmp_path / "plain.txt.gz"
    plain.write_text("not gzip")
    assert "is not sound gzip" in refusal(plain)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("fine\nZoë\n".encode("latin-1"))
    assert "line 2, is not UTF-8; save the file as UTF-8" in refusal(latin)


def test_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt.gz", "b.txt.gz", "c.md"):
        (tmp_path / name).write_text("")
    (tmp_path / "d.txt").mkdir()
    assert [path.name for path in text_files(tmp_path)] == ["a.txt.gz", "b.txt"]
    with pytest.raises(InputError, match="does not exist; give a folder"):
        text_files(tmp_path / "none")
    with pytest.raises(InputError, match="is a file; give the folder"):
        text_files(tmp_path / "b.txt")
