"""Lines and files without an end are told in one sentence, wherever foreign files are read."""

from __future__ import annotations

import contextlib
import gzip
import io
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from qrag_jax.data.records import read_records, read_text
from qrag_jax.errors import InputError
from qrag_jax.metrics.rows import RETRIEVALS
from qrag_jax.runtime import bounded_files
from qrag_jax.runtime.bounded_files import check_links, mapped_array

MIB = 2**20


def test_lines_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_files, "MAX_LINE_BYTES", 4 * MIB)
    line = b"x" * (4 * MIB - 1) + b"\n"
    found = list(bounded_files.lines(io.BytesIO(line * 2 + b"y"), Path("a"), ""))
    assert found == [line, line, b"y"]
    with pytest.raises(InputError, match=r"a, line 2, is longer than 4 MiB"):
        list(bounded_files.lines(io.BytesIO(b"\n" + b"x" + line), Path("a"), ""))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json.gz", "a.txt.gz", "log"])
def test_what_has_no_end_is_refused_and_a_part_is_read(name: str, tmp_path: Path) -> None:
    """The real limits, of lines and of what gzip may unpack to."""
    path = tmp_path / name
    if name.endswith("gz"):
        with gzip.open(path, "wb", 9) as file:
            for _ in range(150):
                file.write(b" " * MIB)
    else:
        with path.open("wb") as file:
            file.truncate(300 * MIB)  # zeros that take no room on the disk
    reads = {"a.txt.gz": read_text, "log": RETRIEVALS.read_partial}
    read = reads.get(name, lambda path: list(read_records(path)))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="64 MiB"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 200 * MIB
    finally:
        tracemalloc.stop()


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
