"""Files of records and of text: what holds beyond a round trip, and which files are found."""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.reading import load_samples
from qrag_jax.data.records import load_hub, read_records, split_files
from qrag_jax.errors import InputError

RECORDS = [
    {"_id": "a", "n": 1},
    {"_id": "b", "n": "zwölf\u2028drei\u0085"},
    {"_id": "c", "n": None},
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def refused(path: Path, read: Callable[[Path], Any] = lambda path: [*read_records(path)]) -> str:
    """The one line, with the file in it, by which reading it to the end is refused."""
    with pytest.raises(InputError, match=re.escape(str(path))) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_long_files_and_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = read_records(write(tmp_path / "r.jsonl", LINES + b"broken\n"))
    assert [next(records)[1] for _ in RECORDS] == RECORDS  # streamed
    with pytest.raises(InputError, match="4"):
        next(records)
    chunks = json.dumps(["word " * 100] * 1000)  # half a megabyte
    with (tmp_path / "r.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["chunks"], [chunks]])
    assert [record["chunks"] for _, record in read_records(tmp_path / "r.csv")] == [chunks]
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # its package is not there
    assert "qrag_jax[parquet]" in refused(write(tmp_path / "train.parquet", b"PAR1"))


@pytest.mark.parametrize(
    ("name", "data", "at"),
    [
        ("r.jsonl.gz", b" \n\n", "empty"),
        ("r.csv", b"a,b\n", "empty"),
        ("r.jsonl", LINES + '{"_id": "Zürich"}'.encode("latin-1"), "4"),
        ("r.jsonl", LINES + b"[" * 100_000 + b"\nalso broken\n", "4"),
        ("r.json", b'[\n{"_id": "a"},\n{"_id": "b"\n', "4"),
        ("r.json", json.dumps({"records": RECORDS}, indent=1).encode(), "data"),
        ("r.json", b'[{"a": 1}, 3]', "2"),
        ("r.csv", b"a,b\n1,2,3\n", "2"),
        ("r.csv", b'a,b\n"1"x,2\n', "2"),
        ("r.csv", b"a\n\xff\n", "2"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path, name, data, at) -> None:
    assert at in refused(write(tmp_path / name, data)).replace(str(tmp_path), "")


def test_gzip_that_is_cut_or_none(tmp_path: Path) -> None:
    # Stored, not deflated, so that the cut leaves exactly the first two lines and half the third.
    whole = gzip.compress(LINES, compresslevel=0)
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(whole[: whole.index(LINES) + len(LINES) - 5])
    assert "record 2" in refused(path)
    damaged = bytearray(gzip.compress(LINES))
    damaged[len(damaged) // 2] ^= 0xFF
    for data in (bytes(damaged), LINES, b""):
        path.write_bytes(data)
        refused(path)
    refused(tmp_path / "none.jsonl")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(b"x")


OFFICIAL = ("hotpot_train_v1.1.json",)


@pytest.mark.parametrize(
    ("there", "split", "found"),
    [
        # The official file alone; else all that begin with the split, a file and its gzip once.
        ("hotpot_train_v1.1.jsonl.gz train_more.jsonl", "train", "hotpot_train_v1.1.jsonl.gz"),
        (
            "train_b.jsonl.gz train.json train.txt open_train.jsonl dev.jsonl train_c.jsonl.part",
            "train",
            "train.json train_b.jsonl.gz",
        ),
        ("train.jsonl train.jsonl.gz", "train", "train.jsonl"),
        ("train.csv train.csv.gz train-01.parquet", "train", "train.csv train-01.parquet"),
        ("dev.parquet train.csv", "dev", "dev.parquet"),
    ],
)
def test_the_files_of_a_split(tmp_path: Path, there: str, split: str, found: str) -> None:
    touch(tmp_path, *there.split())
    (tmp_path / "train_folder.json").mkdir()
    files = split_files(tmp_path, split, OFFICIAL)
    assert [path.name for path in files] == found.split()
    assert split_files(files[0], "any", OFFICIAL) == files[:1]  # a file is its own split


def test_without_the_package_of_the_hub_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"qrag_jax\[hub\]"):
        load_hub("hotpotqa/hotpot_qa", "distractor", "validation")
    for source in ("musique", "niah"):  # one is there, one is not
        with pytest.raises(InputError, match=r"data\.path"):
            load_samples(source, "", "dev")
