"""Corpora in every layout, and every way in which one can be broken."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.corpora import Columns, read_corpus, split_contents
from qrag_jax.data.queries import read_queries
from qrag_jax.data.sample import Passage
from qrag_jax.errors import InputError
from qrag_jax.systems.indexing import CorpusSource
from tests.support.worlds import write_lines

PLAIN = [
    {"id": "a", "title": "One", "text": "first text", "year": 1999},
    {"id": "b", "title": "", "text": "zwölf\u2028drei", "year": None},
]
DOCUMENTS = [
    Passage("a", "first text", "One", {"year": 1999}),
    Passage("b", "zwölf\u2028drei", "", {"year": None}),
]


def written(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    if path.name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(records), path)
        return path
    return write_lines(path, records)


def documents(path: Path, **columns: Any) -> list[Passage]:
    return [read.document for read in read_corpus(path, Columns(**columns))]


def refused(path: Path, *named: str, **columns: Any) -> None:
    """In one line, which has the file's name and these words."""
    with pytest.raises(InputError, match=re.escape(path.name)) as caught:
        documents(path, **columns)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in named)


def test_beir_folders_and_folders_of_parts(tmp_path: Path) -> None:
    beir = [{"_id": "x", "title": "T", "text": "t", "metadata": {"url": "u"}, "k": 1}]
    beir += [{"_id": "a", "title": None, "text": "", "metadata": None}]
    (tmp_path / "beir").mkdir()
    written(tmp_path / "beir" / "corpus.jsonl.gz", beir)
    written(tmp_path / "beir" / "queries.jsonl", [{"_id": "q", "text": "no passage"}])
    first = Passage("x", "t", "T", {"k": 1, "url": "u"})
    assert documents(tmp_path / "beir") == [first, Passage("a", "", "", {})]
    (tmp_path / "parts").mkdir()
    for number, record in enumerate(PLAIN):
        written(tmp_path / "parts" / f"part-{number}.jsonl", [record])
    (tmp_path / "parts" / "README.md").write_text("not of the corpus")
    assert documents(tmp_path / "parts") == DOCUMENTS


def test_contents_of_wiki18_hold_the_title_in_quotes(tmp_path: Path) -> None:
    record = {"id": "0", "contents": '"Aaron"\nAaron ( or ; "Ahärôn") is a "prophet"\nand priest.'}
    (document,) = documents(written(tmp_path / "w.jsonl", [record]))
    assert document == Passage(
        "0", 'Aaron ( or ; "Ahärôn") is a "prophet"\nand priest.', "Aaron", {}
    )
    # As FlashRAG advises for passages without titles, and as other makers leave it.
    assert split_contents("\nonly text") == ("", "only text")
    assert split_contents("No quotes\ntext") == ("", "No quotes\ntext")
    assert split_contents('"all of it in quotes"') == ("", '"all of it in quotes"')
    assert split_contents('"The "inner" one"\ntext') == ('The "inner" one', "text")
    (whole,) = documents(tmp_path / "w.jsonl", title="")
    assert (whole.title, whole.text) == ("", record["contents"])


def test_columns_of_other_names_and_ids_that_are_numbers(tmp_path: Path) -> None:
    rows = [{"docid": 7, "body": "A"}, {"docid": 8, "head": "H", "body": "B", "text": "else"}]
    path = written(tmp_path / "c.jsonl", rows)
    columns = Columns.parse("id=docid,title=head,text=body")
    first, second = (read.document for read in read_corpus(path, columns))
    assert (first, second) == (
        Passage("7", "A", "", {}),
        Passage("8", "B", "H", {"text": "else"}),
    )
    (_, bare) = read_corpus(path, Columns.parse("id=docid,title=,text=body", "head"))
    assert bare.document == Passage("8", "B", "", {"head": "H"})
    refused(path, "haed", id="docid", text="body", title="haed")


@pytest.mark.parametrize("name", ["c.parquet", "c.jsonl"])
def test_nulls_times_and_nan_become_what_json_holds(tmp_path: Path, name: str) -> None:
    noon = datetime.datetime(2026, 1, 2, 12)
    records: list[dict[str, Any]] = [
        {"id": "a", "text": "t", "title": None, "day": noon.date(), "at": [noon], "n": math.nan},
        {"id": "b", "text": None, "title": None, "day": None, "at": [], "n": 0.5},
    ]
    if name == "c.jsonl":
        dated = json.loads(json.dumps(records, default=lambda value: value.isoformat()))
        records = dated
    kept = {"day": "2026-01-02", "at": ["2026-01-02T12:00:00"], "n": None}
    path = written(tmp_path / name, records)
    assert documents(path) == [
        Passage("a", "t", "", kept),
        Passage("b", "", "", {"day": None, "at": [], "n": 0.5}),
    ]
    source = CorpusSource(path, Columns(), skip_empty=True)
    assert [read and read.document.name for read in source.read()] == ["a", None]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"id": None, "text": "t"}, "id"),
        ({"id": True, "text": "t"}, "id"),
        ({"id": "b"}, "text"),
        ({"id": "b", "text": "t", "title": 3}, "title"),
    ],
)
def test_records_are_refused_with_their_line(tmp_path, record, named) -> None:
    first = {"id": "a", "title": "T", "text": "t"}
    refused(written(tmp_path / "c.jsonl", [first, record]), "c.jsonl:2", f"'{named}'")


def test_a_splits_own_queries_go_before_all(tmp_path: Path) -> None:
    rows = [{"_id": "1", "text": "one"}, {"_id": "2", "text": "two"}]
    written(tmp_path / "queries.jsonl", rows)
    written(tmp_path / "queries_dev.jsonl.gz", rows[1:])
    assert read_queries(tmp_path) == read_queries(tmp_path, "test") == {"1": "one", "2": "two"}
    assert read_queries(tmp_path, "dev") == {"2": "two"}
    for wrong in ({"_id": "1", "text": "again"}, {"_id": "3", "text": " "}):
        written(tmp_path / "queries.jsonl", [*rows, wrong])
        with pytest.raises(InputError, match=r"queries\.jsonl:3"):
            read_queries(tmp_path)


@pytest.mark.parametrize("text", ["text", "contents"])
def test_any_record_may_have_a_title(tmp_path: Path, text: str) -> None:
    """Also one after the first."""
    records: list[dict[str, Any]] = [{"id": "a", text: "no"}, {"id": "b", text: "t", "title": "B"}]
    records += [{"id": "c", text: '"C"\nt'}, {"id": "d", text: "t", "title": None}]
    for order in (records, records[::-1]):
        titles = {d.name: d.title for d in documents(written(tmp_path / "c.jsonl", order))}
        assert titles == {"a": "", "b": "B", "c": "C" if text == "contents" else "", "d": ""}
