"""Corpora in every layout, and every way in which one can be broken."""

from __future__ import annotations

import datetime
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qrag_jax.data.files.beir import Document
from qrag_jax.data.files.corpora import Columns, corpus_files, read_corpus, split_contents
from qrag_jax.errors import InputError
from qrag_jax.systems.corpus_source import CorpusSource

PLAIN = [
    {"id": "a", "title": "One", "text": "first text", "year": 1999},
    {"id": "b", "title": "", "text": "zwölf\u2028drei", "year": None},
]
DOCUMENTS = [
    Document("a", "first text", "One", {"year": 1999}),
    Document("b", "zwölf\u2028drei", "", {"year": None}),
]


def lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def written(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    if path.name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.Table.from_pylist(records), path)
    else:
        data = lines(records)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def documents(path: Path, **columns: Any) -> list[Document]:
    return [read.document for read in read_corpus(path, Columns(**columns))]


def message(path: Path, **columns: Any) -> str:
    with pytest.raises(InputError) as caught:
        documents(path, **columns)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.json", "c.parquet"])
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, PLAIN)
    assert documents(path) == DOCUMENTS
    wheres = [read.where for read in read_corpus(path)]
    form = "c.parquet, row {}" if name.endswith("parquet") else name + ":{}"
    assert wheres == [form.format(1), form.format(2)]


def test_beir_folders_and_folders_of_parts(tmp_path: Path) -> None:
    beir = [{"_id": "x", "title": "T", "text": "t", "metadata": {"url": "u"}, "k": 1}]
    (tmp_path / "beir").mkdir()
    written(tmp_path / "beir" / "corpus.jsonl.gz", beir)
    written(tmp_path / "beir" / "queries.jsonl", [{"_id": "q", "text": "no passage"}])
    assert documents(tmp_path / "beir") == [Document("x", "t", "T", {"k": 1, "url": "u"})]
    (tmp_path / "parts").mkdir()
    for number, record in enumerate(PLAIN):
        written(tmp_path / "parts" / f"part-{number}.jsonl", [record])
    (tmp_path / "parts" / "README.md").write_text("not of the corpus")
    assert documents(tmp_path / "parts") == DOCUMENTS


def test_contents_of_wiki18_hold_the_title_in_quotes(tmp_path: Path) -> None:
    record = {"id": "0", "contents": '"Aaron"\nAaron ( or ; "Ahärôn") is a "prophet"\nand priest.'}
    (document,) = documents(written(tmp_path / "w.jsonl", [record]))
    assert document == Document(
        "0", 'Aaron ( or ; "Ahärôn") is a "prophet"\nand priest.', "Aaron", {}
    )
    # As FlashRAG advises for passages without titles, and as other makers leave it.
    assert split_contents("\nonly text") == ("", "only text")
    assert split_contents("No quotes\ntext") == ("", "No quotes\ntext")
    assert split_contents('"all of it in quotes"') == ("", '"all of it in quotes"')
    assert split_contents('"The "inner" one"\ntext') == ('The "inner" one', "text")
    (whole,) = documents(tmp_path / "w.jsonl", title="")
    assert (whole.title, whole.text) == ("", record["contents"])


@pytest.mark.parametrize("text", ["text", "contents"])
def test_any_record_may_have_a_title(tmp_path: Path, text: str) -> None:
    records: list[dict[str, Any]] = [{"id": "a", text: "no"}, {"id": "b", text: "t", "title": "B"}]
    records += [{"id": "c", text: '"C"\nt'}, {"id": "d", text: "t", "title": None}]
    for order in (records, records[::-1]):
        titles = {d.name: d.title for d in documents(written(tmp_path / "c.jsonl", order))}
        assert titles == {"a": "", "b": "B", "c": "C" if text == "contents" else "", "d": ""}
    named = [{"id": "a", "text": "t"}, {"id": "b", "text": "t", "head": "H"}]
    path = written(tmp_path / "c.jsonl", named)
    assert [document.title for document in documents(path, title="head")] == ["", "H"]
    with pytest.raises(InputError, match="haed"):
        documents(path, title="haed")


@pytest.mark.parametrize("name", ["c.json", "c.jsonl"])
def test_corpora_of_the_deepretrieval_remake(tmp_path: Path, name: str) -> None:
    records: list[dict[str, Any]] = [
        {"doc_id": "d1", "text": "first"},
        {"doc_id": 2, "text": "t", "title": "T"},
    ]
    path = tmp_path / name
    path.write_bytes(json.dumps(records).encode() if name == "c.json" else lines(records))
    found = documents(path)
    assert found[0] == Document("d1", "first", "", {})
    assert (found[1].name, found[1].text) == ("2", "t")
    # A document's own id goes before that of what it is a part of.
    written(tmp_path / "parts.jsonl", [{"id": "a#1", "doc_id": "a", "text": "t"}])
    assert documents(tmp_path / "parts.jsonl") == [Document("a#1", "t", "", {"doc_id": "a"})]


def test_columns_of_other_names_and_ids_that_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "c.jsonl", [{"docid": 7, "head": "H", "body": "B", "text": "else"}])
    columns = Columns.parse("id=docid,title=head,text=body")
    (read,) = read_corpus(path, columns)
    assert read.document == Document("7", "B", "H", {"text": "else"})
    (bare,) = read_corpus(path, Columns.parse("id=docid,title=,text=body", "head"))
    assert bare.document == Document("7", "B", "", {"head": "H"})
    assert documents(path, id="docid", text="body", metadata=())[0].metadata == {}


@pytest.mark.parametrize("given", ["id", "name=x", "text=", "id=a;text=b,", "=x"])
def test_columns_are_refused(given: str) -> None:
    if given == "id=a;text=b,":  # a name may hold anything but a comma
        assert Columns.parse(given).id == "a;text=b"
        return
    with pytest.raises(InputError, match="--columns has"):
        Columns.parse(given)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"id": "", "text": "t"}, "c.jsonl:2: field 'id' is ''"),
        ({"id": None, "text": "t"}, "c.jsonl:2: field 'id' is None"),
        ({"id": True, "text": "t"}, "c.jsonl:2: field 'id' is True"),
        ({"text": "t"}, "c.jsonl:2: field 'id' is missing"),
        ({"id": "b"}, "c.jsonl:2: field 'text' is missing"),
        ({"id": "b", "text": ["t"]}, "c.jsonl:2: field 'text' is ['t']"),
        ({"id": "b", "text": "t", "title": 3}, "c.jsonl:2: field 'title' is 3"),
    ],
)
def test_records_are_refused_with_their_line(
    tmp_path: Path, record: dict[str, Any], told: str
) -> None:
    first = {"id": "a", "title": "T", "text": "t"}
    assert told in message(written(tmp_path / "c.jsonl", [first, record]))


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
        Document("a", "t", "", kept),
        Document("b", "", "", {"day": None, "at": [], "n": 0.5}),
    ]
    source = CorpusSource(path, Columns(), skip_empty=True)
    assert [read and read.document.name for read in source.read()] == ["a", None]


@pytest.mark.parametrize("value", [b"bytes", math.inf, datetime.timedelta(1)])
def test_further_fields_that_json_cannot_hold_are_named(tmp_path: Path, value: Any) -> None:
    path = written(tmp_path / "c.parquet", [{"id": "a", "text": "t", "odd": value}])
    told = message(path)
    assert "c.parquet, row 1" in told
    assert "'odd'" in told


def test_a_field_that_is_nested_without_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    nested = '{"a":' * 900 + "1" + "}" * 900
    path.write_text(f'{{"id": "a", "text": "t", "odd": {nested}}}\n')
    told = message(path)
    assert "line 1" in told or "c.jsonl:1" in told
    assert "'odd'" in told


def test_a_first_record_without_the_columns_lists_what_is_there(tmp_path: Path) -> None:
    path = written(tmp_path / "c.jsonl", [{"docid": "1", "body": "b"}])
    told = message(path)
    assert "no field '_id' or 'id' or 'doc_id', only 'docid', 'body'" in told
    assert "--columns=id=NAME" in told
    assert "no field 'txt'" in message(path, id="docid", text="txt")


def test_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(lines(PLAIN) + b'{"id": "c", "text": \n')
    assert "line 3, is not JSON" in message(path)
    whole = gzip.compress(lines([{"id": str(n), "text": f"text {n * n}"} for n in range(4000)]))
    cut = tmp_path / "c.jsonl.gz"
    cut.write_bytes(whole[:-9])
    assert "is truncated after record" in message(cut)
    cut.write_bytes(b"no gzip")
    assert "is not sound gzip" in message(cut)
    path.write_bytes(b"")
    assert "is empty" in message(path)


def test_broken_parquet(tmp_path: Path) -> None:
    records = [{"id": n, "text": f"text {n * n}"} for n in range(4000)]
    path = written(tmp_path / "c.parquet", records)
    whole = path.read_bytes()
    for data in (b"", b"PAR1", whole[:-9], whole[:200] + bytes(2000) + whole[2200:]):
        path.write_bytes(data)
        assert "cannot be read as Parquet after row 0" in message(path)
    written(path, [])
    assert "is empty" in message(path)


def test_what_is_no_corpus(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "nowhere")
    assert "has neither corpus.jsonl nor" in message(tmp_path)
    (tmp_path / "c.tsv").write_text("id\ttext\n")
    assert "ends in none of .json" in message(tmp_path / "c.tsv")
    assert corpus_files(written(tmp_path / "c.jsonl", PLAIN)) == [tmp_path / "c.jsonl"]
