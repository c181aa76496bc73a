"""Reads collections in BEIR's layout (Thakur et al., 2021): a corpus, queries and judgements.

A folder holds `corpus.jsonl`, lines `{"_id", "title", "text", "metadata"}`, and `queries.jsonl`,
lines `{"_id", "text"}`. The judgements of a split are in `qrels/SPLIT.tsv` or `qrels_SPLIT.tsv`;
`metrics.trec` reads them. A split may have queries of its own, `queries_SPLIT.jsonl`. Each file may
be gzip'd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qrag_jax.data.files.records import read_records
from qrag_jax.errors import InputError

_OWN = ("_id", "title", "text", "metadata")


class Document(NamedTuple):
    """One document; the fields are those of `retrieval.protocol.Passage`, in its order.

    Attributes:
        name: `_id`.
        text, title: either may be empty; the old collections have documents without a word.
        metadata: the fields of `metadata` and the line's further ones.
    """

    name: str
    text: str
    title: str
    metadata: Mapping[str, Any]


def read_documents(folder: Path) -> Iterator[Document]:
    """Yields the documents of a folder in the file's order, a line at a time.

    It does not look for two documents of one name: that takes all names in memory.
    """
    for where, record in read_records(_one_of(folder, ["corpus.jsonl"])):
        name, text = _text(where, record, "_id"), _text(where, record, "text")
        title = _text(where, record, "title") if record.get("title") is not None else ""
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise InputError(f"{where}: field 'metadata' is no JSON object; write one, or none")
        further = {key: value for key, value in record.items() if key not in _OWN}
        yield Document(name, text, title, further | metadata)


def is_collection(folder: Path) -> bool:
    """Whether a folder has queries or judgements of BEIR's layout, so that it should be one."""
    names = ("queries*.jsonl", "queries*.jsonl.gz", "qrels*.tsv", "qrels*.tsv.gz", "qrels/*.tsv*")
    return any(next(folder.glob(name), None) is not None for name in names)


def read_queries(folder: Path, split: str = "") -> dict[str, str]:
    """The queries' texts by `_id`: those of the split if it has a file of its own, else all."""
    queries: dict[str, str] = {}
    for where, record in read_records(queries_path(folder, split)):
        name, text = _text(where, record, "_id"), _text(where, record, "text")
        if not text.strip():
            raise InputError(f"{where}: the query {name} has no text; write one, or drop the line")
        if name in queries:
            raise InputError(f"{where}: there is a query {name} before; give each its own '_id'")
        queries[name] = text
    return queries


def queries_path(folder: Path, split: str = "") -> Path:
    """The file with the queries of a split if it has its own, else the one with those of all."""
    names = [f"queries_{split}.jsonl"] if split else []
    return _one_of(folder, [*names, "queries.jsonl"])


def qrels_path(folder: Path, split: str) -> Path:
    """The file with the judgements of a split, such as "test"."""
    return _one_of(folder, [f"qrels/{split}.tsv", f"qrels_{split}.tsv"])


def _one_of(folder: Path, names: list[str]) -> Path:
    """The first of the files that is there, gzip'd or not."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise InputError(
        f"the folder {folder} has no {' or '.join(names)} (or .gz); give a folder in BEIR's layout"
    )


def _text(where: str, record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or (field == "_id" and not value):
        raise InputError(f"{where}: field {field!r} is missing or is no text; write it as a string")
    return value
