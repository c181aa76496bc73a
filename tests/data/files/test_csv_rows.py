"""Reading CSV and Parquet as records, and every way in which a table can be broken."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest

from qrag_jax.data.files.records import find_split, read_records
from qrag_jax.errors import InputError

RECORDS = [
    {"id": "a", "text": 'comma, "quoted"\nand a line', "more": None},
    {"id": "b", "text": "zwölf\u2028drei", "more": "x"},
]


def written(path: Path) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, ["id", "text", "more"])
        table.writeheader()
        table.writerows(RECORDS)
    return path


def message(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        list(read_records(path))
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_a_table_gives_its_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "r.csv")
    read = list(read_records(path))
    assert [record for _, record in read] == RECORDS
    assert [where for where, _ in read] == ["r.csv:3", "r.csv:4"]
    packed = tmp_path / "r.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [record for _, record in read_records(packed)] == RECORDS


def test_cells_may_be_as_long_as_documents(tmp_path: Path) -> None:
    chunks = json.dumps(["word " * 100] * 1000)  # half a megabyte
    path = tmp_path / "r.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["chunks"], [chunks]])
    assert [record["chunks"] for _, record in read_records(path)] == [chunks]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a,b\n1,2,3\n", "line 2, has 3 cells, but there are 2 columns; put a text"),
        (b"a,b\n1\n", "line 2, has 1 cells, but there are 2 columns"),
        (b"a,a\n1,2\n", "line 1, has an empty name or one name twice"),
        (b"a,,b\n1,2,3\n", "line 1, has an empty name or one name twice"),
        (b'a,b\n"1"x,2\n', "line 2, is not CSV"),
        (b'a,b\n"1,2\n', "line 2, is not CSV"),
        (b"a\n\xff\n", "line 2, is not UTF-8 at byte 0; save it as UTF-8"),
        (b"a,b\n", "is empty; it should hold one record at least"),
        (b"", "is empty; it should hold one record at least"),
    ],
)
def test_broken_tables(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "r.csv"
    path.write_bytes(data)
    assert says in message(path)


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "qrag_jax[parquet]" in message(path)


def test_files_of_a_split(tmp_path: Path) -> None:
    for name in ("train.csv", "train.csv.gz", "train-00001.parquet", "dev.parquet", "train.txt"):
        (tmp_path / name).touch()
    names = [path.name for path in find_split(tmp_path, "train", ("official.json",))]
    assert names == ["train.csv", "train-00001.parquet"]
    assert [p.name for p in find_split(tmp_path, "dev", ("dev.jsonl",))] == ["dev.parquet"]
