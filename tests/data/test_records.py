"""Files of records, and corpora: places of faults, files of a split, columns.

Round trips and damaged files of every format: tests/conformance/test_sources.py.
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.corpora import BEIR_HEADER, Columns, read_corpus, read_qrels
from qrag_jax.data.long_docs import read_stories
from qrag_jax.data.records import load_hub, read_records, split_files
from qrag_jax.data.sample import Passage
from qrag_jax.errors import InputError
from qrag_jax.systems.indexing import IndexSettings, read_passages
from tests.support.worlds import write_lines

RECORDS = [{"_id": "a", "n": 1}, {"_id": "b", "n": "zwölf\u2028drei\u0085"}, {"_id": "c"}]


def refused(path: Path, *named: str, read: Callable[[Path], Any] = read_records) -> None:
    """In one line, which has the file's name and these words."""
    with pytest.raises(InputError, match=re.escape(path.name)) as caught:
        list(read(path))
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value).replace(str(path), "") for word in named)


def documents(path: Path, **columns: Any) -> list[Passage]:
    return [passage for _, passage in read_corpus(path, Columns(**columns))]


# ---------------------------------------------------------------- records


@pytest.mark.parametrize(
    ("name", "data", "at"),
    [
        *(("r.csv", b"a,b\n", "empty"), ("r.csv", b"a,b\n1,2,3\n", "2")),
        *(("r.json", b'[\n{"_id": "a"},\n{"_id": "b"\n', "4"), ("r.json", b'[{"a": 1}, 3]', "2")),
        *(("r.jsonl", b'{}\n\n{"a":\n', "3"), ("r.jsonl", b"{}\n\xff\n", "2")),
    ],
)
def test_faults_have_their_place(tmp_path, name, data, at) -> None:
    (tmp_path / name).write_bytes(data)
    refused(tmp_path / name, at)


def test_faults_of_stories_and_judgements_have_their_line(tmp_path: Path) -> None:
    for good, faults, read in (
        ("1 Ada ran.", ("Ada went.", "3 A?\t\t1", "3 A?\ta\t2"), read_stories),
        ("q 0 d 1", ("q d 1", "q 0 d 0.5", "q 0 d 2"), read_qrels),
        (BEIR_HEADER, ("q\t\t1", "q\td\t0.5"), read_qrels),
    ):
        for fault in faults:
            (tmp_path / "file").write_text(f"{good}\n{fault}\n")
            refused(tmp_path / "file", "line 2", read=read)


def test_lines_are_read_one_by_one_and_a_cut_gzip_up_to_its_end(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "r.jsonl", [*RECORDS, 3])
    rows = read_records(path)
    assert [next(rows)[1] for _ in RECORDS] == RECORDS
    # Stored, not deflated, so that the cut leaves exactly the first two lines and half the third.
    whole = gzip.compress(path.read_bytes(), compresslevel=0)
    (tmp_path / "r.jsonl.gz").write_bytes(whole[: whole.index(b'"c"')])
    refused(tmp_path / "r.jsonl.gz", "record 2")
    chunks = json.dumps(["word " * 100] * 1000)  # half a megabyte: too much for the library's csv
    (tmp_path / "r.csv").write_text('chunks\n"' + chunks.replace('"', '""') + '"\n')
    assert [record["chunks"] for _, record in read_records(tmp_path / "r.csv")] == [chunks]


def test_the_files_of_a_split(tmp_path: Path) -> None:
    """The official file alone; else all that begin with the split, a file and its gzip once."""
    official = ("hotpot_train_v1.1.json",)
    several = "train_b.jsonl.gz train.json train.txt open_train.jsonl dev.jsonl train_c.jsonl.part"
    for number, (there, expected) in enumerate(
        (
            ("hotpot_train_v1.1.jsonl.gz train_more.jsonl", "hotpot_train_v1.1.jsonl.gz"),
            (several, "train.json train_b.jsonl.gz"),
            ("train.csv train.csv.gz train-01.parquet", "train.csv train-01.parquet"),
        )
    ):
        folder = tmp_path / str(number)
        (folder / "train_folder.json").mkdir(parents=True)
        for name in there.split():
            (folder / name).touch()
        files = split_files(folder, "train", official)
        assert [path.name for path in files] == expected.split()
        assert split_files(files[0], "any", official) == files[:1]  # a file is its own split


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"qrag_jax\[parquet\]"):
        list(read_records(tmp_path / "train.parquet"))
    with pytest.raises(InputError, match=r"qrag_jax\[hub\]"):
        load_hub("hotpotqa/hotpot_qa", "distractor", "validation")


# ---------------------------------------------------------------- corpora


def test_columns_of_other_names_and_ids_that_are_numbers(tmp_path: Path) -> None:
    rows = [{"docid": 7, "body": "A"}, {"docid": 8, "head": "H", "body": "B", "text": "else"}]
    path = write_lines(tmp_path / "c.jsonl", rows)
    columns = Columns.parse("id=docid,title=head,text=body")
    assert [passage for _, passage in read_corpus(path, columns)] == [
        Passage("7", "A", "", {}),
        Passage("8", "B", "H", {"text": "else"}),
    ]
    (_, (_, bare)) = read_corpus(path, Columns.parse("id=docid,title=,text=body", "head"))
    assert bare == Passage("8", "B", "", {"head": "H"})
    refused(path, "haed", read=lambda at: documents(at, id="docid", text="body", title="haed"))


@pytest.mark.parametrize("name", ["c.parquet", "c.jsonl"])
def test_nulls_times_and_nan_become_what_json_holds(tmp_path: Path, name: str) -> None:
    noon = datetime.datetime(2026, 1, 2, 12)
    rows: list[dict[str, Any]] = [
        {"id": "a", "text": "t", "title": None, "day": noon.date(), "at": [noon], "n": math.nan},
        {"id": "b", "text": None, "title": None, "day": None, "at": [], "n": 0.5},
    ]
    if name == "c.jsonl":
        dated = json.loads(json.dumps(rows, default=lambda value: value.isoformat()))
        path = write_lines(tmp_path / name, dated)
    else:
        pa, path = pytest.importorskip("pyarrow"), tmp_path / name
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(rows), path)
    assert documents(path) == [
        Passage("a", "t", "", {"day": "2026-01-02", "at": ["2026-01-02T12:00:00"], "n": None}),
        Passage("b", "", "", {"day": None, "at": [], "n": 0.5}),
    ]
    read = read_passages(path, IndexSettings(skip_empty=True))
    assert [passage and passage.name for _, passage in read] == ["a", None]


def test_documents_are_refused_with_line_and_field(tmp_path: Path) -> None:
    for field, record in (
        ("id", {"id": True, "text": "t"}),
        ("text", {"id": "b"}),
        ("title", {"id": "b", "text": "t", "title": 3}),
    ):
        path = write_lines(tmp_path / "c.jsonl", [{"id": "a", "title": "T", "text": "t"}, record])
        refused(path, ":2", f"'{field}'", read=documents)
