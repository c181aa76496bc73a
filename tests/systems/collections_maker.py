"""Small collections in BEIR's layout, and corpora in files of rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Judged = Mapping[str, tuple[str, Mapping[str, int]]]  # query's id → its text, its grades


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_collection(folder: Path, texts: Mapping[str, str], splits: Mapping[str, Judged]) -> Path:
    """Writes a folder in BEIR's layout.

    Args:
        texts: of the documents, by their ids.
        splits: the judged queries of each split.
    """
    write_lines(
        folder / "corpus.jsonl",
        ({"_id": name, "title": "", "text": text} for name, text in texts.items()),
    )
    queries = {name: text for split in splits.values() for name, (text, _) in split.items()}
    write_lines(
        folder / "queries.jsonl", ({"_id": name, "text": text} for name, text in queries.items())
    )
    (folder / "qrels").mkdir(exist_ok=True)
    for split, judged in splits.items():
        rows = [
            f"{name}\t{document}\t{grade}"
            for name, (_, grades) in judged.items()
            for document, grade in grades.items()
        ]
        text = "\n".join(["query-id\tcorpus-id\tscore", *rows])
        (folder / "qrels" / f"{split}.tsv").write_text(text + "\n")
    return folder


def write_rows(path: Path, queries: Sequence[tuple[str, str, Sequence[str]]]) -> Path:
    """Writes judged queries as rows: id, text, ids of relevant documents."""
    return write_lines(
        path,
        (
            {"id": name, "query": text, "relevant_doc_ids": [*documents]}
            for name, text, documents in queries
        ),
    )


def write_documents(path: Path, texts: Mapping[str, str]) -> Path:
    """Writes a corpus of rows, as remakes of DeepRetrieval have it."""
    return write_lines(path, ({"doc_id": name, "text": text} for name, text in texts.items()))
