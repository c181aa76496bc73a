"""Lines and files without an end are told in one sentence, wherever foreign files are read."""

from __future__ import annotations

import contextlib
import gzip
import io
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.data.records import read_records, read_text
from qrag_jax.errors import InputError
from qrag_jax.metrics.rows import RETRIEVALS, read_retrievals
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.bounded_files import check_links, mapped_array

MIB = 2**20


def message(read: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        read()
    told = str(caught.value)
    assert "\n" not in told
    assert len(told) < 500
    return told


def test_lines_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "MAX_LINE_BYTES", 4 * MIB)
    path = Path("a.jsonl")
    line = b"x" * (4 * MIB - 1) + b"\n"
    assert list(bounded_files.lines(io.BytesIO(line * 2 + b"y"), path, "")) == [line, line, b"y"]
    told = message(lambda: list(bounded_files.lines(io.BytesIO(b"\n" + b"x" + line), path, "do")))
    assert told == "a.jsonl, line 2, is longer than 4 MiB; do"


def peak_of(read: Callable[[], object]) -> tuple[str, int]:
    """The refusal, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        return message(read), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(read_records(path)),
        read_retrievals,
        RETRIEVALS.read_partial,
    ],
    ids=["records", "retrieval log", "log gone on with"],
)
def test_a_line_without_an_end_is_refused_everywhere(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    """The real limit: of 300 MiB without a newline a quarter is read."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(300 * MIB)  # zeros that take no room on the disk
    told, peak = peak_of(lambda: read(path))
    assert f"{path}, line 1, is longer than 64 MiB" in told
    assert peak < 200 * MIB
    assert path.stat().st_size == 300 * MIB  # nothing is lost


def test_packed_line_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(300):
            file.write(b" " * MIB)
    assert path.stat().st_size < 2 * MIB
    told, peak = peak_of(lambda: list(read_records(path)))
    assert "line 1, is longer than 64 MiB" in told
    assert peak < 200 * MIB


@pytest.mark.parametrize("name", ["a.json.gz", "a.txt.gz"])
def test_gzip_that_unpacks_without_an_end(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", 9) as file:
        file.write(b"[")
        for _ in range(150):
            file.write(b"  " * (MIB // 2))
    assert path.stat().st_size < 0.3 * MIB
    read = read_text if name.endswith("txt.gz") else lambda path: list(read_records(path))
    assert "has more than 64 MiB unpacked, too much to read whole" in message(lambda: read(path))


def test_large_file_that_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "MAX_WHOLE_BYTES", 2 * MIB)
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b" " * MIB + b'{"a": 1}]')
    assert [record for _, record in read_records(path)] == [{"a": 1}]
    path.write_bytes(b"[" + b" " * (2 * MIB) + b'{"a": 1}]')
    assert "has more than 2 MiB unpacked" in message(lambda: list(read_records(path)))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("passages.jsonl", "../secret"),
        ("passages.jsonl", "../folder-of-another/secret"),  # begins like the folder's own name
        ("inner/deep", "/etc"),
        ("circle", "circle"),
    ],
)
def test_links_out_of_a_folder_are_refused(name: str, target: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "folder-of-another").mkdir()
    for path in ("secret", "folder-of-another/secret"):
        (tmp_path / path).write_text("mine alone")
    (folder / name).symlink_to(target)
    with pytest.raises(InputError, match=f"{name} is a link out of"):
        check_links(folder)


def test_links_within_a_folder_and_to_it_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a").write_text("a")
    (folder / "b").symlink_to("a")
    (folder / "c").symlink_to(folder / "a")
    (tmp_path / "link").symlink_to(folder)
    check_links(folder)
    check_links(tmp_path / "link")


def test_a_header_of_an_array_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(3))
    assert mapped_array(path).tolist() == [0, 1, 2]
    data = path.read_bytes()
    for place in range(6, 80):
        for byte in b"({'\"\x00,#":
            path.write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
            with contextlib.suppress(ValueError, OSError):
                mapped_array(path)
